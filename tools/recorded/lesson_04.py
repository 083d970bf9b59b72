"""Lesson 04: micro-batch and accumulation, for BERT-large on a T4 and TinyLlama on an A100."""

from collections.abc import Iterator

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


SETS = (accumulation,)
