"""What sums over tokens take for themselves: more with more tokens, but not as a line.

Sums of biases' gradients share an output among blocks of threads once there are about a thousand
tokens: among as many as keep a card at work, or more where each would add up too many values
(`fake_cuda.scratch.Sum`). So what a twin sums up is kept, and its size with another micro-batch is
told by the kernel's own rule.
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
        """Bytes of what it takes where so many values are added up for each output; 0 over few."""
        taken = self.sum._replace(num_reductions=round(values)).partial_sums(self.card)
        return taken or [0] * len(self.sum.partial_sums(self.card))


@contextmanager
def kept() -> Iterator[dict[int, Summed]]:
    """The sums that a trace sees meanwhile, by the first storage that each takes."""
    found: dict[int, Summed] = {}
    inside = Trace.inside

    def watched(trace, func, args):
        begun = len(trace.size)
        if not begun:  # another run's
            found.clear()
        inside(trace, func, args)
        if func is SUM and len(trace.size) > begun:
            found[begun] = Summed(Sum.of(*args[:2]), trace.card)

    with mock.patch.object(Trace, "inside", watched):
        yield found


def sizes_of_sums(seeds: Seeds, three: Sequence[dict[int, Summed]], point: Point) -> dict[int, int]:
    """Bytes of the storages that sums take at a point, from what is summed up at the three seeds.

    Raises:
        NotAlike: they are not the same sums.
    """
    found = {}
    for number, near in three[0].items():
        if len({sums[number].sum._replace(num_reductions=0) for sums in three}) > 1:
            raise NotAlike("with more tokens other sums happen")
        values = seeds.at(point, *(sums[number].sum.num_reductions for sums in three))
        found |= dict(enumerate(near.sizes(values), start=number))
    return found
