"""Lesson 16: one technique after another, and pairs for the scoreboard."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import speeds
import waterfalls as both
from fake_cuda import Simulation, cost
from helpers import Prediction, language_modelling, predict, text_classification
from real_cards import fms


def waterfalls() -> Iterator[tuple]:
    """The classic experiment and a 3B decoder."""
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


def published_pairs() -> Iterator[tuple]:
    """Runs that others timed, predicted as in `tools/speeds.py`, for pairs of the scoreboard."""

    def known(model: str, card: str, samples: int, run: Callable, fused: bool = False):
        def predicted() -> Prediction:
            found: Simulation = run()
            if fused:  # what a compiler could reach at best
                least, unknown = found.time.fused_seconds, dict.fromkeys(cost.KINDS, math.nan)
                bound = {"step_seconds": least, "low": least, "high": least}
                found.time = replace(found.time, limited_by="", shares=unknown, **bound)
            plain = {key: value for key, value in vars(found).items() if key in FIELDS}
            facts = {"name": model, "workload": model, "device": card, "settings": {}}
            return Prediction(**facts, samples=samples, **plain)

        return predicted

    cases = {"batch 1": (1, 40, 55), "batch 8": (8, 60, 85)}  # samples, lengths of both texts
    for name, case in cases.items():
        run = known("t5-base", "RTX 3090", case[0], lambda case=case: speeds.t5("RTX 3090", *case))
        yield "t5-base", name, run
    mistral = fms.MODELS["Mistral-7B"][0]
    for method in ("full", "LoRA"):
        run = known("Mistral-7B", "A100-80GB", 4, lambda m=method: fms.run(mistral, m, 4))
        yield "Mistral-7B", method, run
    packed = dict(speeds.torchtune())["+ packed data"]
    for name in ("eager", "compiled at best"):
        run = known("Llama-3.2-3B", "A100-80GB", 2, packed, name != "eager")
        yield "Llama-3.2-3B", name, run


FIELDS = Simulation.__dataclass_fields__
SETS = (waterfalls, choices, published_pairs)
