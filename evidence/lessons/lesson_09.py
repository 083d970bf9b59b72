"""Lesson 09: a 0.6-billion decoder on texts of changing lengths, and five ways to keep memory.

The texts are the longer functions of Python's standard library (over 256 tokens), four a batch,
each batch as long as its longest text. One prediction a run: its log is replayed with and without
the emptied cache.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import torch
from transformers import TrainerCallback

from fake_cuda import Allocator, MiB
from helpers import Prediction, language_modelling, predict, text_classification

BATCH, STEPS = 4, 12
ORDERS = {
    "as they come": lambda lengths: lengths,
    "short first": sorted,
    "long first": lambda lengths: sorted(lengths, reverse=True),
    "padded to 64": lambda lengths: [-(-n // 64) * 64 for n in lengths],
    "padded to the longest": lambda lengths: [max(lengths)] * len(lengths),
}


class Expandable(Allocator):
    """One segment for each pool, which grows at its end by pages."""

    def malloc(self, i: int, size: int) -> None:
        small = size <= MiB
        if not self.free[small] or self.free[small][-1][0] < size:
            self.grow(small, size)
        super().malloc(i, size)

    def grow(self, small: bool, size: int) -> None:
        page = (2 if small else 20) * MiB
        mine = [a for a, block in self.blocks.items() if block[1] == small]
        last = max(mine, default=0 if small else 2**50)
        length, _, is_free = self.blocks.get(last, (0, small, False))
        new = -(-(size - length * is_free) // page) * page
        self.put(last + length, new, small, False)
        self.reserved += new
        self.peak = max(self.peak, self.reserved)
        self.where["new"] = last + length
        self.release("new")


class EmptyAfterStep(TrainerCallback):
    def on_step_end(self, *_, **__):
        torch.accelerator.empty_cache()


@cache
def logged(order: str) -> Prediction:
    """A prediction that empties the cache twice a step: after the forward pass and at the end."""
    rows = text_classification("tiny", length=2048).data("train")["input_ids"]
    tokens = [n for n in (int(ids.ne(0).sum()) for ids in rows) if n > 256][: BATCH * STEPS]
    lengths = ORDERS[order]([max(tokens[k : k + BATCH]) for k in range(0, len(tokens), BATCH)])

    def fine_tuning():
        texts = [torch.zeros(n, dtype=torch.long) for n in lengths for _ in range(BATCH)]
        trainer = language_modelling("qwen3-0.6b").trainer(
            pretrained=False,
            data=[{"input_ids": text, "labels": text} for text in texts],
            use_cpu=True,
            dataloader_pin_memory=False,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            bf16=True,
            torch_empty_cache_steps=1,
        )
        trainer.add_callback(EmptyAfterStep())
        trainer.train()
        return trainer

    return predict(fine_tuning, gpu="A100-40GB")


def lengths() -> Iterator[tuple]:
    marks = {
        "default": lambda k: False,
        "emptied every step": lambda k: k % 2 == 0,
        "emptied every fourth step": lambda k: k % 8 == 0,
        "emptied between steps": lambda k: k % 2 == 1,
        "expandable": lambda k: False,
    }
    for order in ORDERS:
        for variant, keep in marks.items():

            def run(order=order, variant=variant, keep=keep):
                allocator, mark = Expandable() if variant == "expandable" else Allocator(), 0
                for number, size in logged(order).log:
                    if size or keep(mark):
                        allocator.step(number, size)
                    mark += not size
                return replace(logged(order), peak_reserved=allocator.peak)

            yield order, variant, run


SETS = (lengths,)
