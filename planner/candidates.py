"""What may fit, of each kind of training, by few predictions.

Memory and time are linear in a model's depth and in the micro-batch. So each combination is
predicted on *twins*, of one layer of each kind and with one layer more, and with the smallest and
the largest micro-batch. What fits by these lines, or nearly, is a candidate.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from .predictions import Estimate, Predictions
from .question import Question
from .techniques import (
    ADAFACTOR,
    ADAMW_8BIT,
    CHECKPOINTING,
    CHUNKED_LOSS,
    ON_THE_HOST,
    WAYS,
    Kind,
    Plan,
    Way,
)

# The numbers below are choices of ours; no row of data chose them.
# Plans that take so many times as long as the fastest are as good: then less trouble decides. A
# line through two predictions may be off by as much.
AS_FAST = 1.02
# Of 28 combinations drawn by chance twins told up to 3.4 % more than full predictions; one outside
# of them 7 %, which this misses. They told up to 17 % less, too: full predictions then say so.
NEAR = 1.04
TIGHT = 1 / 2  # of the card for the weights: more, and the smallest plan is predicted first
# A chunked loss does all that the same way does without it, and the head's product once more: of
# 12,776 pairs in data/atlas, all on cards before Ampere, it took 0.9 % less than that in the best
# case, and 2.6 % more in the median.
CHUNKED = 0.99
# Checkpointing computes each layer once more but for what nobody needs again, as its last product
# (early_stop of torch.utils.checkpoint): a third of the products of a ViT's block, and less of one
# with gates.
RECOMPUTED = 2 / 3
SLOWER = {CHECKPOINTING, ON_THE_HOST, CHUNKED_LOSS}  # techniques: they do more, and save memory
# What another optimizer takes at least of the seconds that AdamW takes at a step's end, in which it
# moves 28 bytes of each float32 weight. With states of 8 bits it moves 16 or more, 0.57 of them;
# 20 are counted here, where the gradient is taken for written. Of 179,305 pairs in data/atlas that
# differ by it alone, and whose end is a hundredth of the step or more, the least is 0.64, where a
# step is kept to a tenth of a percent. Adafactor took longer in all of 331,452, also in backward.
OF_ADAMW = {ADAMW_8BIT: 0.55, ADAFACTOR: 1.0}
TRIES = 3  # full predictions of a kind, a few seconds each; the first one nearly always fits


class Line(NamedTuple):
    """A plan's need and time by its micro-batch."""

    smallest: int  # micro-batch
    need: float  # bytes with it
    per_sample: float  # bytes of one sample more
    fastest: float  # seconds of a step that is one micro-batch
    per_micro_batch: float  # seconds of one micro-batch more
    checkpointed: float  # seconds that no micro-batch goes below that computes each layer twice
    end: float = 0.0  # seconds of a step's end, at most

    def need_of(self, micro_batch: int) -> float:
        """Bytes that the card must hold."""
        return self.need + self.per_sample * (micro_batch - self.smallest)

    def seconds_of(self, micro_batch: int, batch: int) -> float:
        """Seconds of a step: a part for its samples, and one for each micro-batch."""
        return self.fastest + self.per_micro_batch * (batch / micro_batch - 1)

    def least_seconds(self, batch: int) -> float:
        """Seconds of a step with the micro-batch that takes least."""
        return min(self.fastest, self.seconds_of(self.smallest, batch))


class Candidate(NamedTuple):
    """A plan with a micro-batch that may fit."""

    seconds: float  # of a step
    plan: Plan
    micro_batch: int
    need: float  # bytes, by its line
    per_sample: float  # bytes of one sample more


@dataclass(frozen=True)
class Candidates:
    """What may fit a question's card, by what is predicted of twins."""

    predictions: Predictions
    lines: dict[Kind, dict[Way, Line]] = field(default_factory=dict, init=False, repr=False)

    @property
    def question(self) -> Question:
        """What is asked."""
        return self.predictions.question

    @property
    def room(self) -> float:
        """Bytes that a line may need: what it tells may be too much."""
        return NEAR * self.question.card.memory

    def _smallest_micro_batch(self, kind: Kind) -> int:
        return 1 if kind.accumulates else self.question.batch

    def _least(self, kind: Kind) -> float:
        """Bytes that its weights need, whatever is saved; infinite if the card cannot do it."""
        asked = self.question
        if not kind.possible(asked.precision):
            return math.inf
        return asked.need(kind.least * asked.parameters)

    def may_fit(self, kind: Kind) -> bool:
        """Whether the weights alone would fit, and then the plan that saves most."""
        if self._least(kind) > self.question.card.memory:
            return False
        smallest = Plan(kind, self.question.ways()[-1])
        need = self.predictions.estimate(smallest, self._smallest_micro_batch(kind)).need
        return need <= self.room

    def line(self, plan: Plan) -> Line:
        """Through the smallest and the largest micro-batch, or the first alone if it does not fit:
        then no seconds of others are known."""
        batch, smallest = self.question.batch, self._smallest_micro_batch(plan.kind)
        slow = fast = self.predictions.estimate(plan, smallest)
        if smallest < batch and slow.need > self.room:
            fast = Estimate(slow.need, 0.0)
        elif smallest < batch:
            fast = self.predictions.estimate(plan, batch)
        # Where nothing tells how much a sample takes, it is taken for as much as all.
        per_sample = (fast.need - slow.need) / max(1, batch - smallest) or slow.need
        per_micro_batch = (slow.seconds - fast.seconds) / max(1, batch - 1)
        twice = min(one.seconds + RECOMPUTED * one.again for one in (slow, fast))
        end = max(slow.end, fast.end)
        found = Line(smallest, slow.need, per_sample, fast.seconds, per_micro_batch, twice, end)
        self.lines.setdefault(plan.kind, {})[plan.way] = found
        return found

    def of(self, kind: Kind, slower: bool = True, limit: float = math.inf) -> list[Candidate]:
        """Plans of a kind that may fit, best first.

        Args:
            kind: of training.
            slower: whether to look at ways, too, that are no better than what fits by its line.
            limit: seconds of a step from which on nobody wants them, where `slower` is false.
        """
        batch, room = self.question.batch, self.question.card.memory
        found: list[Candidate] = []
        lines: dict[Way, Line] = {}
        in_doubt = False  # whether a way does not fit, so that the one that saves most may not
        # Where the weights leave much room, what saves most is asked for only if less does not fit.
        tight = TIGHT * room < self._least(kind)
        ways = self.question.ways() if not tight or self.may_fit(kind) else []
        for number, way in enumerate(ways):
            fitting = min((one.seconds for one in found if one.need <= room), default=math.inf)
            if fitting < math.inf and ON_THE_HOST in way.techniques:
                break  # that is slower than what fits
            least = _least_seconds(way, lines, batch)
            if not slower and (fitting <= AS_FAST * least or limit <= least):
                continue
            if not slower and self._cannot_win(kind, ways[number:], limit):
                break
            if in_doubt and not self.may_fit(kind):
                break
            line = lines[way] = self.line(Plan(kind, way))
            in_doubt = line.need > self.room
            found += self._on(line, Plan(kind, way))
            if line.need_of(batch) <= room:
                # What follows saves memory. Whether Liger's kernels save time as well no published
                # run of one card tells, so they are not taken for that.
                break
        return _in_order(found)

    def _cannot_win(self, kind: Kind, ways: list[Way], limit: float) -> bool:
        """Whether no way of a kind that would still be looked at takes less than the `limit` of
        seconds, by what is known of the same weights with AdamW."""
        lines, batch = self.lines.get(kind.with_adamw, {}), self.question.batch
        takes = min((OF_ADAMW[one] for one in kind.techniques if one in OF_ADAMW), default=1.0)
        least = [_least_seconds(way, lines, batch, spared=1 - takes) for way in ways]
        first = lines.get(ways[0])
        if kind.plainer and first and first.need_of(batch) <= self.question.card.memory:
            # With another optimizer alone it needs less, and fits: then no other way is looked at.
            return limit <= least[0]
        return all(limit <= one for one in least)

    def _on(self, line: Line, plan: Plan) -> list[Candidate]:
        """Each micro-batch of a line that may fit."""
        batch, found = self.question.batch, []
        for n in range(line.smallest, batch + 1):
            seconds, need = line.seconds_of(n, batch), line.need_of(n)
            if batch % n == 0 and need <= self.room:
                found.append(Candidate(seconds, plan, n, need, line.per_sample))
        return found

    def to_try(self, kind: Kind) -> list[Candidate]:
        """Those that are predicted in full, best first: one at most that may not fit."""
        return self._some(self.of(kind), TRIES)

    def likely(self, kind: Kind, limit: float = math.inf) -> list[Candidate]:
        """The first of `to_try` that fits by its line, with what comes before it; only of those
        that take less than the `limit` of seconds, if that is known beforehand."""
        return self._some(self.of(kind, slower=False, limit=limit), 1)

    def _some(self, found: list[Candidate], tries: int) -> list[Candidate]:
        doubtful = [one for one in found if one.need > self.question.card.memory][:1]
        others = [one for one in found if one.need <= self.question.card.memory][:tries]
        return sorted(doubtful + others, key=found.index)


def _in_order(found: list[Candidate]) -> list[Candidate]:
    """Of those as good as the fastest the least trouble first, then what needs least."""
    as_good = AS_FAST * min((candidate.seconds for candidate in found), default=0)
    slower = {one: one.seconds if one.seconds > as_good else 0 for one in found}
    return sorted(found, key=lambda one: (slower[one], WAYS.index(one.plan.way), one.micro_batch))


def _least_seconds(way: Way, lines: dict[Way, Line], batch: int, spared: float = 0.0) -> float:
    """Seconds that no micro-batch of a way goes below; 0 where nothing tells.

    Of what is asked already, those ways tell that do the same but for checkpoints, for their
    journey to the host, or for chunks of the loss. Of their steps' end a share may be spared.
    """
    found = [0.0]
    for other, line in lines.items():
        more = set(way.techniques) - set(other.techniques)
        if set(other.techniques) <= set(way.techniques) and more <= SLOWER:
            least = line.checkpointed if CHECKPOINTING in more else line.least_seconds(batch)
            least = CHUNKED * least if CHUNKED_LOSS in more else least
            found.append(least - spared * line.end)
    return max(found)
