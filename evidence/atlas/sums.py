"""What sums over tokens take for themselves: more with more tokens, but not as a line.

Sums of biases' gradients share an output among blocks of threads once there are about a thousand
tokens, and among no more of them than keep a card at work (`fake_cuda.scratch.Sum`). So what a twin
sums up is kept, and its size with another micro-batch is told by the kernel's own rule.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import torch

from evidence.atlas.laws import Point, Seeds
from evidence.atlas.pieces import NotAlike
from fake_cuda import Card
from fake_cuda.scratch import Sum
from fake_cuda.trace import Trace

SUM = torch.ops.aten.sum.dim_IntList


class Summed(NamedTuple):
    """A sum that takes memory of its own, and the card on which it does."""

    sum: Sum
    card: Card

    def sizes(self, values: float) -> list[int]:
        """Bytes of what it takes where so many values are added up for each output.

        Raises:
            NotAlike: it takes none.
        """
        taken = self.sum._replace(num_reductions=round(values)).partial_sums(self.card)
        if not taken:
            raise NotAlike("over fewer tokens a sum takes no memory of its own")
        return taken


@contextmanager
def kept() -> Iterator[dict[int, Summed]]:
    """The sums that a trace sees meanwhile, by the first storage that each takes."""
    found: dict[int, Summed] = {}
    inside = Trace.inside

    def watched(trace, func, args):
        begun = len(trace.size)
        inside(trace, func, args)
        if func is SUM and len(trace.size) > begun:
            found[begun] = Summed(Sum.of(*args[:2]), trace.card)

    with mock.patch.object(Trace, "inside", watched):
        yield found


def sizes_of_sums(seeds: Seeds, three: Sequence[dict[int, Summed]], point: Point) -> dict[int, int]:
    """Bytes of the storages that sums take at a point, from what is summed up at the three seeds.

    Raises:
        NotAlike: at the point a sum takes none.
    """
    found = {}
    for number, near in three[0].items():
        values = seeds.at(point, *(sums[number].sum.num_reductions for sums in three))
        found |= dict(enumerate(near.sizes(values), start=number))
    return found
