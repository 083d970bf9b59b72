"""Lesson 16: the classic experiment and a 3B decoder, one technique after another."""

from collections.abc import Iterator

import waterfalls as both
from helpers import language_modelling, predict, text_classification


def waterfalls() -> Iterator[tuple]:
    decoder = language_modelling("llama-3.2-3b", length=4096)
    models = {
        "bert-large-uncased": (text_classification("large"), "T4", both.CLASSIC),
        "llama-3.2-3b": (decoder, "A100-80GB", both.DECODER),
    }
    for model, (workload, card, steps) in models.items():
        for step in steps:

            def run(workload=workload, card=card, step=step):
                for change in step.changes:
                    workload = workload.with_model(change)
                target = step.card or card
                return predict(workload, gpu=target, optimizer=step.optimizer, **step.settings)

            yield model, step.name, run


SETS = (waterfalls,)
