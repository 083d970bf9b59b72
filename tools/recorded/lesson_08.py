"""Lesson 08: BERT-large on a T4, batches of samples with a padding mask: length and batch size."""

from collections.abc import Iterator
from dataclasses import replace

from helpers import predict, text_classification

LENGTHS = range(64, 513, 64)
TOKENS = 4096  # in a batch


def _step(length: int, batch: int):
    workload = replace(text_classification("large", length=length), masked=True)
    return predict(workload, gpu="T4", per_device_train_batch_size=batch)


def padding() -> Iterator[tuple]:
    for length in LENGTHS:
        yield "batch of 8", length, lambda length=length: _step(length, 8)
    for length in (64, 128, 256, 512):
        batch = TOKENS // length
        yield f"{TOKENS:,} tokens", length, lambda length=length, n=batch: _step(length, n)


SETS = (padding,)
