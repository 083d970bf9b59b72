"""Recipes over several cards: a way with so many samples, predicted as rank 0 by the real wrappers.

A rank is predicted whole, or by those of few layers where these tell it to the byte (`ranks`).
"""

import functools
import json
import re
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
from .predictions import facts_of
from .question import Question, known_cards
from .ranks import predict_rank, rank_script
from .several import HELD, RANK, Recipe, Way, cut_margin

MIB = 2**20
# What a rank's link carries stands only in what is said of a script, in these words: a prediction
# has no field for it.
BEFORE, AFTER = (RANK_0.split("{:,.0f}")[n] for n in (0, 1))
CARRIES = re.compile(re.escape(BEFORE.split("{}")[1]) + r"([\d,]+)" + re.escape(AFTER))
UNFINISHED = ONE_UPDATE, NOT_UPDATED.partition(":")[0]
# Why there is none at all: time, or this machine's memory, of which libraries say that it is over.
LATE = OVER.partition("{}")[2], "does not react", KILLED, KEEPER_ENDED
LATE += "MemoryError", "Cannot allocate memory", "can't allocate memory"


class TooLong(ValueError):
    """A prediction was not ready in its time, or took more memory than this machine has."""


@dataclass(frozen=True)
class Ranks:
    """Predictions of so many ranks, each on such a card; `say` is told of each prediction."""

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
            except (ValueError, OSError, MemoryError) as error:
                if any(words in repr(error) for words in LATE):
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
