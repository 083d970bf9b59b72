"""`data/fits.csv`: answers of the planner that take too long to search for in a lesson.

One row a recipe; where nothing fits, one row with the nearest miss.
"""

from pathlib import Path

import pandas as pd

from evidence.runs import Job
from evidence.tables import DATA, replace_file, today
from helpers.hardware import versions
from planner import fit
from planner.question import ask
from planner.script import script
from planner.techniques import Plan

PREDICTED = DATA / "fits.csv"
KEY = ["model", "gpu", "length", "batch"]
QUESTIONS = {  # by name: model, card, tokens of a sample, samples of a step
    "llama-3.2-1b on T4": ("llama-3.2-1b", "T4", 1024, 8),
    "llama-3.1-8b on 12GiB": ("llama-3.1-8b", "12GiB", 1024, 8),
    "llama-3.1-8b on 6GiB": ("llama-3.1-8b", "6GiB", 1024, 8),
    "qwen3-0.6b on T4": ("qwen3-0.6b", "T4", 512, 16),
    "gpt-oss-20b on 24GiB": ("gpt-oss-20b", "24GiB", 1024, 8),
    "qwen3-30b-a3b on 24GiB": ("qwen3-30b-a3b", "24GiB", 1024, 8),
}


def to_make(again: bool = False) -> list[Job]:
    """The questions whose answer is not there, or that other code gave."""
    jobs = [Job("fit", "evidence.fits", "fits", name) for name in QUESTIONS]
    old = pd.read_csv(PREDICTED)
    made = old.reindex(columns=[*KEY, "code_hash"]).itertuples(index=False, name=None)
    stand = {tuple(known) for *known, code in made if code == jobs[0].code}
    return [job for job in jobs if again or QUESTIONS[job.run] not in stand]


def answers(question: str) -> list[dict]:
    """What `fit` says, in bytes and tokens."""
    model, gpu, length, batch = QUESTIONS[question]
    found = fit(model, gpu, length=length, batch=batch, say=print)
    rows = []
    for r in found.recipes or [found.miss]:
        row = {"model": model, "gpu": gpu, "length": length, "batch": batch}
        row |= {"fits": bool(found.recipes), "recipe": r.name, "kind": r.kind}
        row |= {"micro_batch": r.micro_batch, "accumulation": r.accumulation, "need": r.need}
        row |= {"memory": found.question.card.memory, "peak_allocated": r.facts.peak_allocated}
        row |= r.facts.by_category | {"tokens_per_second": r.tokens_per_second}
        row |= {"tokens_low": r.tokens_low, "tokens_high": r.tokens_high}
        row |= {"limited_by": r.facts.limited_by, "largest_micro_batch": r.largest_micro_batch}
        row |= {"smallest_card": r.smallest_card}
        row |= {"price": r.price, "remedy": "" if found.recipes else found.remedy, "code": r.code}
        row |= {library: versions()[library] for library in ("torch", "transformers")}
        rows.append(row)
    return rows


def pasted(row: pd.Series) -> str:
    """What is pasted today for the recipe of a row."""
    question = ask(row["model"], row["gpu"], length=row["length"], batch=row["batch"])
    return script(question, Plan.named(row["recipe"]), row["micro_batch"])


def write(results: dict[Job, list[dict]], path: Path = PREDICTED) -> None:
    """Put answers into the table, in the order of the questions; others keep theirs."""
    old, tables = pd.read_csv(path), []
    new = {
        QUESTIONS[job.run]: pd.DataFrame(rows).assign(date=today(), code_hash=job.code)
        for job, rows in results.items()
    }
    for question in QUESTIONS.values():
        same = (old[KEY] == list(question)).all(axis=1)
        tables.append(new.get(question, old[same]))
    replace_file(path, pd.concat(tables))


def write_pasted(path: Path = PREDICTED) -> None:
    """Renew the code that is pasted, and search for nothing."""
    table = pd.read_csv(path)
    table["code"] = table.apply(pasted, axis=1)
    replace_file(path, table)
