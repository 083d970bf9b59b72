"""Which way over several cards fits? Each is predicted as rank 0, least change first.

A rank is predicted by the real wrappers (`ranks`): whole, or by those of few layers where these
tell it to the byte. What cannot fit by its weights, or by what was predicted before, is left out,
and of what trains the same the search ends with the first way that needs no saving.
"""

import errno
import functools
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from fake_cuda.ordered import workspace_told
from fake_cuda.scripts.verdict import NOT_UPDATED, ONE_UPDATE, OVER
from fake_cuda.scripts.words import KEEPER_ENDED, KILLED, RANK_0
from fake_cuda.versions import chosen
from helpers.hardware import GPU, data_file, gpu, supports
from helpers.host import host_of
from helpers.prediction import Prediction
from helpers.runs import load

from . import cache
from .facts import Facts
from .micro_batches import Known
from .predictions import facts_of, no_progress
from .question import Question, known_cards
from .ranks import predict_rank, rank_script
from .several import HELD, NOTHING, RANK, SECONDS, SMALLEST, WAYS, Recipe, Several, Way, ask_several
from .workers import Workers

MIB = 2**20
# What a rank's link carries stands only in what is said of a script, in these words: a prediction
# has no field for it.
BEFORE, AFTER = (RANK_0.split("{:,.0f}")[n] for n in (0, 1))
CARRIES = re.compile(re.escape(BEFORE.split("{}")[1]) + r"([\d,]+)" + re.escape(AFTER))
UNFINISHED = ONE_UPDATE, NOT_UPDATED.partition(":")[0]
LATE = OVER.partition("{}")[2], "does not react", KILLED, KEEPER_ENDED  # why there is none at all


class TooLong(ValueError):
    """A prediction was not ready in its time, or took more memory than this machine has."""


@functools.cache
def cut_margin() -> float:
    """By how much 19 of 20 ranks of cut weights needed no more than was first predicted.

    A share of the prediction, of memory that was reserved. The allocator's model knew one stream
    then, and knows several since: so this is more than is needed, until other rows are blind.
    """
    keys = ["set", "run", "quantity"]
    blind = load("blind_several_cards").merge(load("several_cards")[[*keys, "measured"]], on=keys)
    blind = blind[blind["quantity"] == "reserved"]
    return float((blind["measured"] / blind["predicted"]).quantile(0.95) - 1)


@dataclass(frozen=True)
class Search:
    """The search for ways over so many cards; `say` is told of each prediction."""

    asked: Question
    ranks: int
    say: Callable[[str], None]
    keep: bool
    host: float | str | None
    seen: list[Recipe]  # all that was predicted

    @property
    def bf16(self) -> bool:
        """Whether the card has it: ranks know no other 16 bits."""
        return supports("bf16", self.asked.card)

    def need(self, way: Way, reserved: float, card: GPU | None = None) -> int:
        """Bytes that each card must hold, with the margin of its kind and the context."""
        margin = cut_margin() if way.parallel == "fsdp2" else self.asked.margin
        return replace(self.asked, margin=margin).need(reserved, card)

    def recipe(self, way: Way, micro_batch: int) -> Recipe:
        """A way predicted, with so many samples in a micro-batch."""
        asked, accumulation = self.asked, self.asked.batch // self.ranks // micro_batch
        # A third micro-batch finds what the second one found: two tell of all of them.
        told = min(2, accumulation)
        facts = self._facts(way, micro_batch, told, accumulation / told)
        sent = MIB * float(CARRIES.search(facts.note)[1].replace(",", ""))
        sent *= accumulation / told if way.parallel == "fsdp2" else 1  # the others send once a step
        need = self.need(way, facts.peak_reserved)
        able = [c for c in known_cards() if supports("bf16" if self.bf16 else "fp16", c)]
        fits = [c.name for c in able if self.need(way, facts.peak_reserved, c) <= c.memory]
        about = way.settings(micro_batch, accumulation, self.bf16)
        rows = [p.shape[0] for p in asked.skeleton.parameters()] + [RANK] * way.adapters
        even = all(n % self.ranks == 0 for n in rows)
        found = Recipe(
            way=way,
            micro_batch=micro_batch,
            accumulation=accumulation,
            facts=facts,
            need=need,
            sent=sent,
            seconds=self._seconds(facts.step_seconds, sent),
            held=HELD[way.parallel][even],
            smallest_card=fits[0] if fits else None,
            code=rank_script(asked.workload, self.ranks, way.parallel, **about),
        )
        self.seen.append(found)
        return found

    def _facts(self, way: Way, micro_batch: int, told: int, times: float) -> Facts:
        """The prediction with `told` micro-batches, its time that of so many times as many."""
        asked, settings = self.asked, way.settings(micro_batch, told, self.bf16)

        def _made() -> Facts:
            say = functools.partial(_said, self.say, way.of(micro_batch))
            rank = asked.workload, asked.card.name, self.ranks, way.parallel
            try:
                found = predict_rank(*rank, host=self.host, say=say, **settings)
            except (ValueError, OSError) as error:
                no_memory = getattr(error, "errno", None) == errno.ENOMEM
                if no_memory or any(words in str(error) for words in LATE):
                    raise TooLong(str(error)) from error
                raise
            # Before the first update its link carries what no other step does.
            if any(words in found.note for words in UNFINISHED):
                raise TooLong(f"{way.name} was not predicted in the time that a script has")
            return _stretched(facts_of(found), found, times)

        if not self.keep:
            return _made()
        key = [asked.workload.config.to_dict(), asked.workload.length, self.ranks, way.parallel]
        key += [settings, times, cache.code(), _script_code(), asked.card.name]
        key += [asked.card.facts, host_of(self.host, gpu(asked.card.name))]
        key += [workspace_told(), chosen().workspace_is_kept]  # which the environment decides
        return cache.kept(json.dumps(key, default=str), _made)

    def _seconds(self, computing: float, sent: float) -> dict[str, tuple[float, float]]:
        """Of a step, by link of the card: all that travels hidden, and none."""
        links = load("links").query("card == @self.asked.card.name")
        rates = {row.link: row.both_ways_gb_s * 1e9 / 2 for row in links.itertuples()}
        travel = {link: sent / rate for link, rate in rates.items()}
        return {k: (max(computing, t), computing + t) for k, t in travel.items() if computing}

    def fitting(self, way: Way) -> tuple[Recipe | None, str]:
        """A way with the largest micro-batch that fits, or None; and the name of larger ones that
        may fit and were not predicted in their time, or ""."""
        share, room, best = self.asked.batch // self.ranks, self.asked.card.memory, None
        known = Known(self.seen, self.ranks, share, self.asked.parameters, self.bf16)

        def may_fit(numbers: list[int]) -> list[int]:
            return [n for n in numbers if self.need(way, known.least(way, n)) <= room]

        left: list[int] = [n for n in range(1, share + 1) if share % n == 0]
        late: list[int] = []
        while left := may_fit(left):
            tried = self._next(way, left, known)
            try:
                found = self.recipe(way, tried)
            except TooLong:
                # Others take as long, unless one of them was predicted in its time; all samples at
                # once, where nothing is accumulated, take half of it.
                in_time = any(one.way == way and one.accumulation > 1 for one in self.seen)
                goes_on = [n for n in left if n != tried and (in_time or tried < n == share)]
                late, left = late + [n for n in left if n not in goes_on], goes_on
                continue
            fits = found.need <= room
            best = found if fits else best
            left, late = (_others(some, tried, share, fits) for some in (left, late))
        late = may_fit(late)
        return best, way.of(*sorted(late)) if late else ""

    def _next(self, way: Way, left: list[int], known: Known) -> int:
        """The largest micro-batch that seems to fit; where nothing tells, the largest if there is
        room beside the weights, else the smallest."""
        room = self.asked.card.memory
        about = {n: known.about(way, n) for n in left}
        if None in about.values():
            tight = 2 * self.need(way, known.weights(way)) > room
            return left[0] if tight else left[-1]
        fits = [n for n in left if self.need(way, about[n]) <= room]
        return max(fits, default=left[0])

    def recipes(self, processes: int = 1) -> tuple[list[Recipe], list[str]]:
        """Those that fit, and the names of what was not predicted in its time."""
        if processes < 2:
            halves = [self.half(False), self.half(True)]
        else:
            _ = self.asked.skeleton  # built once, and copied
            with Workers(processes, self.half) as workers:
                halves = workers.each(workers.ask, [False, True])
        for _, _, seen in halves:
            self.seen.extend(seen)
        return sum((found for found, _, _ in halves), []), sum((left for _, left, _ in halves), [])

    def half(self, adapters: bool) -> tuple[list[Recipe], list[str], list[Recipe]]:
        """Of what trains adapters, or all weights: what fits, the fastest first; the names of what
        was not predicted in its time; all that was predicted."""
        own, began = replace(self, seen=[]), time.monotonic()
        found: list[Recipe] = []
        left: list[str] = []
        for way in (way for way in WAYS if way.adapters == adapters):
            if any(r.way.parallel == way.parallel or _best(r) for r in found):
                continue  # what follows saves memory, which is not short
            if time.monotonic() - began > SECONDS:
                left.append(way.name)
                continue
            fits, slow = own.fitting(way)
            found += [fits] if fits else []
            left += [slow] if slow else []
        return sorted(found, key=lambda recipe: recipe.slowest), left, own.seen

    def nearest(self, left: list[str]) -> Recipe:
        """What needs least, where nothing of what was predicted fits: the smallest way is among
        it, though a bound left it out or its time was over. `left` is what was not predicted."""
        stands = any((one.way, one.micro_batch) == (SMALLEST, 1) for one in self.seen)
        if not (stands or any(name.startswith(f"{SMALLEST.name}, ") for name in left)):
            left[:] = [name for name in left if name != SMALLEST.name]
            try:
                self.recipe(SMALLEST, 1)
            except TooLong:
                left.append(SMALLEST.of(1))
        if not self.seen:
            raise TooLong(NOTHING)
        return min(self.seen, key=lambda recipe: recipe.need)


def _others(numbers: list[int], tried: int, share: int, fits: bool) -> list[int]:
    """Those of interest once one was tried: larger ones; where it does not fit smaller ones, and
    all samples at once, which may need less."""
    return [n for n in numbers if (n > tried if fits else n < tried or tried < n == share)]


def _best(recipe: Recipe) -> bool:
    """Whether no way that saves more memory computes less."""
    return recipe.accumulation == 1 and not recipe.way.checkpointing


def _said(say: Callable[[str], None], name: str, progress: str) -> None:
    say(f"predicting {name}: {progress.partition(': ')[2]}")


def _stretched(facts: Facts, found: Prediction, times: float) -> Facts:
    """The time of so many times as many micro-batches: all of a step but its end is repeated."""
    if times == 1 or not facts.step_seconds:
        return facts
    once = sum(found.time.phases.get(name, 0) for name in ("optimizer step", "between steps"))
    scale = times * (1 - once) + once
    seconds = {name: scale * getattr(facts, name) for name in ("step_seconds", "low", "high")}
    return replace(facts, **seconds)


@functools.cache
def _script_code() -> str:
    """A hash of what a rank's prediction depends on beside `cache.code`."""
    root = data_file().parent
    files = [*sorted((root / "fake_cuda" / "scripts").glob("*.py")), root / "examples/rank.jinja"]
    return cache.digest("".join(file.read_text("utf-8") for file in files))


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
    miss = None if recipes else search.nearest(left)
    if miss and miss.need <= asked.card.memory:  # which a bound had left out
        recipes, miss = [miss], None
    shared = dict(asked=asked, ranks=ranks, cut_margin=cut_margin())
    return Several(**shared, recipes=recipes, miss=miss, not_tried=left)
