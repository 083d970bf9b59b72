"""`data/predictions.csv`: predictions that lessons show and that take too long to make in one."""

from pathlib import Path

import pandas as pd

from evidence import runs
from evidence.runs import Job
from evidence.tables import DATA, old_rows, replace_file, today
from fake_cuda import cost
from helpers.hardware import versions
from helpers.runs import row

PREDICTED = DATA / "predictions.csv"
KEY = ["set", "run", "variant"]
BYTES = "device workload settings peak_allocated peak_reserved used context".split()
BYTES += "parameters gradients optimizer_states activations temporaries".split()
SPEED = "samples_per_second step_seconds step_low step_high limited_by".split()
SPEED += "host matrix_products attention memory_traffic copies utilisation".split()
SPEED += "update fused_seconds".split()
COLUMNS = [*KEY, *BYTES, *SPEED, "torch", "transformers", "date", "code_hash"]


def speed(prediction) -> dict:
    """What is predicted of a step's time, of a `Prediction`; empty where nothing is claimed."""
    time = prediction.time
    if not time or not time.step_seconds:
        return dict.fromkeys(SPEED)
    facts = [prediction.samples_per_second, time.step_seconds, time.low, time.high]
    facts = [n and float(f"{n:.5g}") for n in facts] + [time.limited_by]
    facts += [round(time.shares[kind], 4) for kind in cost.KINDS]
    facts += [round(time.model_flops_utilisation, 4)]
    facts += [round(time.phases.get("optimizer step", 0.0), 4), float(f"{time.fused_seconds:.5g}")]
    return dict(zip(SPEED, facts, strict=True))


def facts(prediction) -> dict:
    """What a row keeps of a `Prediction`."""
    found = row(prediction) | speed(prediction)
    return {name: found[name] for name in [*BYTES, *SPEED]}


def keyed(old: pd.DataFrame) -> dict[tuple, dict]:
    """The rows of the table by set, run, variant and how many of that name stand before."""
    old = old.fillna({"variant": ""})
    nth = old.groupby(KEY).cumcount()
    names = old[KEY].astype(str).itertuples(index=False, name=None)
    rows = old.to_dict("records")
    return {(*name, n): row for name, n, row in zip(names, nth, rows, strict=True)}


def to_make(names: list[str], again: bool = False) -> list[Job]:
    """The predictions of the named sets that are not there, or that other code made."""
    jobs = list(runs.lesson_jobs([name for name in names if name in runs.of_lessons()]))
    made = {key: row["code_hash"] for key, row in keyed(old_rows(PREDICTED, COLUMNS)).items()}
    return [job for job in jobs if again or made.get((*job.key, job.nth)) != job.code]


def write(results: dict[Job, dict], path: Path = PREDICTED) -> None:
    """Put predictions into the table. A row stays in its place, a new one comes last, and one
    whose run the set no longer has goes."""
    rows = keyed(old_rows(path, COLUMNS))
    sets = {job.set for job in results}
    known = runs.lesson_jobs([name for name in sets if name in runs.of_lessons()])
    there = {(*job.key, job.nth) for job in known}
    rows = {key: row for key, row in rows.items() if key[0] not in sets or key in there}
    for job, found in results.items():
        made = {name: versions()[name] for name in ("torch", "transformers")}
        made |= {"date": today(), "code_hash": job.code}
        rows[*job.key, job.nth] = dict(zip(KEY, job.key, strict=True)) | found | made
    replace_file(path, pd.DataFrame(list(rows.values()), columns=COLUMNS))
