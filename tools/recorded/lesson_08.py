"""Lesson 08: GPT-2 on a T4, 4,096 tokens in rows of several lengths, with a padding mask."""

from collections.abc import Iterator
from dataclasses import replace

from helpers import language_modelling, predict

TOKENS = 4096  # in a batch


def padding() -> Iterator[tuple]:
    for length in (64, 128, 256, 512):

        def run(length=length):
            workload = replace(language_modelling("gpt2", length=length), masked=True)
            return predict(workload, gpu="T4", per_device_train_batch_size=TOKENS // length)

        yield f"{TOKENS:,} tokens", length, run


SETS = (padding,)
