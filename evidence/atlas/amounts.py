"""Bytes of a recipe's step, of one micro-batch and of several, from the logs of its twins."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from evidence.atlas.growth import Growth, grown, most_alive
from evidence.atlas.laws import Point, Seeds, sizes_at
from evidence.atlas.sums import sizes_of_sums
from evidence.atlas.twins import Twins
from fake_cuda import Simulation
from fake_cuda.replay import replay
from planner.techniques import Plan

MiB = 2**20
BEGINNING = 8  # events of a backward pass until the gradient of a loss is added
CATEGORIES = ("parameters", "gradients", "optimizer states", "activations", "temporaries")


class Amount(NamedTuple):
    """Bytes of a step: at its peak, of the allocator, and by category at the peak."""

    allocated: int
    reserved: int
    by_category: list[int]


def single(found: Simulation) -> Amount:
    """A step of one micro-batch."""
    parts = [found.by_category[name] for name in CATEGORIES]
    return Amount(found.peak_allocated, found.peak_reserved, parts)


def several(found: Simulation, adapters: bool, tied: bool) -> Amount:
    """A step of more than one: the later ones find the gradients of the first.

    Where all weights learn, each new gradient stands beside the old one until it is added: at once,
    but that of a tied head waits for the embedding's, at the end of the backward pass, and what
    Liger's loss makes in the forward pass for the backward pass to begin.

    Args:
        found: a step of one micro-batch.
        adapters: whether only they learn; the planner adds their gradients and no more.
        tied: whether head and embedding are one parameter.
    """
    names = list(found.by_category)
    column = names.index("gradients")
    bytes_ = found.timeline.copy()
    before = bytes_.sum(axis=1).max()
    born = np.diff(bytes_[:, column], prepend=bytes_[0, column]).clip(min=0)
    bytes_[:, column] = found.peak_by_category["gradients"]
    if not adapters:
        starts = {name: row for row, name in reversed(found.phases)}
        head = int(born.argmax())
        until = starts["optimizer step"] if tied else starts["backward"] + BEGINNING
        born[head + 1 : until] += born[head]
        bytes_[:, names.index("temporaries")] += born
    total = bytes_.sum(axis=1)
    more = int(total.max() - before)
    at_peak = dict(zip(names, bytes_[total.argmax()].tolist(), strict=True))
    parts = [at_peak[name] for name in CATEGORIES]
    allocated = found.peak_allocated + more
    # The timeline is the last step's. Where the first one needs more, that is a passing thing.
    parts[CATEGORIES.index("temporaries")] += allocated - sum(parts)
    return Amount(allocated, found.peak_reserved + more, parts)


class Amounts(NamedTuple):
    """Of a micro-batch.

    Args:
        one: a step of it alone.
        more: a step of more than one; None where a step can have one alone.
        gradients: bytes.
    """

    one: Amount
    more: Amount | None
    gradients: int


def sizes(
    twins: Twins, seeds: Seeds, points: Sequence[Point], plan: Plan, most: float
) -> dict[Point, Amounts]:
    """Of each point that needs at most so many bytes, what a step takes."""
    growth = Growth(twins.shallow.events, twins.near.events)
    whole = growth.plan(twins.more)
    three, found = (twins.near, twins.far, twins.wide), {}
    for point in points:
        told = sizes_at(seeds, [seen.events for seen in three], point)
        for number, size in sizes_of_sums(seeds, [seen.sums for seen in three], point).items():
            told[number] = size
        log = grown(whole, twins.near.events.kinds, told)
        if most_alive(log) > most:  # that is seen at once, and the allocator takes more
            continue
        simulated, _ = replay(log, True)
        if simulated.peak_reserved > most:
            continue
        more = None
        if plan.kind.accumulates:
            more = several(simulated, plan.kind.adapters, twins.tied)
        gradients = simulated.peak_by_category["gradients"]
        found[point] = Amounts(single(simulated), more, gradients)
    return found


def point_rows(amounts: dict[Point, Amounts], points: Sequence[Point]) -> list[list[int]]:
    """Of each point tokens of a sample, samples, and in MiB what `Amount` has: of a step of one
    micro-batch, and where there can be several of such a step."""
    rows = []
    for point in points:
        row = [point.length, point.micro_batch]
        for amount in filter(None, (amounts[point].one, amounts[point].more)):
            parts = amount.allocated, amount.reserved, *amount.by_category
            row += [-(-part // MiB) for part in parts]
        rows.append(row)
    return rows
