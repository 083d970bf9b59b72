"""Traces of recorded runs, kept on the disk: with them a change of the model of time alone is
recorded anew in minutes, for nothing is simulated again.

A trace is the operations of a run's last step, with the bytes that the run needs. It depends on
the run, on the libraries and on all code but `COSTS`; seconds follow from it by `cost.step_time`.
A run whose row does not come out of its trace to the last digit keeps none and is simulated each
time. Nothing is kept of the planner's searches, of what is predicted in full and of the atlas.

The folder can be deleted: `build/traces`.
"""

import gzip
import hashlib
import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from evidence import predictions, runs
from evidence.runs import Job
from evidence.tables import ROOT, libraries
from fake_cuda import cost
from fake_cuda.cards import GPU, cards

FOLDER = ROOT / "build" / "traces"
# From a trace to seconds. What is traced does not go through them.
COSTS = tuple(
    f"fake_cuda.{name}" for name in ("constant", "constants", "cost", "kernels", "queued")
)
PEAKS = {"allocated": "peak_allocated", "reserved": "peak_reserved"}


class Step(NamedTuple):
    """What `cost.step_time` was asked of the last step of a run."""

    operations: list
    phases: list[str]
    card: Any
    options: dict


class Predicted(NamedTuple):
    """A run of a source: bytes by quantity, and its step, None where nobody timed it."""

    amounts: dict[str, int]
    step: Step | None


class Lesson(NamedTuple):
    """A run of a lesson: what its row keeps, its step where it has a time, samples of a step."""

    facts: dict
    step: Step | None
    samples: int | None

    def row(self) -> dict:
        """What its row keeps, with a time by today's model."""
        if self.step is None:
            return self.facts
        time = cost.step_time(*self.step[:3], **self.step.options)
        rate = time.per_second(self.samples)
        return self.facts | predictions.speed(SimpleNamespace(time=time, samples_per_second=rate))

    def follows(self) -> bool:
        """Whether the row comes out of what is kept. The time of a bound does not, nor a script's,
        which is computed in a process of its own."""
        timed = self.facts["step_seconds"] is not None
        return timed == (self.step is not None) and repr(self.row()) == repr(self.facts)


def traced(predict: Callable) -> tuple[Any, Step | None]:
    """What a prediction returns, and the last step whose time it asked for.

    A host that is the default is not kept: it is one of the constants.
    """
    seen, real = [], cost.step_time

    def step_time(operations, phases, card, **options):
        told = {k: v for k, v in options.items() if (k, v) != ("host", cost.HOST_SECONDS)}
        seen.append(Step(operations, phases, card, told))
        return real(operations, phases, card, **options)

    with mock.patch.object(cost, "step_time", step_time):
        found = predict()
    return found, seen[-1] if seen else None


def amounts(found) -> dict[str, int]:
    """Bytes by quantity: of a simulation or prediction its peaks, else what the run returned."""
    if not isinstance(found, dict):
        found = {name: getattr(found, field) for name, field in PEAKS.items()}
    return {name: int(n) for name, n in found.items()}


def of_source(job: Job) -> Predicted:
    """Predict a run of a source, once if the same module measures and times it."""
    found, step = {}, None
    if job.bytes_too:
        predict = runs.predictions(job.module, "PEAKS", job.set)[job.run, ""]
        made, step = traced(predict)
        found = amounts(made)
    if job.seconds_too and step is None:  # the bytes were predicted without a card's rates
        step = traced(runs.predictions(job.module, "STEPS", job.set)[job.run, ""])[1]
    return Predicted(found, step if job.seconds_too else None)


def of_a_lesson(job: Job) -> Lesson:
    """Predict a run of a lesson."""
    found, step = traced(runs.of_a_lesson(job.module, job.set)[job.run, job.variant, job.nth])
    facts = predictions.facts(found)
    return Lesson(facts, step if facts["step_seconds"] else None, found.samples)


def of(job: Job) -> Predicted | dict:
    """What a source's or a lesson's run needs: from its trace, or else predicted, and kept."""
    found = kept(job)
    if found is None:
        found = of_source(job) if job.kind == "source" else of_a_lesson(job)
        keep(job, found)
        return found.facts if isinstance(found, Lesson) else found  # a bound follows from no trace
    return found.row() if isinstance(found, Lesson) else found


def place(job: Job) -> Path:
    """The file of a trace: one for each run, so that a new one takes the place of the old."""
    name = hashlib.sha256(repr((job.kind, job.module, *job.key, *job[5:])).encode()).hexdigest()
    return FOLDER / f"{name[:32]}.pickle.gz"


def made_by(job: Job) -> tuple:
    """What a trace depends on."""
    return job, runs.hash_of(job.module, without=COSTS), libraries()


def facts_of(step: Step | None) -> GPU | None:
    """What data/gpus.csv says of a step's card, as the step has it."""
    return step and cards().get(step.card.name)


def kept(job: Job) -> Predicted | Lesson | None:
    """The trace of a run, if today's code would make it, for a card of which the same is known."""
    with suppress(OSError, EOFError, pickle.UnpicklingError, AttributeError, ValueError):
        with gzip.open(place(job)) as file:  # our own file, never a downloaded one
            made, card = pickle.load(file)
            if made == made_by(job):
                found = pickle.load(file)
                return found if facts_of(found.step) == card else None
    return None


def keep(job: Job, found: Predicted | Lesson) -> None:
    """Leave a trace on the disk, whole or not at all; none if the row does not follow from it."""
    if isinstance(found, Lesson) and not found.follows():
        return
    path = place(job)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    with gzip.open(unfinished, "wb", compresslevel=1) as file:
        pickle.dump((made_by(job), facts_of(found.step)), file)
        pickle.dump(found, file)
    os.replace(unfinished, path)
