"""Seconds of a step on many cards at once, from the operations of a twin.

Rows of `fake_cuda.cost` in arrays: one column for each point (length and micro-batch), card, and
factor of the range. Two depths tell all others, as for the planner's own estimates.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from evidence.atlas.laws import Point, Seeds
from evidence.atlas.pieces import NotAlike, cuts
from evidence.atlas.twins import OfSamples, Seen, Twins
from fake_cuda import Card, cost
from fake_cuda.constants import CONSTANTS, HOST_SECONDS
from fake_cuda.kernels import Kernels
from fake_cuda.operations import Operation
from fake_cuda.products import Attention

ONCE, PASSES, CLIP = range(3)  # parts of a step: its end, each micro-batch, the gradients' norm
RANGES = CONSTANTS.ranges
# How much longer card and host take: as predicted, at best, at worst, and which of both limits.
FACTORS = np.array(
    [
        (1, 1),
        (RANGES.card_fastest, RANGES.host_fastest),
        (RANGES.card_slowest, RANGES.host_slowest),
        (1, 1.1),
        (1.1, 1),
    ]
)


def operation_at(three: Sequence[Operation], seeds: Seeds, point: Point) -> Operation:
    """An operation with another micro-batch: fused attention grows with the square of the length,
    if it does, all else as the three tell.

    Raises:
        NotAlike: they are not the same operation.
    """
    if len({(op.kind, op.issued, len(op.work)) for op in three}) > 1:
        raise NotAlike("with more tokens other operations happen")
    low = three[0]
    if isinstance(low.work, Attention):
        grows = seeds.alone or three[1].work.flops > low.work.flops  # a picture's does not
        longer = point.length / seeds.near.length if grows else 1
        flops = low.work.flops * point.micro_batch / seeds.near.micro_batch * longer**2
        work = low.work._replace(flops=flops)
    else:
        work = tuple(
            own[0]._replace(
                **{side: seeds.at(point, *(getattr(p, side) for p in own)) for side in SIDES}
            )
            for own in zip(*(op.work for op in three), strict=True)
        )
    return low._replace(work=work, moved=round(seeds.at(point, *(op.moved for op in three))))


SIDES = ("batch", "rows", "columns", "inner")
ENOUGH = 256  # programs: no card has as many multiprocessors


def mates(shallow: Seen, deep: Seen, sign: Callable, amid: bool = False) -> list[tuple[int, bool]]:
    """Of each operation of a deeper twin the number of what does the same in a shallower one, and
    whether each block more does it once more.

    Args:
        shallow, deep: the twins.
        sign: what is compared of an operation.
        amid: as of `cuts`.

    Raises:
        NotAlike: they differ by more than what repeats.
    """
    few, many = (_by_phase(seen.operations) for seen in (shallow, deep))
    if len(few) != len(many):
        raise NotAlike("the steps have not the same phases")
    found: list[tuple[int, bool]] = []
    begun = 0
    for one, other in zip(few, many, strict=True):
        own = [(k, False) for k in range(begun, begun + len(one))]
        for where in cuts(*([sign(op) for op in ops] for ops in (one, other)), amid=amid):
            block = [(mate, True) for mate, _ in own[where.at - where.size : where.at]]
            own[where.at : where.at] = block
        found += own
        begun += len(one)
    return found


def repeated(operations: Sequence[Operation], of_each: list[tuple[int, bool]], more: int) -> list:
    """The numbers of a twin's operations, those of a block so many times more: -1 leaves it out.

    Args:
        operations: of the deeper twin.
        of_each: `mates` of it.
        more: times.
    """
    found: list[int] = []
    groups = itertools.groupby(range(len(of_each)), lambda k: (operations[k].phase, of_each[k][1]))
    for (_, in_block), group in groups:
        found += list(group) * (1 + more if in_block else 1)
    return found


@dataclass
class Pace:
    """The time of a recipe's step on some cards.

    Args:
        twins: of the recipe.
        seeds: their micro-batches.
        cards: with the rates of all of them.
    """

    twins: Twins
    seeds: Seeds
    cards: Sequence[Card]

    def __post_init__(self):
        self.shallow, self.near, self.far, self.wide = self.twins[:4]
        if len({len(seen.operations) for seen in self._deep()}) > 1:
            raise NotAlike("with more tokens other operations happen")
        self.kernels = [Kernels(card) for card in self.cards]
        self.known: dict = {}
        self.mates = mates(self.shallow, self.near, partial(_sign, phases=self.near.phases))

    def _deep(self) -> tuple[Seen, Seen, Seen]:
        return self.near, self.far, self.wide

    def _seconds(self, op: Operation, programs: int | None = None) -> np.ndarray:
        """Of each card. Where few programs run, most of its multiprocessors move nothing."""
        key = op.kind, op.work, op.moved, op.tensors, op.name, programs
        if key not in self.known:
            found = []
            for kernel in self.kernels:
                busy = min(1, programs / kernel.card.sms) if programs else 1
                found.append(kernel.seconds(op._replace(moved=int(op.moved / busy)))[1])
            self.known[key] = np.array(found)
        return self.known[key]

    def step(self, points: Sequence[Point]) -> np.ndarray:
        """Seconds [part of a step, kind of limit, point, card, factor].

        Args:
            points: the micro-batches.
        """
        step = cost._Step([], self.near.phases, self.cards[0], HOST_SECONDS, CONSTANTS)
        rows, seconds = [], []
        found: dict = {}
        twins = zip(*(seen.operations for seen in self._deep()), strict=True)
        for k, three in enumerate(twins):
            low = three[0]
            own = self.shallow.operations[self.mates[k][0]]
            programs = tuple(seen.programs[k] for seen in self._deep())
            of_all = _of_all(low, self.near.phases) and own[2:]
            key = tuple(op[2:] for op in three), of_all, programs
            if key not in found:
                found[key] = self._row(three, own, programs, points, step)
            row, needed = found[key]
            rows.append((_part(low, self.near.phases), *row))
            seconds.append(needed)
        order = repeated(self.near.operations, self.mates, self.twins.more)
        counts = [point.micro_batch for point in points]
        asked = list(
            _for_samples(order, self.twins.of_samples, self.seeds.near.micro_batch, counts)
        )
        size = len(points), len(self.cards)
        return _run([(rows[k], seconds[k], there) for k, there in asked], size)

    def _programs(self, three: tuple[int | None, ...], point: Point) -> int | None:
        """Of how many programs a Triton kernel is; None where they are as many as a card wants."""
        if three[0] is None or three[0] >= ENOUGH or three[1] == three[0]:
            return None
        return max(1, round(self.seeds.at(point, *three)))

    def _row(self, three, own, programs, points, step) -> tuple:
        """The kind of limit and the host's seconds of an operation, and the cards' seconds."""
        low, more = three[0], self.twins.more
        ops = [operation_at(three, self.seeds, point) for point in points]
        row = step.row(ops[0], HOST_SECONDS)
        if row.kind in ("", "wait"):
            return (row.kind, row.issue), None
        few = [self._programs(programs, point) for point in points]
        needed = np.stack([self._seconds(op, n) for op, n in zip(ops, few, strict=True)])
        issue = row.issue
        if _of_all(low, self.near.phases):  # it grows with the number of parameters
            fewer = step.row(own, HOST_SECONDS)
            needed = needed + more * (needed - self._seconds(own))
            issue += more * (issue - fewer.issue)
        return (row.kind, issue), needed


def _of_all(op: Operation, phases: list[str]) -> bool:
    """Whether an operation is about parameters, and so the same for any tokens."""
    return op.tensors > 0 or op.issued == "update" or _part(op, phases) == CLIP


def _sign(op: Operation, phases: list[str]) -> tuple:
    return (op.kind, op.issued, op.tensors > 0) if _of_all(op, phases) else op[2:]


def _by_phase(operations: list[Operation]) -> list[list[Operation]]:
    found: dict[int, list[Operation]] = {}
    for op in operations:
        found.setdefault(op.phase, []).append(op)
    return list(found.values())


def _part(op: Operation, phases: list[str]) -> int:
    name = phases[op.phase]
    if name in ("optimizer step", "between steps"):
        return ONCE
    return CLIP if name == "backward" and op.issued == "no gradients" else PASSES


def _for_samples(
    order: Sequence[int], of_samples: Sequence[OfSamples], few: int, counts: Sequence[int]
) -> Iterator[tuple[int, np.ndarray | None]]:
    """The numbers of a step's operations, those of each sample as often as the micro-batch with
    most samples has them.

    Args:
        order: the numbers, of which those of samples are the twin's.
        of_samples: which of them are asked for by each sample.
        few: samples of the twin.
        counts: samples of each micro-batch.

    Yields:
        A number; and for which micro-batches, [point, 1, 1], None for all.
    """
    has = np.array(counts)[:, None, None]
    begin = {own.at: own for own in of_samples}
    inside = {k for own in of_samples for k in range(own.at, own.at + few * own.size)}
    for k in order:
        if k in begin:
            at, size = begin[k]
            for sample in range(max(counts)):
                there = None if sample < min(counts) else has > sample
                yield from ((at + sample % few * size + j, there) for j in range(size))
        elif k not in inside:
            yield k, None


def _run(rows: list[tuple], size: tuple[int, int]) -> np.ndarray:
    """`fake_cuda.queued.run` for all points, cards and factors at once.

    Args:
        rows: of each operation what `cost` needs to know, the cards' seconds, and for which points
            it happens.
        size: points and cards.
    """
    known = CONSTANTS.host
    shape = *size, len(FACTORS)
    card, host = FACTORS.T
    now, queue = np.zeros(shape), np.zeros(shape)
    start_up = known.wait * known.idle_start
    for _ in range(2):  # the host runs ahead into the next step: the second one counts
        spent = np.zeros((3, len(cost.KINDS), *shape))
        part = ONCE
        for (part, kind, issue), needed, there in rows:
            if kind == "wait":
                waited = np.maximum(now, queue) + known.wait
                now = waited if there is None else np.where(there, waited, now)
                continue
            now = now + issue * host * (1 if there is None else there)
            if needed is None:
                continue
            start = np.maximum(queue, now + start_up)
            taken = needed[:, :, None] * card
            if there is not None:
                start, taken = np.where(there, start, queue), there * taken
            spent[part, 0] += start - queue
            spent[part, cost.KINDS.index(kind)] += taken
            queue = start + taken
        idle = np.maximum(now - queue, 0)
        spent[part, 0] += idle
        queue = queue + idle
    return spent
