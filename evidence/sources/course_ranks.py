"""A student's model on two cards (CS336, the second assignment): damek's, by hooks of his own.

Gradients are summed one by one, in their place, and where states are sharded, those of each second
parameter are on the other card. No wrapper of torch is used, and what NCCL sends lies in its place,
so that one rank runs as a plain loop: rank 0, which owns the first of each pair and one more.
Nobody empties the gradients (optimizer_state_sharding_accounting.py in cs336_systems).

Its allocator has expandable segments: what is left of a block is always split off from 512 bytes on
(`should_split` in c10/cuda/CUDACachingAllocator.cpp), so that a tensor counts with its own bytes.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from evidence.decoder import Decoder, Student
from evidence.decoder_training import AdamW, loss_of
from evidence.several import as_they_ran
from evidence.sources.course import UNKNOWN, XL_2025
from fake_cuda import Simulation, simulate

CARDS, UPDATES = 2, 3


def run(student: Student, shares: bool) -> None:
    """Steps of rank 0; the cache is emptied where the student reads how much is allocated."""
    model = Decoder(student)
    owned = list(model.parameters())[:: CARDS if shares else 1]
    optimizer = AdamW(owned, student.adamw)
    torch.cuda.empty_cache()
    here = [torch.empty(student.batch, student.length, dtype=torch.long) for _ in range(2)]
    words, targets = here
    for _ in range(UPDATES):
        # Rank 0 makes the texts of both, and keeps them until the next ones are there.
        everyone = [torch.zeros(CARDS * student.batch, student.length).long() for _ in here]
        logits = model(words)
        loss = loss_of(logits, targets, student.loss)
        loss.backward()
        torch.cuda.empty_cache()
        optimizer.step()
    del everyone


def standing(found: Simulation) -> list[int]:
    """Bytes that stood each time just before the cache was emptied."""
    now, seen = 0, []
    for _, size in found.log:
        now += -(-abs(size) // 512) * 512 * (1 if size > 0 else -1)
        if not size:
            seen.append(now)
    return seen


def peaks(student: Student, shares: bool) -> dict[str, int]:
    """What stands when the model has been built, and before the last step."""
    built, *_, before = standing(simulate(partial(run, student, shares), card=UNKNOWN))
    return {"allocated, model built": built, "allocated before the step": before}


def measured() -> Iterator[tuple[str, Callable]]:
    for length in (128, 256, 512):
        student = Student(
            **XL_2025, length=length, batch=2, code="2025", adamw="decay last", named=False
        )
        for name, shares in (("sharded", True), ("whole", False)):
            yield f"{name} states, length {length}, 2 cards", partial(peaks, student, shares)


PEAKS = {"course-damek-ranks": lambda: as_they_ran("course-damek-ranks", measured())}
