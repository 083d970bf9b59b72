"""`data/atlas`: one file a model, as the site's page reads it; `make evidence SETS=atlas`.

A file is JSON, compressed: of each family of cards and each recipe its points, in MiB, and its
seconds on each card (`points`). What nobody asks, and what would take an evening, is not made with
the other evidence: its sets have to be named, all as "atlas", or "atlas-gpt2" and the like.
"""

import gzip
import json
import os
from pathlib import Path

from evidence.runs import Job
from evidence.tables import DATA, today
from helpers.hardware import versions
from planner.atlas import packed, unpacked

FOLDER = DATA / "atlas"
ALL = "atlas"
MODULE = "evidence.atlas.points"
# New ones come last: a model's place is the seed of its part of the sample (`check`). Left out is
# distilbert: peft refuses to adapt the head of its classifier, which the planner's LoRA asks for.
MODELS = """qwen3-0.6b llama-3.2-1b qwen3-8b llama-3.1-8b qwen3-4b llama-3.2-3b smollm2-1.7b
mistral-7b tinyllama-1.1b olmo-2-1b qwen2.5-7b phi-4-14b qwen2.5-3b qwen3-14b olmo-2-7b
qwen2.5-14b mistral-nemo-12b llama-2-7b qwen3-32b powerlm-3b gpt2 gpt2-xl
qwen3-30b-a3b mixtral-8x7b llama-3.1-70b qwen3-1.7b qwen2.5-0.5b qwen2.5-1.5b smollm2-135m
smollm2-360m llama-2-13b qwen2.5-32b mistral-7b-v0.3 phi-4-mini deepseek-r1-distill-qwen-1.5b
mistral-small-24b gemma-3-1b smollm3-3b gpt-oss-20b bert-base-uncased bert-large-uncased
roberta-large modernbert-base vit-large-patch16-224 whisper-small whisper-large-v3-turbo
qwen3-vl-4b gemma-4-e2b gemma-4-e4b""".split()


def names() -> list[str]:
    """What can be asked for: all, or one model."""
    return [ALL, *(f"{ALL}-{model}" for model in MODELS)]


def file_of(model: str) -> Path:
    return FOLDER / f"{model}.json.gz"


def read(model: str) -> dict:
    """What is recorded of a model; an empty one of what is not there.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        with gzip.open(file_of(model), "rt", encoding="utf-8") as file:
            return _with(unpacked, json.load(file))
    except FileNotFoundError:
        return {}
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"{file_of(model).name} is damaged: make evidence SETS=atlas") from error


def _with(change, content: dict) -> dict:
    """A file's content with each of its recipes changed."""
    families = {
        family: {name: change(recipe) for name, recipe in recipes.items()}
        for family, recipes in content.get("families", {}).items()
    }
    return content | ({"families": families} if families else {})


def to_make(asked: list[str], again: bool = False) -> list[Job]:
    """The recipes of the named models that are not there, or that other code made."""
    models = [model for model in MODELS if ALL in asked or f"{ALL}-{model}" in asked]
    if not models:
        return []
    from evidence.atlas.points import FAMILIES
    from planner.techniques import every_plan

    found = []
    for model in models:
        made = read(model).get("families", {})
        for family in FAMILIES:
            for plan in every_plan():
                if not offered(model, family, plan):
                    continue
                job = Job("atlas", MODULE, f"{ALL}-{model}", plan.name, family)
                old = made.get(family, {}).get(plan.name, {})
                found += [job] if again or old.get("code_hash") != job.code else []
    return found


def offered(model: str, family: str, plan) -> bool:
    """Whether the planner tries a recipe for this model on such cards, whatever the length."""
    from evidence.atlas.points import FAMILIES, lengths_of
    from planner.question import ask

    card = FAMILIES[family].card
    question = _asked.get((model, family)) or ask(
        model, card, length=lengths_of(model)[-1], batch=64
    )
    _asked[model, family] = question
    return plan.way in question.ways() and plan.kind.possible(question.precision)


_asked: dict = {}


def write(results: dict[Job, dict]) -> None:
    """Put recipes into the files of their models."""
    for model in dict.fromkeys(job.set.removeprefix(f"{ALL}-") for job in results):
        file = read(model)
        families = file.get("families", {})
        for job, found in results.items():
            if job.set == f"{ALL}-{model}":
                own = families.setdefault(job.variant, {})
                own[job.run] = found | {"code_hash": job.code}
        made = {name: versions()[name] for name in ("torch", "transformers")}
        replace(model, {"model": model, **made, "date": today(), "families": families})


def replace(model: str, content: dict) -> None:
    """Write a model's file at once or not at all, the same bytes for the same content."""
    path = file_of(model)
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    text = json.dumps(_with(packed, content), separators=(",", ":"))
    unfinished.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    os.replace(unfinished, path)
