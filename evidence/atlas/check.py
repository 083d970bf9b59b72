"""`data/atlas_check.csv`: a fixed random sample of the atlas, predicted in full.

    python -m evidence atlas-check

What is drawn follows from what is recorded, by a fixed seed: of each model the same number of
micro-batches, alone in a step or one of two, on a card of the family that is drawn as well.
"""

import random
from functools import cache
from pathlib import Path

import pandas as pd

from evidence.atlas import page, table
from evidence.runs import Job
from evidence.tables import DATA, replace_file, today
from helpers.hardware import cards, versions
from planner.atlas import ALLOCATED, SEVERAL
from planner.techniques import Plan

SET = "atlas-check"
MiB = 2**20
MODULE = "evidence.atlas.full"
PREDICTED = DATA / "atlas_check.csv"
SEED, POINTS = 31, 100
KEY = ["model", "family", "recipe", "length", "micro_batch", "accumulation", "card"]
WHAT = ["allocated_mib", "reserved_mib", "seconds"]


@cache
def _read(model: str) -> dict:
    return table.read(model)


def drawn() -> list[tuple]:
    """The sample, by `KEY`. Of a model alone it would begin with the same points."""
    recorded = [model for model in table.MODELS if table.file_of(model).exists()]
    found: list[tuple] = []
    for number, model in enumerate(recorded):
        every = _all_of(model)
        draw = random.Random(SEED + table.MODELS.index(model))
        size = POINTS // len(recorded) + (number < POINTS % len(recorded))
        found += draw.sample(every, min(POINTS, len(every)))[:size]
    return found


def _all_of(model: str) -> list[tuple]:
    found = []
    for family, recipes in _read(model)["families"].items():
        for name, own in recipes.items():
            for row in own.get("points", []):
                several = [1, 2] if len(row) > SEVERAL else [1]
                for accumulation in several:
                    for card in own["seconds"]:
                        found.append((model, family, name, *row[:2], accumulation, card))
    return found


def from_the_atlas(key: tuple) -> dict:
    """What the atlas answers for a point of the sample."""
    model, family, recipe, length, micro_batch, accumulation, card = key
    own = _read(model)["families"][family][recipe]
    at = next(k for k, r in enumerate(own["points"]) if r[:2] == [length, micro_batch])
    row, timed = own["points"][at], own["seconds"][card][at]
    start = ALLOCATED if accumulation == 1 else SEVERAL
    more = page.more_workspaces(cards()[card].capability, family)
    first, _, _, once, each, _ = timed
    seconds = first if accumulation == 1 else once + accumulation * each
    return dict(zip(WHAT, [row[start] + more, row[start + 1] + more, seconds], strict=True))


def to_make(asked: list[str], again: bool = False) -> list[Job]:
    """What of the sample is not there, or was predicted by other code."""
    if SET not in asked:
        return []
    old = pd.read_csv(PREDICTED) if PREDICTED.exists() else pd.DataFrame(columns=KEY)
    jobs = [Job("full", MODULE, SET, "|".join(map(str, key))) for key in drawn()]
    made = old.reindex(columns=[*KEY, "code_hash"]).astype(str)
    stand = {"|".join(key): code for *key, code in made.itertuples(index=False, name=None)}
    return [job for job in jobs if again or stand.get(job.run) != job.code]


def key_of(run: str) -> tuple:
    """The point that a job is about."""
    model, family, recipe, length, micro_batch, accumulation, card = run.split("|")
    return model, family, recipe, int(length), int(micro_batch), int(accumulation), card


def write(results: dict[Job, dict], path: Path = PREDICTED) -> None:
    """Put full predictions into the table, beside what the atlas has."""
    rows = {}
    if path.exists():
        old = pd.read_csv(path)
        asked = set(drawn())  # another one as models and cards are added
        every = {tuple(row[name] for name in KEY): row for row in old.to_dict("records")}
        rows = {key: row for key, row in every.items() if key in asked}
    for job, full in results.items():
        key = key_of(job.run)
        row = dict(zip(KEY, key, strict=True)) | {f"full_{name}": full[name] for name in WHAT}
        made = {name: versions()[name] for name in ("torch", "transformers")}
        rows[key] = row | made | {"date": today(), "code_hash": job.code}
    for key, row in rows.items():
        row |= {f"atlas_{name}": value for name, value in from_the_atlas(key).items()}
    columns = [*KEY, *(f"{who}_{name}" for name in WHAT for who in ("atlas", "full"))]
    table_ = pd.DataFrame(list(rows.values()))
    replace_file(path, table_[[*columns, "torch", "transformers", "date", "code_hash"]])


def added(path: Path = PREDICTED) -> pd.Series:
    """Of each point whether what is reserved was added up: a step of several micro-batches in which
    all weights learn (`points.several`). Of others the allocator's model was asked."""
    sample = pd.read_csv(path)
    adapters = sample["recipe"].map(lambda name: Plan.named(name).kind.adapters)
    return (sample["accumulation"] > 1) & ~adapters


def errors(path: Path = PREDICTED) -> pd.DataFrame:
    """The atlas against full predictions, as shares of those, one column a quantity. Seconds only
    where the card holds the step: the page shows no others, and a full prediction then tells the
    time of a run that would stop."""
    sample = pd.read_csv(path)
    found = pd.DataFrame(
        {name: sample[f"atlas_{name}"] / sample[f"full_{name}"] - 1 for name in WHAT}
    )
    known = cards()
    memory = sample["card"].map(lambda name: known[name].memory / MiB)
    return found.assign(seconds=found["seconds"].where(sample["full_reserved_mib"] <= memory))
