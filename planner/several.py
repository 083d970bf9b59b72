"""Ways to train over several cards, and what `onegpu fit --gpus 2x24GiB` answers."""

import functools
import json
from dataclasses import asdict, dataclass

from helpers.hardware import gib, versions
from helpers.runs import load

from .facts import Facts
from .question import Question, ask
from .techniques import CHECKPOINTING, LORA

SECONDS = 600  # of all weights, and of adapters: no other way of it is begun then. Our choice.
RANK = 16  # of adapters, as the recipes for one card have it

NOTHING = (
    "nothing was predicted, since each prediction took more time or memory than it has here: ask "
    "for a batch of as few samples as there are cards, or again when this machine is less busy"
)
WEIGHTS = (
    "nothing fits, for the weights, with a margin and a CUDA context, need more than a card has: "
    "name larger or more cards"
)
HELD = {  # by other ranks: where some weights do not divide evenly, and where all do
    "ddp": ("all ranks hold as much",) * 2,
    "zero1": ("others keep the states of other whole weights, and may need a little more",) * 2,
    "fsdp2": ("it has the larger shards", "all ranks hold as much"),
}


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


def cards_of(text: str) -> tuple[int, str]:
    """The number and the name of "2x24GiB"; ValueError says what to write."""
    count, times, name = text.partition("x")
    if not (times and count.isdecimal() and name.strip()):
        raise ValueError(f"{text!r} is no number of cards: write 2x24GiB or 8xA100-80GB")
    if int(count) < 2:
        raise ValueError(f"{text!r} is not several cards: ask for one with --gpu {name}")
    return int(count), name.strip()


def ask_several(
    model: str, gpus: str, task: str | None = None, length: int | None = None, batch: int = 8
) -> tuple[Question, int]:
    """The question of `fit_several`'s arguments, and how many cards; or ValueError."""
    ranks, name = cards_of(gpus)
    if task not in (None, "language_modelling"):
        raise ValueError("several cards are tried for language modelling: ask for one with --gpu")
    asked = ask(model, name, task, length, batch)
    if asked.workload.task != "language_modelling":
        raise ValueError(
            f"several cards are tried for language modelling, and {model} is no language model"
        )
    if batch % ranks:
        near = batch + ranks - batch % ranks
        raise ValueError(f"a batch of {batch} does not divide over {ranks} cards: {near} does")
    return asked, ranks


@dataclass(frozen=True)
class Way:
    """What is trained, how the cards share it, and whether layers are computed twice."""

    adapters: bool
    parallel: str
    checkpointing: bool = False

    @property
    def name(self) -> str:
        """Such as "LoRA, fsdp2, checkpointing"."""
        kind = LORA.name if self.adapters else "full"
        return ", ".join([kind, self.parallel] + [CHECKPOINTING.name] * self.checkpointing)

    def of(self, *micro_batches: int) -> str:
        """Such as "LoRA, fsdp2, micro-batch 1, 2"."""
        return f"{self.name}, micro-batch {', '.join(map(str, micro_batches))}"

    @property
    def price(self) -> str:
        """What it costs in quality or trouble, in words."""
        said = [LORA.price] * self.adapters + [CHECKPOINTING.price] * self.checkpointing
        return "; ".join(said) or "nothing"

    def bytes_per_weight(self, ranks: int, bf16: bool) -> float:
        """At least on one of so many; where all are trained, with its gradient and the states of
        AdamW, 16 bytes in float32."""
        if self.adapters:
            return (2 if bf16 else 4) / (ranks if self.parallel == "fsdp2" else 1)
        return {"ddp": 16, "zero1": 8 + 8 / ranks, "fsdp2": 16 / ranks}[self.parallel]

    def settings(self, micro_batch: int, accumulation: int, bf16: bool) -> dict[str, object]:
        """Those of `predict_rank`; what is set beyond a plain run saves memory alone."""
        found = {"per_device_train_batch_size": micro_batch, "bf16": bf16}
        found |= {"gradient_accumulation_steps": accumulation}
        found |= {"activation_checkpointing": True} if self.checkpointing else {}
        found |= {"lora": RANK} if self.adapters else {}
        if self.parallel != "fsdp2":
            found["gradient_as_bucket_view"] = True
        elif accumulation > 1 and not self.adapters:
            found["sync_each_batch"] = True  # else each rank keeps all gradients whole
        return found


# Least trouble first: to set up, and then in seconds. Adapters have no states worth cutting.
SHARED = {False: ("ddp", "zero1", "fsdp2"), True: ("ddp", "fsdp2")}
WAYS = tuple(Way(a, p, c) for a in (False, True) for c in (False, True) for p in SHARED[a])
SMALLEST = WAYS[-1]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A way to train, with rank 0 predicted by the real wrappers.

    Args:
        way: what is trained, and how.
        micro_batch: samples of a micro-batch on each rank.
        accumulation: micro-batches of a step.
        facts: the prediction of rank 0; its time is that of computing alone.
        need: bytes that each card must hold, with the margin and the context.
        sent: bytes that its link carries in a step, if the cards stand in a ring.
        seconds: of a step, by link: with all that travels hidden behind computing, and with none.
        held: what other ranks hold, in words.
        smallest_card: the name of the smallest known card that holds it, if there is one.
        code: a script to launch with torchrun.
    """

    way: Way
    micro_batch: int
    accumulation: int
    facts: Facts
    need: int
    sent: float
    seconds: dict[str, tuple[float, float]]
    held: str
    smallest_card: str | None
    code: str

    @property
    def slowest(self) -> float:
        """Seconds of a step over the slowest link, with nothing hidden."""
        return max((none for _, none in self.seconds.values()), default=self.facts.step_seconds)

    def about(self, asked: Question) -> list[str]:
        """What is said of it, line by line."""
        tokens = asked.batch * asked.workload.length
        said = {
            "micro-batch": f"{self.micro_batch} x {self.accumulation} on each card",
            "needs": f"{gib(self.need)} on rank 0; {self.held}",
            "travels": f"{gib(self.sent)} in a step over each card's link",
        }
        if self.facts.step_seconds:
            took, waits_for = self.facts.step_seconds, self.facts.limited_by
            said["computes"] = f"{took:.2f} s in a step, limited by {waits_for}"
        for link, (hidden, none) in self.seconds.items():
            pace = f"{tokens / none:,.0f} to {tokens / hidden:,.0f} tokens/s"
            said[f"over {link}"] = f"{hidden:.2f} s (all hidden) to {none:.2f} s (none): {pace}"
        said |= {name: gib(size) for name, size in self.facts.by_category.items()}
        said["smallest card"] = self.smallest_card or "none known"
        said["price"] = self.way.price
        return [self.way.name, *(f"  {key:20} {value}" for key, value in said.items())]

    def to_dict(self) -> dict:
        """Its numbers and its code, for programs."""
        return {"name": self.way.name, "price": self.way.price} | asdict(self)


@dataclass(kw_only=True)
class Several:
    """The recipes that fit so many cards, least change first, then the fastest; else the miss.

    Args:
        asked: the model, one of the cards, and the samples of a step over all of them.
        ranks: how many cards.
        cut_margin: how much more than predicted a rank of cut weights may need, as a share.
        recipes: those that fit.
        miss: of what was predicted what needs least, where nothing fits.
        not_tried: names of what may fit and was not predicted in its time: of ways, or of
            micro-batches of one.
    """

    asked: Question
    ranks: int
    cut_margin: float
    recipes: list[Recipe]
    miss: Recipe | None
    not_tried: list[str]

    @property
    def shown(self) -> list[Recipe]:
        """The recipes, or the nearest miss."""
        return self.recipes or [self.miss]

    @property
    def remedy(self) -> str:
        """What would make the nearest miss fit."""
        card = self.miss.smallest_card
        larger = f"{self.ranks} x {card} hold it" if card else "no card of data/gpus.csv holds it"
        return f"{larger}; shorter samples need less, and onegpu fit --gpu tries 4 bits"

    def __str__(self) -> str:
        asked, card = self.asked, self.asked.card
        lines = [
            f"{asked.workload.title}, effective batch {asked.batch}, on {self.ranks} x "
            f"{card.facts['asked']}: {gib(card.memory)} each, of which the recipes leave room",
            f"for a context and for more than predicted: {asked.margin:.1%}, with fsdp2 "
            f"{self.cut_margin:.1%}. 19 of 20 blind runs needed no more.",
            "What NCCL takes is not counted. Rank 0 is predicted, with PyTorch's own wrappers.",
        ]
        if not self.recipes:
            need = gib(self.miss.need)
            what = "Nothing that was predicted fits" if self.not_tried else "Nothing fits"
            lines.append(f"{what}. The nearest miss needs {need}: {self.remedy}.")
        for recipe in self.shown:
            lines += ["", *recipe.about(asked)]
        if not any(recipe.seconds for recipe in self.shown):
            why = f"No link of the {card.name} is in data/links.csv: what travels has no time."
            lines += ["", why]
        if self.not_tried:
            left = "; ".join(self.not_tried)
            lines += [
                "",
                f"Not predicted, since {SECONDS} s were over, or it takes more time or memory than "
                f"a prediction has: {left}.",
            ]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Every recipe with its numbers and its code."""
        asked, fits = self.asked, bool(self.recipes)
        told = {
            "model": asked.workload.name,
            "length": asked.workload.length,
            "batch": asked.batch,
            "ranks": self.ranks,
            "gpu": asked.card.facts["asked"],
            "memory": asked.card.memory,
            "margin": asked.margin,
            "cut_margin": self.cut_margin,
            "recipes": [{"fits": fits} | recipe.to_dict() for recipe in self.shown],
            "not_tried": self.not_tried,
            "versions": versions(),
        }
        return json.dumps(told, indent=2)
