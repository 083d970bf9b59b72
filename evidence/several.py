"""Rows of one card among several: their versions stand in a table of their own."""

from collections.abc import Callable, Iterator
from functools import cache, wraps

import pandas as pd

from evidence.libraries import behaving, of
from evidence.libraries.rows import LIBRARIES, MEASURED


@cache
def named() -> dict[tuple[str, str], dict[str, str]]:
    """Of each (set, run) of several_cards.csv the versions that its rows name."""
    rows = pd.read_csv(MEASURED / "several_cards.csv", dtype=str).drop_duplicates(["set", "run"])
    return {
        (row["set"], row["run"]): {k: row[k] for k in LIBRARIES if isinstance(row[k], str)}
        for row in rows.to_dict("records")
    }


def as_they_ran(name: str, runs: Iterator[tuple[str, Callable]]) -> Iterator[tuple[str, Callable]]:
    """The runs of a set, each with what the versions of its rows did otherwise than today's."""
    for run, predict in runs:
        yield run, _with(of(**named()[name, run]), predict)


def _with(behaviours: tuple, predict: Callable) -> Callable:
    @wraps(predict)
    def predicted():
        with behaving(behaviours):
            return predict()

    return predicted
