"""Predictions of the kit's runs, written down and committed before a card has measured them.

python -m tools.gpu --predict H100 writes data/announced_h100.csv. On such a card
`make gpu` then takes its predictions from there, as long as the versions are the same: they are
blind, and the card's time goes into measuring.
"""

import csv
import datetime
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import transformers

import helpers
from fake_cuda.cost import HOST_SECONDS
from helpers import Prediction, Workload

from .jobs import Job

COLUMNS = (
    "section run card torch transformers date outcome workload settings predicted_allocated "
    "predicted_reserved context predicted_seconds predicted_low predicted_high "
    "predicted_samples_per_second limited_by note"
).split()
VERSIONS = {"torch": torch.__version__, "transformers": transformers.__version__}


def workload_of(job: Job, tiny: bool = False) -> Workload:
    """What a job trains; on a CPU its tiny sister, which is not changed by name or length."""
    size, length = ("tiny", None) if tiny else (job.model, job.length)
    workload = getattr(helpers, job.task)(size, **({"length": length} if length else {}))
    for change in job.changes:
        workload = workload.with_model(change)
    return workload


def values_of(found: Prediction) -> dict:
    """The columns of a prediction; bytes and seconds."""
    time = found.time
    values = {"predicted_allocated": found.peak_allocated, "context": found.context}
    values["predicted_reserved"] = found.peak_reserved
    rate = found.samples_per_second
    values["predicted_samples_per_second"] = rate and float(rate)
    if time and time.step_seconds:
        values |= {"predicted_seconds": time.step_seconds, "limited_by": time.limited_by}
        values |= {"predicted_low": time.low, "predicted_high": time.high}
    return values


def announce(path: Path, card: str, jobs: Iterable[tuple[str, Job]], said: Callable) -> None:
    """Predict jobs for a card and append a row each; those that stand there already are kept.

    Args:
        path: the table; it is made where it is not there.
        card: a name of `data/gpus.csv`.
        jobs: pairs of a section's name and a job.
        said: told a line of each.
    """
    done = set(announced(path))
    for section, job in jobs:
        if (section, job.run) in done:
            continue
        workload = workload_of(job)
        row = dict.fromkeys(COLUMNS, "") | VERSIONS | {"section": section, "run": job.run}
        row |= {"card": card, "date": datetime.date.today().isoformat()}
        row |= {"workload": workload.title, "settings": helpers.runs.settings_text(job.settings)}
        try:
            options = {"gpu": card, "optimizer": job.optimizer, "host": HOST_SECONDS}
            found = helpers.predict(workload, **options, **job.settings)
            row |= values_of(found) | {"outcome": "predicted", "note": found.note}
        except (ValueError, NotImplementedError) as error:
            row["outcome"] = f"refused: {error}"
        with path.open("a", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow({name: "" if v is None else v for name, v in row.items()})
        said(f"{section}: {job.run}: {row['outcome']}")


def announced(path: Path) -> dict[tuple[str, str], dict]:
    """The rows of a table by (section, run) that were predicted with the versions at hand."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    same = [r for r in rows if all(r[name] == v for name, v in VERSIONS.items())]
    return {(row["section"], row["run"]): row for row in same}
