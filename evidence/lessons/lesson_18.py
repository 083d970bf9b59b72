"""Lesson 18: what the planner finds for one card, and one rank of several by the real wrappers."""

import functools
from collections.abc import Iterator

from helpers import predict
from planner import fit, predict_rank

MODEL, LENGTH, BATCH = "llama-2-7b", 1024, 4
CARDS = "T4", "RTX 3090", "A100-80GB", "H200"
ACCUMULATED = dict(gradient_accumulation_steps=2)
FULL = {  # four A100, 32 bits, one sample in a micro-batch
    "DDP": dict(parallel="ddp"),
    "DDP, bucket view": dict(parallel="ddp", gradient_as_bucket_view=True),
    "ZeRO-1": dict(parallel="zero1"),
    "FSDP2, weights kept": dict(parallel="fsdp2", reshard_after_forward=False),
    "FSDP2": dict(parallel="fsdp2"),
    "FSDP2, two micro-batches": dict(parallel="fsdp2") | ACCUMULATED,
    "FSDP2, two, each sent": dict(parallel="fsdp2", sync_each_batch=True) | ACCUMULATED,
}
BASE = "llama-3.1-8b"
AT_HOME = {  # two cards of 24 GB
    "LoRA, DDP": dict(parallel="ddp"),
    "LoRA, FSDP2": dict(parallel="fsdp2"),
}


def one_card() -> Iterator[tuple]:
    """The recipe that changes training least, for each card; predicted again as it stands."""
    for card in CARDS:
        found = fit(MODEL, card, length=LENGTH, batch=BATCH)
        if not found.recipes:
            continue
        recipe, question = found.recipes[0], found.question
        workload = question.changed(recipe.plan)
        keywords = question.settings(recipe.plan, recipe.micro_batch)
        keywords["optimizer"] = recipe.plan.optimizer
        yield card, recipe.name, functools.partial(predict, workload, gpu=card, **keywords)


def ranks() -> Iterator[tuple]:
    """Llama-2-7B trained in full on four cards."""
    about = dict(length=LENGTH, per_device_train_batch_size=1)
    for name, way in FULL.items():
        yield MODEL, name, functools.partial(predict_rank, MODEL, "A100-40GB", 4, **about | way)


def ranks_at_home() -> Iterator[tuple]:
    """Llama-3.1-8B with adapters, its base in 16 bits, on two cards."""
    about = dict(length=LENGTH, per_device_train_batch_size=1, lora=16)
    about |= dict(bf16=True, activation_checkpointing=True)
    for name, way in AT_HOME.items():
        yield BASE, name, functools.partial(predict_rank, BASE, "RTX 3090", 2, **about | way)


SETS = one_card, ranks, ranks_at_home
