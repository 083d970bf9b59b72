"""Lesson 04: micro-batch and accumulation, for BERT-large on a T4 and TinyLlama on an A100."""

from collections.abc import Iterator
from functools import partial

from helpers import language_modelling, predict, text_classification

SWEEPS = (  # variant, workload, card, settings, effective batch, micro-batches
    ("BERT-large", text_classification, "T4", {}, 64, (1, 2, 4, 8, 16, 32)),
    ("TinyLlama", language_modelling, "A100-40GB", {"bf16": True}, 16, (1, 2, 4, 8)),
)


def accumulation() -> Iterator[tuple]:
    for variant, task, card, settings, effective, sizes in SWEEPS:
        pairs = [(size, 1) for size in (*sizes, effective)]
        pairs += [(size, effective // size) for size in sizes]
        for size, steps in pairs:

            def run(task=task, card=card, settings=settings, size=size, steps=steps):
                batch = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
                return predict(task("large"), gpu=card, **batch, **settings)

            yield f"{size} x {steps}", variant, run


def short_texts() -> Iterator[tuple]:
    """An effective batch of 64 on short texts: the small micro-batches wait for the host."""
    bert = text_classification("large", length=128)
    for size in (1, 2, 4, 8, 16, 32, 64):
        batch = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 64 // size}
        run = partial(predict, bert, gpu="A100-40GB", fp16=True, **batch)
        yield f"{size} x {64 // size}", "BERT-large, 128 tokens", run


SETS = (accumulation, short_texts)
