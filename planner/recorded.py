"""`fit` at once: what `data/atlas` has recorded, where a prediction would take a minute.

It needs nothing but Python, so that an answer is there before torch would be loaded.
"""

import csv
import functools
import gzip
import importlib.metadata
import json
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from fake_cuda.cards import GPU, cards
from fake_cuda.files import data_file, own_file
from fake_cuda.units import titled

from .answer import CHANGE, Fit, Recipe
from .atlas import Asked, Found, unpacked
from .facts import Facts

MiB = 2**20
CATEGORIES = ("parameters", "gradients", "optimizer states", "activations", "temporaries")
DECIDE = ("torch", "transformers")  # the libraries whose versions decide what a run needs
PLANNER = "planner"  # the file of what is the same for all models, and of what is said of each
HOSTS = "hosts.json"  # of helpers.host: what was found of this machine
WITHIN = 0.95  # the share of the sample that the stated error covers


class Model(NamedTuple):
    """What `Fit` says of a model: its name, tokens of a sample, what it is trained for, and pixels
    of a side of a picture among these tokens."""

    name: str
    length: int
    task: str
    image_size: int | None

    @property
    def title(self) -> str:
        """As `Workload.title`."""
        return titled(self.name, self.task, self.length, self.image_size)


@dataclass(frozen=True)
class Question:
    """What was asked, as `Fit` tells it; as `planner.question.Question`, without a model."""

    workload: Model
    card: GPU
    batch: int
    margin: float
    without_liger: str


class Named(NamedTuple):
    """A plan of which only the name is known, and its kind."""

    name: str
    kind: "Kind"


class Kind(NamedTuple):
    """What training changes."""

    name: str


# ------------------------------------------------------------------------------------- what is read
@functools.cache
def read(name: str) -> dict:
    """A file of the atlas, by its name.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is damaged.
    """
    path = data_file("atlas", f"{name}.json.gz")
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        raise
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"{path.name} is damaged: make evidence SETS=atlas") from error


def of_model(name: str, card: str = "") -> dict:
    """What is recorded of a model, with what is said and pasted for each recipe.

    Args:
        name: the model.
        card: the one whose seconds are wanted; all if "".
    """
    said, recorded = read(PLANNER)["models"][name], read(name)
    families = {}
    for family, own in said["families"].items():
        recipes = recorded["families"][family]
        known = {key: about | unpacked(recipes[key], card) for key, about in own["recipes"].items()}
        families[family] = own | {"recipes": known}
    return recorded | said | {"families": families}


@functools.cache
def usual_error() -> float:
    """How far 19 of 20 points of the sample lie from full predictions, in what is reserved."""
    with data_file("atlas_check.csv").open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    names = "atlas_reserved_mib", "full_reserved_mib"
    found, full = ([float(row[name]) for row in rows] for name in names)
    errors = sorted(abs(one / other - 1) for one, other in zip(found, full, strict=True))
    return errors[min(len(errors) - 1, int(WITHIN * len(errors)))]


# -------------------------------------------------------------------------------------- the answer
def fit(
    model: str,
    gpu: str,
    length: int | None,
    batch: int,
    order: str = CHANGE,
    task: str | None = None,
    image_size: int | None = None,
) -> Fit | None:
    """The recipes that fit a card, as recorded.

    Args:
        model: its name in data/configs, or its id on the hub.
        gpu: a card of `data/gpus.csv`, or memory, such as "24GiB".
        length: tokens of a sample; None stands for as many as the model usually reads.
        batch: samples of an optimizer step.
        order: as `planner.fit` takes it.
        task: of the model; its usual one if None.
        image_size: pixels of a side of a picture in a text; what is recorded if None.

    Returns:
        As `planner.fit`; None where this is not recorded, or was with other versions of torch and
        transformers than are installed, or where something is known of this machine's host, or
        where nothing fits, for the search also knows what would.
    """
    try:
        asked = _asked(model, gpu, length, batch)
    except FileNotFoundError:
        return None
    except ValueError as error:
        print(f"{error}. It is passed over: all is predicted.", file=sys.stderr)
        return None
    if asked is None or not asked.complete(order) or own_file(HOSTS).is_file():
        return None
    if task and task != asked.model["task"]:
        return None
    if image_size is not None and image_size != asked.model["image_size"]:
        return None
    if not asked.card["timed"] and _has_rates(asked.card):
        return None  # its seconds are not recorded, and can be predicted
    if any(_installed(name) != _release(asked.model[name]) for name in DECIDE):
        return None
    found = asked.answer(order)
    return _answer(asked, found, order) if found else None


def _asked(model: str, gpu: str, length: int | None, batch: int) -> Asked | None:
    """The question to the atlas; None where model or card are not in it."""
    index, models = read(PLANNER)["index"], read(PLANNER)["models"]
    names = {said["hub_id"]: name for name, said in models.items()}
    name = names.get(model, model)
    card = _card(index, gpu)
    if name not in models or card is None or (name != model and Path(model).expanduser().exists()):
        return None
    content = of_model(name, card["like"])
    return Asked(index, content, card, length or content["length"], batch)


def _card(index: dict, name: str) -> dict | None:
    if size := re.fullmatch(r"(\d+) ?(?:G|GB|GiB)", str(name), re.IGNORECASE):
        name = f"{size[1]}GiB"
    known = {card["name"].lower(): card for card in index["cards"]}
    return known.get(str(name).lower())


def _has_rates(card: dict) -> bool:
    """Whether steps of this card can be timed."""
    facts = cards()[card["like"]].facts
    return bool(facts["bf16_tflops"] or facts["fp16_tflops"])


def _release(version: str) -> str:
    """Without what tells a build, such as "+cpu"."""
    return version.partition("+")[0]


def _installed(name: str) -> str:
    try:
        return _release(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return ""


def _answer(asked: Asked, found: list[Found], order: str) -> Fit:
    model = asked.model
    made = {name: _release(model[name]) for name in DECIDE}
    used = ", ".join(f"{name} {version}" for name, version in made.items())
    return Fit(
        question=_question(asked),
        recipes=[_recipe(asked, one) for one in found],
        order=order,
        versions=made,
        source=f"Recorded on {model['date']} with {used}: of 20 such answers 19 reserve within "
        f"{usual_error():.1%} of a full prediction, which --exact makes in a minute or two.",
    )


def _question(asked: Asked) -> Question:
    model, card, large = asked.model, asked.card, asked.logits_are_large()
    known = cards()[card["like"]]
    said = card["name"]
    if card["name"] != card["like"]:
        said = f"a card of {card['memory'] / 1024:.2f} GiB as fast as the {card['like']}"
    told = replace(known, memory=int(card["memory"] * MiB), facts=known.facts | {"asked": said})
    return Question(
        Model(model["model"], asked.length, model["task"], model["image_size"]),
        told,
        asked.batch,
        asked.index["margin"],
        asked.family["without_liger"] if large else "",
    )


def _recipe(asked: Asked, one: Found) -> Recipe:
    about, tokens = asked.family["recipes"][one.recipe], asked.batch * asked.length
    bytes_ = [size * MiB for size in one.by_category]
    numbers = {"length": asked.length, "micro_batch": one.micro_batch}
    numbers |= {"accumulation": one.accumulation, "samples": 2 * asked.batch}
    code = about["code"]
    for mark, number in numbers.items():
        code = code.replace("{" + mark + "}", str(number))
    by_category = dict(zip(CATEGORIES, bytes_, strict=True))
    pace = [tokens / seconds if seconds else None for seconds in (one.seconds, one.high, one.low)]
    return Recipe(
        plan=Named(one.recipe, Kind(one.kind)),
        price=about["price"],
        micro_batch=one.micro_batch,
        accumulation=one.accumulation,
        facts=Facts(
            one.allocated * MiB,
            one.reserved * MiB,
            by_category,
            {},
            one.seconds,
            one.low,
            one.high,
            one.limited_by,
        ),  # fmt: skip
        need=int(one.need * MiB),
        largest_micro_batch=asked.largest(one),
        smallest_card=asked.smallest_card(one) or None,
        tokens_per_second=pace[0],
        tokens_low=pace[1],
        tokens_high=pace[2],
        code=code,
    )
