"""Lesson 01: the nine runs of the classic table, from the libraries of 2022 to today's."""

import itertools
from collections.abc import Iterator

from evidence import classic as old

# What changed since the classic table, in the order of the years.
VARIANTS = {
    "2022": old.BEHAVIOURS,
    "softmax keeps its output only": old.BEHAVIOURS[1:],
    "gradients are freed": old.BEHAVIOURS[2:],
    "today": (),
}


def classic() -> Iterator[tuple]:
    for variant, run in itertools.product(VARIANTS, old.CLASSIC):
        yield run, variant, lambda run=run, variant=variant: old.classic(run, VARIANTS[variant])


SETS = (classic,)
