"""One measured run of the real `Trainer`."""

import gc
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

import psutil
import torch
from IPython import get_ipython
from IPython.display import display
from tqdm import tqdm
from transformers import Trainer, TrainerCallback

from .hardware import device, gib
from .kernels import kernels_note
from .memory import accelerator_bytes, free, live_bytes, measure, spare_what_is_loaded
from .prediction import predict
from .runs import Run
from .settings import check_settings, todays
from .workload import Workload
from .workloads import OFFLINE

WARM_UP = 2  # steps that are not timed: the first ones set up kernels and optimizer states
STEPS = 12
# The CPU's allocator, cuBLAS and cuDNN say so in a RuntimeError, the driver in an AcceleratorError:
# neither has a type of its own, so the text tells.
FULL = ("allocate memory", "CUDA error: out of memory", "STATUS_ALLOC_FAILED")


class _CellOutput:
    """A file for tqdm: one output of the cell, empty at the end. A saved widget would be lost."""

    shown = None

    def write(self, text: str) -> None:
        data = {"text/plain": text.strip()}
        if self.shown:
            self.shown.update(data, raw=True)
        else:
            self.shown = display(data, raw=True, display_id=True)

    def flush(self) -> None:
        """Nothing waits."""


class _Stopwatch(TrainerCallback):
    """Times the steps after the warm-up, and shows a progress bar that disappears.

    On a CPU memory is measured during the warm-up only, because logging every allocation takes
    time; on an accelerator its counters cost nothing and run to the end.
    """

    def __init__(self):
        self.bar, self.measured = tqdm(disable=True), ExitStack()
        self.on_cpu = device().type == "cpu"

    def on_train_begin(self, args, state, control, **_):
        if state.max_steps <= WARM_UP:
            raise ValueError(
                f"max_steps={state.max_steps} leaves nothing to time after {WARM_UP} warm-up "
                f"steps: use {WARM_UP + 1} or more"
            )
        self.close()  # auto_find_batch_size begins again after a failure
        self.bar = _progress(state.max_steps)
        self.usage = self.measured.enter_context(measure())
        self.batches, self.began = 0, None

    def on_substep_end(self, args, state, control, **_):
        self.batches += 1

    def on_step_end(self, args, state, control, **_):
        self.bar.update()
        self.batches += 1  # the last of the step; a step that ends an epoch may have had fewer
        if state.global_step == WARM_UP:
            self.batches = 0
            if self.on_cpu:
                self.measured.close()
                gc.collect()  # the log's thousands of events must not be swept in a timed step
            self.began = _now()

    def on_train_end(self, args, state, control, **_):
        if self.began is None:
            raise ValueError(
                "the data has too few samples for a batch of this size: make it smaller"
            )
        self.seconds = _now() - self.began
        self.steps = state.global_step - WARM_UP
        self.close()

    def results(self, trainer: Trainer, foreign: int, length: int) -> dict:
        """What a finished run took, in bytes and seconds.

        Args:
            trainer: that of the run.
            foreign: bytes that others held before it.
            length: tokens in a sample.
        """
        usage, size = self.usage, trainer.state.train_batch_size or trainer.args.train_batch_size
        return {
            "device": _device_name(),
            "seconds": self.seconds,
            "steps": self.steps,
            "samples": self.batches * size,
            "tokens": self.batches * size * length,
            "peak_allocated": usage.peak_allocated and usage.peak_allocated - foreign,
            "peak_reserved": usage.peak_reserved,
            "used": usage.used,
            "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        }

    def close(self) -> None:
        """Also after a step that failed: no profiler and no bar may stay behind."""
        self.measured.close()
        self.bar.close()


def _progress(steps: int) -> tqdm:
    in_notebook = hasattr(get_ipython(), "kernel")
    output = {"file": _CellOutput(), "ncols": 80} if in_notebook else {}
    return tqdm(total=steps, leave=False, desc="training", unit="step", **output)


def _refuse_what_cannot_run(
    workload: Workload, optimizer: Callable | None, settings: dict, on_cpu: bool
) -> None:
    """ValueError for settings that would end in an error; MemoryError where a CPU has no room."""
    check_settings(settings, optimizer, on_cpu)
    if settings.get("use_liger_kernel"):
        kernels_note(workload.config, True)
    if on_cpu:
        _refuse_what_cannot_fit(workload, optimizer, settings)


def _refuse_what_cannot_fit(workload: Workload, optimizer, settings: dict) -> None:
    """MemoryError before a CPU run that would fill the machine; small models are not looked at."""
    room = psutil.virtual_memory().available
    need = 4 * workload.parameters()  # the weights alone, which every run builds in float32
    if need < room / 20:
        return
    with suppress(ValueError):  # what cannot be predicted is measured
        need = max(
            need, predict(workload, gpu="cpu", optimizer=optimizer, **settings).peak_allocated
        )
    if need > room:
        raise MemoryError(
            f"{workload.title} needs {gib(need)} here and {gib(room)} are free: choose a smaller "
            'model, length or batch, or predict it for a card with predict(..., gpu="T4")'
        )


def _now() -> float:
    if device().type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


def train(
    workload: Workload,
    name: str | None = None,
    *,
    optimizer: Callable | None = None,
    after: Callable | None = None,
    **settings,
) -> Run:
    """Train a new model with the real `Trainer` and measure time, memory and loss.

    Without `max_steps` or `num_train_epochs` a run is 2 warm-up steps and 10 timed ones. Nothing of
    the run stays in memory. Allocated bytes are the run's own, without what was held before it;
    reserved and used bytes are the whole process's.

    Args:
        workload: what is trained.
        name: what tables call it; the workload's title without one.
        optimizer: a function (model, args) that returns an optimizer.
        after: a function of the finished trainer; what it returns is `run.after`.
        settings: keywords of `TrainingArguments`.

    Raises:
        ValueError: a setting is unknown, or would do nothing here.
        OutOfMemoryError: torch's, with what to change.
        MemoryError: a CPU has no room for the run; it comes before.

    Example:
        >>> from helpers import language_modelling, train
        >>> run = train(language_modelling("tiny", length=16), max_steps=3)
        >>> run.steps, run.samples, run.peak_allocated > 0
        (1, 8, True)
    """
    spare_what_is_loaded()
    on_cpu = device().type == "cpu"
    settings, renamed = todays(settings)
    _refuse_what_cannot_run(workload, optimizer, settings, on_cpu)
    length = {} if {"max_steps", "num_train_epochs"} & settings.keys() else {"max_steps": STEPS}
    free()
    foreign = live_bytes() if on_cpu else accelerator_bytes()  # what others hold is not this run's
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    trainer, watch = None, _Stopwatch()
    try:
        trainer = workload.trainer(optimizer, **settings, **length)
        trainer.add_callback(watch)
        _refuse_too_few_samples(trainer)
        trainer.train()
        return Run(
            name=name or workload.title,
            workload=workload.title,
            settings=settings | ({"optimizer": optimizer} if optimizer else {}),
            after=after(trainer) if after else None,
            changes=workload.changed,
            note=" ".join(filter(None, (OFFLINE if OFFLINE in workload.note else "", renamed))),
            **watch.results(trainer, foreign, workload.length),
        )
    except RuntimeError as error:
        if not _is_full(error):
            raise
        message = _does_not_fit(workload, settings)
    finally:
        watch.close()
        del trainer, watch
        if not on_cpu:  # the workload sets it for each run
            torch.set_float32_matmul_precision("high" if tf32 else "highest")
        free()
    raise torch.OutOfMemoryError(message)


def _refuse_too_few_samples(trainer: Trainer) -> None:
    if len(trainer.get_train_dataloader()) == 0:
        raise ValueError(
            f"a batch of {trainer.args.train_batch_size} is larger than the "
            f"{len(trainer.train_dataset)} samples there are: make it smaller"
        )


def _is_full(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in FULL)


def _does_not_fit(workload: Workload, settings: dict) -> str:
    size = settings.get("per_device_train_batch_size", 8)
    return (
        f"out of memory on {_device_name()}: {workload.title} does not fit with "
        f"per_device_train_batch_size={size}. Make it smaller and raise "
        "gradient_accumulation_steps by the same factor, or set activation_checkpointing=True."
    )


def _device_name() -> str:
    return torch.cuda.get_device_name() if device().type == "cuda" else device().type
