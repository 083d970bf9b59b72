"""A point of the atlas predicted in full: each layer, and not the few that may stand for all."""

from planner.predictions import Predictions
from planner.question import ask
from planner.techniques import Plan

MiB = 2**20


class Whole(Predictions):
    """Predictions of all layers, however alike."""

    def _few(self, workload) -> list:
        return []


def prediction(key: tuple) -> dict:
    """Bytes and seconds of a recipe, model, micro-batch and card.

    Args:
        key: by `check.KEY`.
    """
    model, _, recipe, length, micro_batch, accumulation, card = key
    question = ask(model, card, length=length, batch=micro_batch * accumulation)
    facts = Whole(question, keep=False).predict(Plan.named(recipe), micro_batch)
    return {
        "allocated_mib": -(-facts.peak_allocated // MiB),
        "reserved_mib": -(-facts.peak_reserved // MiB),
        "seconds": float(f"{facts.step_seconds:.4g}"),
    }
