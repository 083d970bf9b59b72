"""Runs that others timed, predicted beside each other for the scoreboard of lesson 16.

They stand in `evidence/sources`, which lessons do not import: so this set has a module of its own.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from evidence import runs
from fake_cuda import Simulation, cost
from helpers import Prediction

SOURCES = ("t5-base-3090", "fms", "torchtune-llama3.2-3b")  # sets of timed runs
FIELDS = Simulation.__dataclass_fields__


def fused(time: cost.Time) -> cost.Time:
    """What a compiler could reach at best in place of the time of a step."""
    least, unknown = time.fused_seconds, dict.fromkeys(cost.KINDS, math.nan)
    bound = {"step_seconds": least, "low": least, "high": least}
    return replace(time, limited_by="", shares=unknown, **bound)


def predicted(name: str, run: str, model: str, card: str, samples: int, bound=False) -> Prediction:
    """A run of a source as a prediction of lesson 16, with the samples of its step."""
    found: Simulation = runs.predictions(runs.of_steps()[name], "STEPS", name)[run, ""]()
    plain = {key: value for key, value in vars(found).items() if key in FIELDS}
    if bound:
        plain["time"] = fused(plain["time"])
    facts = {"name": model, "workload": model, "device": card, "settings": {}}
    return Prediction(**facts, samples=samples, **plain)


def published_pairs() -> Iterator[tuple]:
    """Pairs of runs that differ by a method of the scoreboard."""
    t5, mistral, llama = SOURCES
    for name, samples in {"batch 1": 1, "batch 8": 8}.items():
        yield (
            "t5-base",
            name,
            lambda name=name, n=samples: predicted(t5, name, "t5-base", "RTX 3090", n),
        )
    for method in ("full", "LoRA"):
        run = f"Mistral-7B {method}, batch 4"
        yield (
            "Mistral-7B",
            method,
            lambda run=run: predicted(mistral, run, "Mistral-7B", "A100-80GB", 4),
        )
    for name in ("eager", "compiled at best"):
        facts = "+ packed data", "Llama-3.2-3B", "A100-80GB", 2, name != "eager"
        yield "Llama-3.2-3B", name, lambda facts=facts: predicted(llama, *facts)


SETS = (published_pairs,)
