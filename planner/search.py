"""Which recipe fits this card? Combinations of the course's techniques, predicted and ordered.

Memory and time are linear in a model's depth and in the micro-batch. So each combination is first
predicted on *twins*, of one layer of each kind and with one layer more, and with the smallest and
the largest micro-batch; what fits by these lines, or nearly, is then predicted in full, and only
full predictions are shown.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from helpers.hardware import supports, versions
from helpers.host import host_of

from .answer import CHANGE, ORDERS, SMALLEST, Fit, Recipe, ordered
from .lengths import about_data, longest_sample
from .predictions import Predictions, no_progress
from .question import Question, ask, known_cards, token_counts
from .script import script
from .techniques import KINDS, ON_THE_HOST, WAYS, Kind, Plan
from .techniques import SMALLEST as SMALLEST_KIND

# The numbers below are choices of ours; no row of data chose them.
# A kind that changes more has to be so many times as fast as what was found, to be shown. Of two
# published runs that differ by 5 % the right one is nearly always predicted to be faster (README).
FASTER = 1.1
# Plans that take so many times as long as the fastest are as good: then less trouble decides. A
# line through two predictions may be off by as much.
AS_FAST = 1.02
AS_SMALL = 1.02  # the same of what they need, where the smallest is asked for
# Of 28 combinations drawn by chance twins told up to 3.4 % more than full predictions; one outside
# of them 7 %, which this misses. They told up to 17 % less, too: full predictions then say so.
NEAR = 1.04
TIGHT = 1 / 2  # of the card for the weights: more, and the smallest plan is predicted first
TRIES = 3  # full predictions of a kind, a few seconds each; the first one nearly always fits


class Line(NamedTuple):
    """A plan's need and time by its micro-batch."""

    smallest: int  # micro-batch
    need: float  # bytes with it
    per_sample: float  # bytes of one sample more
    fastest: float  # seconds of a step that is one micro-batch
    per_micro_batch: float  # seconds of one micro-batch more

    def need_of(self, micro_batch: int) -> float:
        """Bytes that the card must hold."""
        return self.need + self.per_sample * (micro_batch - self.smallest)

    def seconds_of(self, micro_batch: int, batch: int) -> float:
        """Seconds of a step: a part for its samples, and one for each micro-batch."""
        return self.fastest + self.per_micro_batch * (batch / micro_batch - 1)


class Candidate(NamedTuple):
    """A plan with a micro-batch that may fit."""

    seconds: float  # of a step
    plan: Plan
    micro_batch: int
    need: float  # bytes, by its line
    per_sample: float  # bytes of one sample more


@dataclass(frozen=True)
class Search:
    """The search for recipes, by what is predicted for a question."""

    predictions: Predictions

    @property
    def question(self) -> Question:
        """What is asked."""
        return self.predictions.question

    @property
    def _room(self) -> float:
        return NEAR * self.question.card.memory  # of what a line may need

    def _smallest_micro_batch(self, kind: Kind) -> int:
        return 1 if kind.accumulates else self.question.batch

    def _least(self, kind: Kind) -> float:
        """Bytes that its weights need, whatever is saved; infinite if the card cannot do it."""
        asked = self.question
        if not kind.possible(asked.precision):
            return math.inf
        return asked.need(kind.least * asked.workload.parameters())

    def _may_fit(self, kind: Kind) -> bool:
        """Whether the weights alone would fit, and then the plan that saves most."""
        if self._least(kind) > self.question.card.memory:
            return False
        smallest = Plan(kind, self.question.ways()[-1])
        need = self.predictions.estimate(smallest, self._smallest_micro_batch(kind)).need
        return need <= self._room

    def _line(self, plan: Plan) -> Line | None:
        """Through the smallest and the largest micro-batch; None where not even the first fits."""
        batch, smallest = self.question.batch, self._smallest_micro_batch(plan.kind)
        slow = fast = self.predictions.estimate(plan, smallest)
        if slow.need > self._room:
            return None
        if smallest < batch:
            fast = self.predictions.estimate(plan, batch)
        # Where nothing tells how much a sample takes, it is taken for as much as all.
        per_sample = (fast.need - slow.need) / max(1, batch - smallest) or slow.need
        per_micro_batch = (slow.seconds - fast.seconds) / max(1, batch - 1)
        return Line(smallest, slow.need, per_sample, fast.seconds, per_micro_batch)

    def candidates(self, kind: Kind) -> list[Candidate]:
        """Plans of a kind that may fit by their lines, best first."""
        batch, room = self.question.batch, self.question.card.memory
        found: list[Candidate] = []
        # Where the weights leave much room, what saves most is asked for only if less does not fit.
        tight = TIGHT * room < self._least(kind)
        for way in self.question.ways() if not tight or self._may_fit(kind) else []:
            if any(one.need <= room for one in found) and ON_THE_HOST in way.techniques:
                break  # that is slower than what fits
            plan = Plan(kind, way)
            line = self._line(plan)
            if line is None and not self._may_fit(kind):
                break
            if line is None:
                continue
            for n in range(line.smallest, batch + 1):
                seconds, need = line.seconds_of(n, batch), line.need_of(n)
                if batch % n == 0 and need <= self._room:
                    found.append(Candidate(seconds, plan, n, need, line.per_sample))
            if line.need_of(batch) <= room:
                # What follows saves memory. Whether Liger's kernels save time as well no published
                # run of one card tells, so they are not taken for that.
                break
        as_good = AS_FAST * min((candidate.seconds for candidate in found), default=0)

        def order(candidate: Candidate) -> tuple:
            """Of those as good as the fastest the least trouble, then what needs least."""
            seconds = 0 if candidate.seconds <= as_good else candidate.seconds
            return seconds, WAYS.index(candidate.plan.way), candidate.micro_batch

        return sorted(found, key=order)

    def _to_try(self, kind: Kind) -> list[Candidate]:
        """Those that are predicted in full, best first: one at most that may not fit."""
        found, room = self.candidates(kind), self.question.card.memory
        doubtful = [one for one in found if one.need > room][:1]
        others = [one for one in found if one.need <= room][:TRIES]
        return sorted(doubtful + others, key=found.index)

    def recipe(self, plan: Plan, micro_batch: int, per_sample: float = 0) -> Recipe:
        """A combination predicted in full; `per_sample` are the bytes of one sample more."""
        asked = self.question
        tokens = asked.batch * asked.workload.length
        facts = self.predictions.predict(plan, micro_batch)
        need = asked.need(facts.peak_reserved)
        more = int((asked.card.memory - need) // per_sample) if per_sample > 0 else 0
        able = [card for card in known_cards() if supports(asked.precision, card)]
        fits = [card.name for card in able if asked.need(facts.peak_reserved, card) <= card.memory]
        return Recipe(
            plan=plan,
            price=asked.price(plan),
            micro_batch=micro_batch,
            accumulation=asked.batch // micro_batch,
            facts=facts,
            need=need,
            largest_micro_batch=micro_batch + more,
            smallest_card=fits[0] if fits else None,
            tokens_per_second=tokens / facts.step_seconds if facts.step_seconds else None,
            tokens_low=tokens / facts.high if facts.high else None,
            tokens_high=tokens / facts.low if facts.low else None,
            code=script(asked, plan, micro_batch),
        )

    def recipes(self) -> list[Recipe]:
        """Those that fit, at most one of a kind, least change first."""
        # What trains all weights has to be faster than what does so with less change.
        rivals = [kind for kind in KINDS if not kind.adapters]
        others = [[kind] for kind in KINDS if kind.adapters]
        return sum(self.predictions.each(self._fastest, [rivals, *others]), [])

    def _fastest(self, kinds: list[Kind]) -> list[Recipe]:
        """Those of rivals that fit, each faster than all before it."""
        found: list[Recipe] = []
        for candidates in self.predictions.each(self._to_try, kinds):
            fastest = min((rival.facts.step_seconds for rival in found), default=None)
            for candidate in candidates:
                if fastest is not None and candidate.seconds * FASTER >= fastest:
                    break
                recipe = self.recipe(candidate.plan, candidate.micro_batch, candidate.per_sample)
                if recipe.need <= self.question.card.memory:
                    found.append(recipe)
                    break
        return found

    def smallest(self) -> list[Recipe]:
        """Of each kind that fits what needs least, whatever that takes in time."""
        found = filter(None, self.predictions.each(self._smallest, list(KINDS)))
        return [recipe for recipe in found if recipe.need <= self.question.card.memory]

    def _smallest(self, kind: Kind) -> Recipe | None:
        plans = [Plan(kind, way) for way in self.question.ways() if self._may_fit(kind)]
        lines = {plan: line for plan in plans if (line := self._line(plan))}
        least = AS_SMALL * min((line.need for line in lines.values()), default=0)
        for plan, line in lines.items():
            if line.need <= least:
                return self.recipe(plan, line.smallest, line.per_sample)
        return None


def fit(
    model: str,
    gpu: str = "T4",
    task: str | None = None,
    length: int | None = None,
    batch: int = 8,
    *,
    data: str | None = None,
    longest: bool = False,
    say: Callable[[str], None] = no_progress,
    cache: bool = True,
    host: float | str | None = None,
    order: str = CHANGE,
    processes: int = 1,
) -> Fit:
    """Recipes to train a model on a card, predicted.

    Args:
        model: a name in `data/configs`, a hub id or a local folder.
        gpu: a card of `data/gpus.csv`, or a size such as "16GiB".
        task: "language_modelling" or "text_classification"; guessed from the model if None.
        length: tokens of a sample.
        batch: samples of an optimizer step.
        data: a file or data set with texts, to read for their lengths.
        longest: whether to ask for the longest sample of each kind of recipe, too.
        say: is told what is being predicted.
        cache: whether predictions are kept on disk, in `build/predictions`.
        host: seconds that the card's computer takes for an operation, as `predict` takes them.
        order: "change": of each kind of training the fastest combination, least change to the
            result first; "fastest": the same, most tokens a second first; "smallest": of each kind
            the combination that needs least memory, the smallest first.
        processes: how many predict at a time, copies of this one (`planner.workers`). The answer
            is the same.

    Returns:
        A `Fit`: recipes in their order, or the nearest miss. What a recipe
        needs, in bytes, includes a CUDA context and the margin that covers 19 of 20 blind
        predictions.

    Raises:
        ValueError, OSError: one sentence that says what to change.

    Example:
        >>> found = fit("gpt2", "A100-80GB", length=64, batch=1)
        >>> found.recipes[0].name, found.recipes[0].price
        ('full', 'nothing')
    """
    if order not in ORDERS:
        raise ValueError(f"{order!r} is no order of recipes: one of {', '.join(ORDERS)}")
    question = ask(model, gpu, task, length, batch)
    host_of(host, question.card)  # what is wrong with it is said at once
    with Predictions(question, say, cache, host).side_by_side(processes) as predictions:
        sizes = token_counts(data, question.hub_id) if data else []
        search = Search(predictions)
        recipes = search.smallest() if order == SMALLEST else search.recipes()
        most_saving = question.ways()[-1]
        miss = None if recipes else search.recipe(Plan(SMALLEST_KIND, most_saving), 1)
        kinds = [recipe.plan.kind for recipe in recipes if longest] if recipes else [SMALLEST_KIND]
        plans = [Plan(kind, most_saving) for kind in kinds]
        lengths = predictions.each(partial(longest_sample, predictions), plans)
        about = about_data(predictions, sizes, recipes[0] if recipes else miss) if sizes else ""
    return Fit(
        question=question,
        recipes=ordered(recipes, order),
        order=order,
        miss=miss,
        longest={kind.name: tokens for kind, tokens in zip(kinds, lengths, strict=True)},
        data=about,
        versions=versions(),
    )
