"""Lesson 10: what fusing could save at most, over batch sizes and cards."""

import itertools
from collections.abc import Iterator

from helpers import predict, text_classification


def fusing() -> Iterator[tuple]:
    for card, batch in itertools.product(("T4", "A100-40GB", "H100"), (1, 4, 16, 64)):

        def run(card=card, batch=batch):
            workload = text_classification("bert-large-uncased", length=128)
            return predict(workload, gpu=card, per_device_train_batch_size=batch, fp16=True)

        yield f"batch {batch}", card, run


SETS = (fusing,)
