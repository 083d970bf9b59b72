"""The nine runs of the guides' table: BERT-large on a V100, with that year's libraries."""

from collections.abc import Callable, Iterator
from functools import partial

from evidence.classic import CLASSIC, classic


def measured() -> Iterator[tuple[str, Callable]]:
    for run in CLASSIC:
        yield run, lambda run=run: {"used": classic(run).used}


def timed() -> Iterator[tuple[str, Callable]]:
    for run in CLASSIC:
        yield run, partial(classic, run)


PEAKS = {"guide-2022": measured}
STEPS = {"guide-2022": timed}
