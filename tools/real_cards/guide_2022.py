"""The nine runs of the guides' table: BERT-large on a V100, with that year's libraries."""

from collections.abc import Iterator

from behaviours_2022 import CLASSIC, classic


def runs() -> Iterator[tuple]:
    for run in CLASSIC:
        yield run, lambda run=run: {"used": classic(run).used}


SETS = {"guide-2022": runs}
