"""Which recipe fits this card? Combinations of the course's techniques, predicted and ordered.

What may fit is told by few predictions (`candidates`), and then predicted in full; only full
predictions are shown.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

from fake_cuda.units import PICTURES, TEXTS_AND_PICTURES
from helpers.hardware import supports, versions
from helpers.host import host_of

from .answer import CHANGE, ORDERS, SMALLEST, Fit, Recipe, ordered
from .candidates import Candidate, Candidates
from .lengths import about_data, longest_sample
from .predictions import Predictions, no_progress
from .question import Question, ask, known_cards, token_counts
from .script import script
from .techniques import KINDS, Kind, Plan
from .techniques import SMALLEST as SMALLEST_KIND

# The numbers below are choices of ours; no row of data chose them.
# A kind that changes more has to be so many times as fast as what was found, to be shown. Of two
# published runs that differ by 5 % the right one is nearly always predicted to be faster (README).
FASTER = 1.1
AS_SMALL = 1.02  # plans that need so many times the least are as small: then less trouble decides


@dataclass(frozen=True)
class Search:
    """The search for recipes, by what is predicted for a question."""

    predictions: Predictions

    @property
    def question(self) -> Question:
        """What is asked."""
        return self.predictions.question

    @cached_property
    def candidates(self) -> Candidates:
        """What may fit."""
        return Candidates(self.predictions)

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
        _ = self.candidates  # which threads would make side by side
        return sum(self.predictions.each(self._fastest, [rivals, *others]), [])

    def _fastest(self, kinds: list[Kind]) -> list[Recipe]:
        """Those of rivals that fit, each faster than all before it."""
        found: list[Recipe] = []
        likely = self._likely(kinds)
        self._predict_at_once([candidates for _, candidates in likely])
        for kind, (limit, candidates) in zip(kinds, likely, strict=True):
            fastest = min((rival.facts.step_seconds for rival in found), default=math.inf)
            if limit < fastest / FASTER:  # what is to be beaten is slower than its line
                candidates = self.candidates.likely(kind, fastest / FASTER)
            recipe = self._first_that_fits(candidates, fastest)
            tried = candidates and candidates[0].seconds * FASTER < fastest
            if tried and recipe is None:
                recipe = self._first_that_fits(self.candidates.to_try(kind), fastest)
            found += filter(None, [recipe])
        return found

    def _likely(self, kinds: list[Kind]) -> list[tuple[float, list[Candidate]]]:
        """What is likely of each of rivals, and of how many seconds it has to stay below to be
        faster than those before it, by their lines."""
        found, fastest = [], math.inf
        for kind in kinds:
            candidates = self.candidates.likely(kind, fastest / FASTER)
            found.append((fastest / FASTER, candidates))
            fits = [one.seconds for one in candidates if one.need <= self.question.card.memory]
            fastest = min([fastest, *fits])
        return found

    def _first_that_fits(self, candidates: list[Candidate], fastest: float) -> Recipe | None:
        """The first that is predicted to fit, of those that are faster than rivals."""
        for candidate in candidates:
            if candidate.seconds * FASTER >= fastest:
                break
            facts = self.predictions.predict(candidate.plan, candidate.micro_batch)
            if self.question.need(facts.peak_reserved) <= self.question.card.memory:
                return self.recipe(candidate.plan, candidate.micro_batch, candidate.per_sample)
        return None

    def _predict_at_once(self, likely: list[list[Candidate]]) -> None:
        """Predict side by side what is asked for one by one where lines tell the truth."""
        if self.predictions.workers is None:
            return
        wanted, fastest = [], math.inf
        for candidates in likely:
            if candidates and candidates[0].seconds * FASTER < fastest:
                wanted += candidates
                fastest = min(fastest, candidates[-1].seconds)
        self.predictions.each(lambda one: self.predictions.predict(*one[1:3]), wanted)

    def smallest(self) -> list[Recipe]:
        """Of each kind that fits what needs least, whatever that takes in time."""
        _ = self.candidates  # which threads would make side by side
        found = filter(None, self.predictions.each(self._smallest, list(KINDS)))
        return [recipe for recipe in found if recipe.need <= self.question.card.memory]

    def _smallest(self, kind: Kind) -> Recipe | None:
        plans = [Plan(kind, way) for way in self.question.ways() if self.candidates.may_fit(kind)]
        lines = {plan: self.candidates.line(plan) for plan in plans}
        lines = {plan: line for plan, line in lines.items() if line.need <= self.candidates.room}
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
    image_size: int | None = None,
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
        task: one of `fake_cuda.units.TASKS`, such as "language_modelling"; guessed from the model
            if None.
        length: tokens of a sample.
        batch: samples of an optimizer step.
        image_size: pixels of a side of the picture in each sample, of a model that reads pictures
            in texts; 512 if None.
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
    question = ask(model, gpu, task, length, batch, image_size)
    host_of(host, question.card)  # what is wrong with it is said at once
    sizes = _sizes(question, model, data, longest)
    with Predictions(question, say, cache, host).side_by_side(processes) as predictions:
        search = Search(predictions)
        recipes = search.smallest() if order == SMALLEST else search.recipes()
        recipes = ordered(recipes, order)
        miss = None
        if not recipes:
            miss = search.recipe(Plan(SMALLEST_KIND, question.ways()[-1]), 1)
        kinds = [recipe.kind for recipe in recipes if longest]
        if not recipes and question.workload.task != PICTURES:
            kinds = [SMALLEST_KIND.name]
        longest_of = _longest(predictions, kinds)
        about = about_data(predictions, sizes, recipes[0] if recipes else miss) if sizes else ""
    return Fit(
        question=question,
        recipes=recipes,
        order=order,
        miss=miss,
        longest=longest_of,
        data=about,
        versions=versions(),
    )


def with_lengths(
    found: Fit,
    model: str,
    gpu: str,
    data: str | None,
    longest: bool,
    *,
    say: Callable[[str], None] = no_progress,
    processes: int = 1,
) -> Fit:
    """What is recorded, and beside it what `fit` predicts of the lengths of samples.

    Args:
        found: what `planner.recorded.fit` answered.
        model: as it was asked, by its id on the hub or by the name that is recorded.
        gpu: as it was asked.
        data: as `fit` takes it, and so the rest.
        longest: whether to ask for the longest sample of each kind of recipe.
        say: is told what is being predicted.
        processes: how many predict at a time.

    Raises:
        ValueError, OSError: one sentence that says what to change.
    """
    of = found.question.workload
    question = ask(of.name, gpu, of.task, of.length, found.question.batch, of.image_size)
    sizes = _sizes(question, model, data, longest)
    with Predictions(question, say).side_by_side(processes) as predictions:
        longest_of = _longest(predictions, [recipe.kind for recipe in found.recipes if longest])
        about = about_data(predictions, sizes, found.recipes[0]) if sizes else ""
    source = f"{found.source} What is said of the lengths of samples is predicted now."
    return replace(found, longest=longest_of, data=about, source=source)


def _sizes(question: Question, model: str, data: str | None, longest: bool) -> list[int]:
    """Tokens of each sample of given data; ValueError where the model reads no such samples."""
    task = question.workload.task
    if task == PICTURES and (data or longest):
        raise ValueError(f"{model} reads pictures of one size: none is longer, and none has texts")
    if data and task == TEXTS_AND_PICTURES:
        raise ValueError(f"{model} reads a picture with each text: leave out --data, say --length")
    return token_counts(data, question.hub_id) if data else []


def _longest(predictions: Predictions, kinds: list[str]) -> dict[str, int]:
    """Tokens of the longest sample that fits, by kind."""
    plans = [Plan(k, predictions.question.ways()[-1]) for k in KINDS if k.name in kinds]
    lengths = predictions.each(partial(longest_sample, predictions), plans)
    return {plan.kind.name: tokens for plan, tokens in zip(plans, lengths, strict=True)}
