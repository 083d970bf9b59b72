"""Lesson 03: memory against batch size, for BERT-large on a T4 and TinyLlama on an A100."""

from collections.abc import Iterator

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


SETS = (batch_size,)
