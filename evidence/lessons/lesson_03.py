"""Lesson 03: memory and speed against batch size, on a T4, an A100 and a 4090."""

from collections.abc import Iterator
from functools import partial

from helpers import language_modelling, predict, text_classification

CHECKPOINTED = {"activation_checkpointing": True}
LARGER = (13, 16, 32, 64, 96, 112, 128)
SWEEPS = (  # variant, workload, card, settings, batch sizes
    ("BERT-large", text_classification, "T4", {}, range(1, 17)),
    ("BERT-large, checkpointed", text_classification, "T4", CHECKPOINTED, LARGER),
    ("TinyLlama", language_modelling, "A100-40GB", {"bf16": True}, range(1, 7)),
)


def batch_size() -> Iterator[tuple]:
    for variant, task, card, settings, sizes in SWEEPS:
        for size in sizes:

            def run(task=task, card=card, settings=settings, size=size):
                batch = {"per_device_train_batch_size": size}
                return predict(task("large"), gpu=card, **batch, **settings)

            yield f"batch {size}", variant, run


def desk() -> Iterator[tuple]:
    """What exercise 3.1 asks for, on a card that stands on a desk."""
    llama = language_modelling("tinyllama-1.1b", length=1024)
    for size in range(1, 6):
        settings = {"per_device_train_batch_size": size, "bf16": True}
        run = partial(predict, llama, gpu="RTX 4090", **settings)
        yield f"batch {size}", "TinyLlama, 1,024 tokens", run


def throughput() -> Iterator[tuple]:
    """BERT-large on short texts, where one sample does not fill a card."""
    bert = text_classification("large", length=128)
    for card in ("T4", "A100-40GB"):
        for size in (1, 2, 4, 8, 16, 32, 64):
            settings = {"per_device_train_batch_size": size, "fp16": True}
            yield f"batch {size}", card, partial(predict, bert, gpu=card, **settings)


SETS = (batch_size, desk, throughput)
