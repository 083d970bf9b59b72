"""What `fit` answers: recipes with their numbers, as text and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from fake_cuda.cards import gib
from fake_cuda.units import SAMPLES

from .facts import Facts

if TYPE_CHECKING:  # they load torch, which what is recorded does not need
    from .question import Question
    from .techniques import Plan

CHANGE, FASTEST, SMALLEST = "change", "fastest", "smallest"
ORDERS = {  # of recipes, and what is said of an order that was asked for
    CHANGE: "",
    FASTEST: "The fastest is first.",
    SMALLEST: "What needs least is first: of each kind the combination that saves most, and of "
    "those as small the least trouble.",
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One combination, predicted in full.

    Args:
        plan: the combination.
        price: what it costs in quality or trouble.
        micro_batch: samples of a micro-batch.
        accumulation: micro-batches of a step.
        facts: the prediction.
        need: bytes that the card must hold, with the margin and the context.
        largest_micro_batch: samples of the largest that would fit, by a line.
        smallest_card: the name of the smallest known card that holds it, if there is one.
        tokens_per_second: None on a card whose rates are unknown.
        tokens_low: at the longest time of a step.
        tokens_high: at the shortest.
        code: a script to paste.
    """

    plan: Plan
    price: str
    micro_batch: int
    accumulation: int
    facts: Facts
    need: int
    largest_micro_batch: int
    smallest_card: str | None
    tokens_per_second: float | None
    tokens_low: float | None
    tokens_high: float | None
    code: str = field(repr=False)

    @property
    def kind(self) -> str:
        """What training changes, such as "LoRA"."""
        return self.plan.kind.name

    @property
    def name(self) -> str:
        """Such as "LoRA, checkpointing"."""
        return self.plan.name

    def to_dict(self) -> dict:
        """Its numbers and its code, for programs."""
        return {
            "kind": self.kind,
            "name": self.name,
            "price": self.price,
            "micro_batch": self.micro_batch,
            "accumulation": self.accumulation,
            "facts": asdict(self.facts),
            "need": self.need,
            "largest_micro_batch": self.largest_micro_batch,
            "smallest_card": self.smallest_card,
            "tokens_per_second": self.tokens_per_second,
            "tokens_low": self.tokens_low,
            "tokens_high": self.tokens_high,
            "code": self.code,
        }


def ordered(recipes: list[Recipe], order: str) -> list[Recipe]:
    """Recipes of which the least change comes first, in one of `ORDERS`."""
    keys = {
        CHANGE: lambda recipe: 0,
        FASTEST: lambda recipe: -(recipe.tokens_per_second or 0),
        SMALLEST: lambda recipe: recipe.need,
    }
    return sorted(recipes, key=keys[order])


@dataclass(kw_only=True)
class Fit:
    """The recipes that fit, in their order; else the nearest miss.

    Args:
        question: what was asked.
        recipes: those that fit.
        order: one of `ORDERS`.
        miss: what needs least, where nothing fits.
        longest: tokens of the longest sample that fits, by kind, where it was asked for.
        data: how long the samples of given data are, and what that means, in words.
        versions: of the libraries for which that holds.
        source: where it was found, in words, if it was not predicted now.
    """

    question: Question = field(repr=False)
    recipes: list[Recipe]
    order: str = CHANGE
    miss: Recipe | None = None
    longest: dict[str, int] = field(default_factory=dict)
    data: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    source: str = ""

    @property
    def shown(self) -> list[Recipe]:
        """The recipes, or the nearest miss."""
        return self.recipes or [self.miss]

    @property
    def timed(self) -> bool:
        """Whether the card's rates are known, so that steps have a time."""
        return any(recipe.tokens_per_second for recipe in self.shown)

    @property
    def not_tried(self) -> str:
        """What was left out, and why, in words."""
        why = self.question.without_liger
        return f"Liger's kernels were not tried: {why}." if why else ""

    @property
    def remedy(self) -> str:
        """What would make the nearest miss fit."""
        ways = [f"with samples of {n:,} tokens" for n in self.longest.values() if n]
        ways += [f"on {self.miss.smallest_card or 'none of the cards in data/gpus.csv'}"]
        return f"it would fit {' or '.join(ways)}"

    def about(self, recipe: Recipe) -> list[str]:
        """What is said of a recipe, line by line."""
        said = {
            "micro-batch": f"{recipe.micro_batch} x {recipe.accumulation}",
            "needs": gib(recipe.need),
        }
        if recipe.tokens_per_second:
            pace = recipe.tokens_per_second, recipe.tokens_low, recipe.tokens_high
            workload = self.question.workload
            unit = SAMPLES.get(workload.task, "tokens")
            each = workload.length if workload.task in SAMPLES else 1
            middle, low, high = (_two_digits(tokens / each) for tokens in pace)
            said[f"{unit}/s"] = f"{middle} ({low} to {high})"
            said["limited by"] = recipe.facts.limited_by
        said |= {name: gib(size) for name, size in recipe.facts.by_category.items()}
        said["largest micro-batch"] = recipe.largest_micro_batch if self.recipes else "-"
        said["smallest card"] = recipe.smallest_card or "none known"
        if self.longest:
            said["longest sample"] = f"{self.longest.get(recipe.kind, 0):,}"
        said["price"] = recipe.price
        return [recipe.name, *(f"  {key:20} {value}" for key, value in said.items())]

    def _head(self) -> list[str]:
        asked = self.question
        lines = [
            f"{asked.workload.title}, effective batch {asked.batch}, on "
            f"{asked.card.facts['asked']}: {gib(asked.card.memory)}, "
            "of which the recipes leave room for a context",
            f"and for {asked.margin:.1%} more than predicted: 19 of 20 blind runs needed no more.",
        ]
        by_change = self.order != SMALLEST and not self.timed
        if not self.timed:
            rest = ", and the order of the recipes is that of change alone" * by_change
            about = f"The rates of a {asked.card.name} are not in data/gpus.csv: no speeds{rest}."
            lines.append(about)
        if self.recipes and ORDERS[self.order] and not by_change:
            lines.append(ORDERS[self.order])
        if not self.recipes:
            need = gib(self.miss.need)
            lines.append(f"Nothing fits. The nearest miss needs {need}: {self.remedy}.")
        return lines

    def __str__(self) -> str:
        lines = self._head()
        for recipe in self.shown:
            lines += ["", *self.about(recipe)]
        notes = [self.data, self.not_tried, self.source]
        notes += [recipe.facts.note for recipe in self.recipes if self.timed]
        notes = list(dict.fromkeys(filter(None, notes)))
        return "\n".join([*lines, *([""] if notes else []), *notes])

    def to_json(self) -> str:
        """Every recipe with its numbers and its code."""
        asked = self.question
        fits = bool(self.recipes)
        told = {
            "model": asked.workload.name,
            "task": asked.workload.task,
            "length": asked.workload.length,
            "image_size": asked.workload.image_size,
            "batch": asked.batch,
            "gpu": asked.card.facts["asked"],
            "memory": asked.card.memory,
            "margin": asked.margin,
            "order": self.order,
            "recipes": [{"fits": fits} | recipe.to_dict() for recipe in self.shown],
            "longest": self.longest,
            "data": self.data,
            "not_tried": self.not_tried,
            "source": self.source,
            "versions": self.versions,
        }
        return json.dumps(told, indent=2)


def _two_digits(number: float) -> str:
    return f"{float(f'{number:.2g}'):,.10g}"
