"""One run of the kit: predicted, unless that was done before, and then measured."""

from dataclasses import replace

import psutil
import torch

import helpers
from fake_cuda.cost import HOST_SECONDS
from helpers import Workload

from .announced import values_of, workload_of
from .jobs import Job

PREDICTED = "predicted_allocated predicted_reserved context predicted_samples_per_second".split()


def measure(job: Job, on_cpu: bool, blind: dict | None = None) -> dict:
    """Predict and run one job; out of memory is an outcome like any other.

    Args:
        job: what is run.
        on_cpu: whether its tiny sister is run, on a CPU.
        blind: its row of the predictions that were written down before, if there is one.

    Returns:
        What the row says beyond the machine: bytes, seconds, errors (predicted / measured - 1).
    """
    workload, settings = workload_of(job, tiny=on_cpu), dict(job.settings)
    if on_cpu and settings.pop("fp16", False):
        settings["bf16"] = True
    if too_large := _too_large(workload):
        return {"outcome": too_large}
    values = {"workload": workload.title, "settings": helpers.runs.settings_text(settings)}
    if blind and not blind["predicted_allocated"]:
        values["outcome"] = blind["outcome"]  # it was refused: what it takes is worth knowing
    elif blind:
        values |= {key: _number(blind[key]) for key in PREDICTED}
    else:
        try:
            options = {"optimizer": job.optimizer, "host": HOST_SECONDS}  # as if nothing were known
            found = helpers.predict(workload, **options, **settings)
        except (ValueError, NotImplementedError) as error:
            return values | {"outcome": f"skipped: {error}"}
        found = values_of(found)
        values |= {key: found[key] for key in PREDICTED}
    steps = 3 if on_cpu else job.steps
    workload = workload if on_cpu else drawn_on_the_card(workload)
    try:
        run = helpers.train(workload, optimizer=job.optimizer, max_steps=steps, **settings)
    except torch.OutOfMemoryError:
        return values | {"outcome": "out of memory"}
    return values | measured(run, values) | {"outcome": "measured"}


def _number(text: str) -> float | int | None:
    return (float(text) if "." in text or "e" in text else int(text)) if text else None


def _too_large(workload: Workload) -> str:
    """Why a model cannot be built in the machine's memory; nothing where it can."""
    need, room = 4 * workload.parameters(), psutil.virtual_memory().available
    if need <= 0.9 * room:
        return ""
    why = f"is built in float32 in the machine's memory: {helpers.gib(need)}, of which"
    return f"skipped: {workload.name} {why} {helpers.gib(room)} are free"


def drawn_on_the_card(workload: Workload) -> Workload:
    """The workload, its random weights drawn by the card, which takes a moment instead of a minute.

    The model comes back to the CPU before it is changed or trained, and what drawing took is freed:
    the run itself allocates what it does without this.
    """

    class Drawn(Workload):
        def model(self, pretrained: bool = True):
            with torch.device("cuda"):
                model = replace(workload, changes=()).model(pretrained).cpu()
            helpers.free()
            for change in self.changes:
                model = change(model)
            return model.train()

    return Drawn(**vars(workload))


def measured(run, values: dict) -> dict:
    """What a finished `Run` adds to the values of its prediction."""
    found = {
        key: getattr(run, key)
        for key in ("seconds", "samples_per_second", "tokens_per_second", "peak_allocated")
    }
    found |= {"peak_reserved": run.peak_reserved, "used": run.used, "last_loss": run.losses[-1]}
    pairs = {"allocated": "peak_allocated", "reserved": "peak_reserved"}
    for kind, key in (pairs | {"samples_per_second": "samples_per_second"}).items():
        mine, real = values.get(f"predicted_{kind}"), found[key]
        found[f"error_{kind}"] = mine / real - 1 if mine and real else None
    return found
