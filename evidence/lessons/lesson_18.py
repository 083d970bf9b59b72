"""Lesson 18: what the planner finds for one card, before there are two."""

import functools
from collections.abc import Iterator

from helpers import predict
from planner import fit

MODEL, LENGTH, BATCH = "llama-2-7b", 1024, 4
CARDS = "T4", "RTX 3090", "A100-80GB", "H200"


def one_card() -> Iterator[tuple]:
    """The recipe that changes training least, for each card; predicted again as it stands."""
    for card in CARDS:
        found = fit(MODEL, card, length=LENGTH, batch=BATCH)
        if not found.recipes:
            continue
        recipe, question = found.recipes[0], found.question
        workload = question.changed(recipe.plan)
        keywords = question.settings(recipe.plan, recipe.micro_batch)
        keywords["optimizer"] = recipe.plan.optimizer
        yield card, recipe.name, functools.partial(predict, workload, gpu=card, **keywords)


SETS = (one_card,)
