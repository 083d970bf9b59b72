"""The rows of LitGPT's table (`litgpt.py`) that were run on several A10G: FSDP1 by Fabric.

This module is also the script of a rank. What is behind its choices (litgpt/finetune/full.py of
September 2024; strategies/fsdp.py and plugins/precision/fsdp.py in lightning/fabric of 2.3):

- Each block is a unit, and what it wraps is checkpointed; parameters, sums and buffers in bfloat16,
  the rotary tables among them.
- The batches of a step but the last are not reduced (`no_backward_sync`): their gradients stay
  whole on each card.
- What the model returns is turned into 32 bits, and the loss is taken in pieces, as on one card.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from evidence.cards import card
from evidence.litgpt_model import BF16, Block, Model, Shape
from evidence.several import as_they_ran
from evidence.sources.litgpt import GEMMA, PHI_2, STABLELM, handed_out, loss
from fake_cuda import simulate
from fake_cuda.scripts import Script

# Of each row its shape, how many cards there are, and how many batches a card takes for a step:
# global_batch_size, micro_batch_size and devices of config_hub/finetune/*/full.yaml.
RUNS: dict[str, tuple[Shape, int, int]] = {
    "gemma-2b full": (replace(GEMMA, rank=0, batch=1), 4, 4),
    "phi-2 full": (replace(PHI_2, rank=0), 2, 1),
    "stablelm-base-alpha-3b full": (replace(STABLELM, rank=0), 2, 4),
}


def sharded(shape: Shape) -> FSDP:
    """The model as Fabric sets it up."""
    model = FSDP(
        Model(shape),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(BF16, BF16, BF16),
        use_orig_params=True,
        device_id=torch.cuda.current_device(),
    )
    apply_activation_checkpointing(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
    return model


def train(shape: Shape, batches: int, steps: int = 3) -> None:
    """Steps of rank 0, each of so many batches. The logits of a batch stand until the next ones."""
    dist.init_process_group("nccl")
    model = sharded(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    for batch in range(1, steps * batches + 1):
        ids = torch.ones(shape.batch, shape.length, dtype=torch.long).to("cuda")
        targets = torch.ones_like(ids)[..., 1:]
        last = batch % batches == 0
        with nullcontext() if last else model.no_sync():
            logits = handed_out(model, ids, pieces=False)[..., :-1, :]
            (loss(logits, targets) / batches).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


def run(name: str) -> dict[str, int]:
    """Predict a row."""
    found = simulate(Script(__file__, [name], ranks=RUNS[name][1]), card=card("A10G"))
    return {"allocated": found.peak_allocated}


def measured() -> Iterator[tuple[str, Callable]]:
    for name, (_, cards, _) in RUNS.items():
        yield f"{name}, {cards} cards", partial(run, name)


PEAKS = {"litgpt-fsdp": lambda: as_they_ran("litgpt-fsdp", measured())}

if __name__ == "__main__":
    train(RUNS[sys.argv[1]][0], RUNS[sys.argv[1]][2])
