"""Which way over several cards fits? Each is predicted as rank 0, least change first.

What cannot fit by its weights, or by what was predicted before, is left out, and of what trains the
same the search ends with the first way that needs no saving.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from helpers.host import host_of

from .micro_batches import Known
from .predictions import no_progress
from .rank_recipes import Ranks, TooLong
from .several import (
    NOTHING,
    SECONDS,
    SMALLEST,
    WAYS,
    WEIGHTS,
    Recipe,
    Several,
    Way,
    ask_several,
    cut_margin,
)
from .workers import Workers


class Late(NamedTuple):
    """Micro-batches that may fit and were not predicted; whether their way was begun."""

    way: Way
    micro_batches: list[int]
    begun: bool = True


@dataclass(frozen=True)
class Search(Ranks):
    """The search for ways over so many cards."""

    @property
    def share(self) -> int:
        """Samples of a step on each card."""
        return self.asked.batch // self.ranks

    @property
    def micro_batches(self) -> list[int]:
        """Those into which the share divides."""
        return [n for n in range(1, self.share + 1) if self.share % n == 0]

    @property
    def known(self) -> Known:
        """What was predicted, for what it tells of others."""
        return Known(self.seen, self.ranks, self.share, self.asked.parameters, self.bf16)

    def may_fit(self, way: Way, numbers: list[int]) -> list[int]:
        """Those that what was predicted does not exclude."""
        room, known = self.asked.card.memory, self.known
        return [n for n in numbers if self.need(way, known.least(way, n)) <= room]

    def fitting(self, way: Way) -> tuple[Recipe | None, list[int]]:
        """A way with the largest micro-batch that fits, or None; and those that may fit and were
        not predicted in their time: where one fits, only larger ones."""
        share, room, best = self.share, self.asked.card.memory, None
        left = self.micro_batches
        late: list[int] = []
        while left := self.may_fit(way, left):
            tried = self._next(way, left)
            try:
                found = self.recipe(way, tried)
            except TooLong:
                # Others take as long; where one of them was predicted in its time, one more is
                # tried. All samples at once, where nothing is accumulated, take half of it.
                in_time = any(one.way == way and one.accumulation > 1 for one in self.seen)
                in_time = in_time and not late
                goes_on = [n for n in left if n != tried and (in_time or tried < n == share)]
                late, left = late + [n for n in left if n not in goes_on], goes_on
                continue
            fits = found.need <= room
            best = found if fits else best
            left, late = (_others(some, tried, share, fits) for some in (left, late))
        return best, sorted(late)

    def _next(self, way: Way, left: list[int]) -> int:
        """The largest micro-batch that seems to fit; where nothing tells, the largest if there is
        room beside the weights, else the smallest."""
        room, known = self.asked.card.memory, self.known
        about = {n: known.about(way, n) for n in left}
        if None in about.values():
            tight = 2 * self.need(way, known.weights(way)) > room
            return left[0] if tight else left[-1]
        fits = [n for n in left if self.need(way, about[n]) <= room]
        return max(fits, default=left[0])

    def recipes(self, processes: int = 1) -> tuple[list[Recipe], list[Late]]:
        """Those that fit, and what may and was not predicted in its time."""
        if processes < 2:
            halves = [self.half(False), self.half(True)]
        else:
            _ = self.asked.skeleton  # built once, and copied
            with Workers(processes, self.half) as workers:
                halves = workers.each(workers.ask, [False, True])
        for _, _, seen in halves:
            self.seen.extend(seen)
        return sum((found for found, _, _ in halves), []), sum((left for _, left, _ in halves), [])

    def half(self, adapters: bool) -> tuple[list[Recipe], list[Late], list[Recipe]]:
        """Of what trains adapters, or all weights: what fits, the fastest first; what may and was
        not predicted in its time; all that was predicted."""
        own, began = replace(self, seen=[]), time.monotonic()
        found: list[Recipe] = []
        left: list[Late] = []
        for way in (way for way in WAYS if way.adapters == adapters):
            if any(r.way.parallel == way.parallel or _best(r) for r in found):
                continue  # what follows saves memory, which is not short
            if time.monotonic() - began > SECONDS:
                left.append(Late(way, self.micro_batches, begun=False))
                continue
            fits, late = own.fitting(way)
            found += [fits] if fits else []
            left.append(Late(way, late))
        return sorted(found, key=lambda recipe: recipe.slowest), own.still(left), own.seen

    def still(self, left: list[Late]) -> list[Late]:
        """What may fit by all that was predicted since."""
        some = [one._replace(micro_batches=self.may_fit(*one[:2])) for one in left]
        return [one for one in some if one.micro_batches]

    def smallest(self, left: list[Late]) -> tuple[list[Recipe], Recipe | None]:
        """Where nothing fits: the smallest way, if its time was over or a bound left it out, which
        may fit after all; else the nearest miss. `left` is what was not predicted."""
        for late in [one for one in left if one.way == SMALLEST and not one.begun]:
            left.remove(late)
            best, numbers = self.fitting(SMALLEST)
            left += [Late(SMALLEST, numbers)] if numbers else []
            if best:
                return [best], None
        begun = any(one.way == SMALLEST for one in left)
        if not begun and not any((r.way, r.micro_batch) == (SMALLEST, 1) for r in self.seen):
            try:
                self.recipe(SMALLEST, 1)
            except TooLong:
                left.append(Late(SMALLEST, [1]))
        if not self.seen:
            may_fit = self.may_fit(SMALLEST, [1])
            raise TooLong(NOTHING) if may_fit else ValueError(WEIGHTS)
        least = min(self.seen, key=lambda recipe: recipe.need)
        fits = least.need <= self.asked.card.memory
        return ([least], None) if fits else ([], least)

    def named(self, left: list[Late]) -> list[str]:
        """The names of what was not predicted: of ways, or of micro-batches of one."""
        whole = self.micro_batches
        return [way.of(*some) if begun and some != whole else way.name for way, some, begun in left]


def _others(numbers: list[int], tried: int, share: int, fits: bool) -> list[int]:
    """Those of interest once one was tried: larger ones; where it does not fit smaller ones, and
    all samples at once, which may need less."""
    return [n for n in numbers if (n > tried if fits else n < tried or tried < n == share)]


def _best(recipe: Recipe) -> bool:
    """Whether no way that saves more memory computes less."""
    return recipe.accumulation == 1 and not recipe.way.checkpointing


def fit_several(
    model: str,
    gpus: str,
    task: str | None = None,
    length: int | None = None,
    batch: int = 8,
    *,
    say: Callable[[str], None] = no_progress,
    cache: bool = True,
    host: float | str | None = None,
    processes: int = 1,
) -> Several:
    """Ways to train a language model over several cards of one machine, predicted.

    Args:
        model: a name in `data/configs`, a hub id or a local folder.
        gpus: so many cards of `data/gpus.csv`, "8xA100-80GB", or of a size, "2x24GiB".
        task: None, or "language_modelling".
        length: tokens of a sample.
        batch: samples of an optimizer step, over all cards.
        say: is told what is being predicted.
        cache: whether predictions are kept on disk, in `build/predictions`.
        host: seconds that the card's computer takes for an operation, as `predict` takes them.
        processes: how many predict at a time, as for `fit`; two are used at most.

    Returns:
        A `Several`: recipes, least change first, then the fastest, or the nearest miss.

    Raises:
        ValueError, OSError: one sentence that says what to change.
    """
    asked, ranks = ask_several(model, gpus, task, length, batch)
    host_of(host, asked.card)  # what is wrong with it is said at once
    search = Search(asked, ranks, say, cache, host, [])
    recipes, left = search.recipes(processes)
    recipes, miss = (recipes, None) if recipes else search.smallest(left)
    shared = dict(asked=asked, ranks=ranks, cut_margin=cut_margin())
    return Several(**shared, recipes=recipes, miss=miss, not_tried=search.named(search.still(left)))
