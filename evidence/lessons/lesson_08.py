"""Lesson 08: padding on a T4, and what borders between texts cost in one long row."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from helpers import language_modelling, predict

TOKENS = 4096  # in a batch


def padding() -> Iterator[tuple]:
    """GPT-2 on a T4, 4,096 tokens in rows of several lengths, with a padding mask."""
    for length in (64, 128, 256, 512):

        def run(length=length):
            workload = replace(language_modelling("gpt2", length=length), masked=True)
            return predict(workload, gpu="T4", per_device_train_batch_size=TOKENS // length)

        yield f"{TOKENS:,} tokens", length, run


def borders() -> Iterator[tuple]:
    """Forward and backward pass of 8,192 tokens: sixteen rows, or one with borders by positions."""

    def step(rows: int, restart: bool, checkpointed: bool):
        model = language_modelling("llama-3.2-1b").model(pretrained=False).to(torch.bfloat16)
        model.config.use_cache = False
        model.train()
        if checkpointed:
            model.activation_checkpointing_enable()
        ids = torch.zeros(rows, 8192 // rows, dtype=torch.long)
        positions = {"position_ids": (torch.arange(8192) % 512)[None]} if restart else {}
        model(input_ids=ids, labels=ids, **positions).loss.backward()

    ways = {"16 rows of 512": (16, False), "one row": (1, False), "one row with borders": (1, True)}
    for run, variant, checkpointed in (
        ("16 rows of 512", "plain", False),
        ("one row", "plain", False),
        ("one row with borders", "plain", False),
        ("16 rows of 512", "checkpointed", True),
        ("one row with borders", "checkpointed", True),
    ):

        def predicted(run=run, checkpointed=checkpointed):
            return predict(lambda: step(*ways[run], checkpointed), run, gpu="A100-40GB")

        yield run, variant, predicted


SETS = (padding, borders)
