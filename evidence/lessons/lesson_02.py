"""Lesson 02: BERT-large on a T4 over batch size, length, precision and optimizer."""

import itertools
from collections.abc import Iterator

from helpers import predict, text_classification

PRECISIONS = {"fp32": {}, "fp16": {"fp16": True}}
OPTIMIZERS = ("adamw_torch_fused", "adamw_bnb_8bit", "adafactor", "sgd")


def ledger() -> Iterator[tuple]:
    axes = ((1, 2, 4, 8, 16), (128, 256, 512), PRECISIONS, OPTIMIZERS)
    for batch, length, precision, optimizer in itertools.product(*axes):

        def run(batch=batch, length=length, precision=precision, optimizer=optimizer):
            workload = text_classification("large", length=length)
            settings = {"per_device_train_batch_size": batch, "optim": optimizer}
            return predict(workload, gpu="T4", **settings, **PRECISIONS[precision])

        yield f"batch {batch}, length {length}, {precision}, {optimizer}", "today", run


SETS = (ledger,)
