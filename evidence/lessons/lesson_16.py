"""Lesson 16: one technique after another. Its pairs for the scoreboard: evidence/pairs.py."""

import itertools
from collections.abc import Iterator

from evidence import waterfalls as both
from helpers import language_modelling, predict, text_classification


def waterfalls() -> Iterator[tuple]:
    """The classic experiment and a 3B decoder."""
    decoder = language_modelling("llama-3.2-3b", length=4096)
    models = {
        "bert-large-uncased": (text_classification("large"), "T4", both.classic()),
        "llama-3.2-3b": (decoder, "A100-80GB", both.decoder()),
    }
    for model, (workload, card, steps) in models.items():
        for step in steps:

            def run(workload=workload, card=card, step=step):
                for change in step.changes:
                    workload = workload.with_model(change)
                target = step.card or card
                return predict(workload, gpu=target, optimizer=step.optimizer, **step.settings)

            yield model, step.name, run


def choices() -> Iterator[tuple]:
    """Every combination of four techniques, for all weights and for two kinds of adapters."""
    decoder = language_modelling("llama-3.2-3b", length=4096)
    for trained, size in itertools.product(both.TRAINED, range(len(both.TECHNIQUES) + 1)):
        for on in itertools.combinations(both.TECHNIQUES, size):
            step = both.combined(on, trained)

            def run(workload=decoder, step=step):
                for change in step.changes:
                    workload = workload.with_model(change)
                return predict(workload, gpu="RTX 3090", optimizer=step.optimizer, **step.settings)

            yield trained, step.name, run


SETS = (waterfalls, choices)
