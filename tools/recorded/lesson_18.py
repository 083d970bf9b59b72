"""Lesson 18: what the planner finds for one card, before there are two."""

import functools
from collections.abc import Iterator

from helpers import predict
from helpers.fit import fit, in_backward

MODEL, LENGTH, BATCH = "llama-2-7b", 1024, 4
CARDS = "T4", "RTX 3090", "A100-80GB", "H200"


def one_card() -> Iterator[tuple]:
    """The recipe that changes training least, for each card; predicted again as it stands."""
    for card in CARDS:
        found = fit(MODEL, card, length=LENGTH, batch=BATCH)
        if not found.recipes:
            continue
        recipe, search = found.recipes[0], found.search
        workload = search.changed(recipe.name, search.workload)
        keywords = search.settings(recipe.name, recipe.micro_batch)
        keywords["optimizer"] = in_backward if "backward" in recipe.name else None
        yield card, recipe.name, functools.partial(predict, workload, gpu=card, **keywords)


SETS = (one_card,)
