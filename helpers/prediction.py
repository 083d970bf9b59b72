"""Predict peak memory and time of `train` on a GPU, on any machine and before anything runs.

The same `Trainer` runs on fake tensors, which have a shape and a type but no data; the package
`fake_cuda` logs them and replays the log through a model of CUDA's allocator.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fake_cuda import Card, Simulation, simulate
from fake_cuda.cards import CONTEXT
from fake_cuda.cost import Timed
from fake_cuda.ordered import full_determinism
from fake_cuda.replay import CONVOLUTIONS
from fake_cuda.scripts import Script

from . import hardware
from .hardware import GPU, device, gib, this_gpu
from .host import host_of
from .kernels import kernels_note
from .memory import spare_what_is_loaded
from .runs import compare
from .settings import arguments_for_two_steps, todays
from .workload import Workload


@dataclass(kw_only=True)
class Prediction(Simulation):
    """What a run will need on `device` ("cpu", or a card's name). All sizes in bytes.

    The peaks, the log and the timeline are those of a `fake_cuda.Simulation`. `context` is what the
    driver adds, None where nobody measured it, and `used` the sum of both, as `nvidia-smi` shows
    it. On a CPU only the allocated bytes exist. `time` holds what is known of a step's time, also
    its range and the shares of what limits it; None on a CPU. Rates have a `low` and a `high`.
    """

    name: str
    workload: str
    device: str
    settings: dict
    context: int | None = None
    capacity: int | None = None  # memory of the card
    took: float = 0.0  # seconds that predicting took
    samples: int | None = None  # of a step
    tokens: int | None = None
    note: str = ""
    changes: tuple[str, ...] = ()  # names of the functions that changed the model

    kind = "predicted"

    @property
    def used(self) -> int | None:
        return None if self.peak_reserved is None else self.peak_reserved + (self.context or 0)

    @property
    def fits(self) -> bool | None:
        """Whether it fits the card, with room for a CUDA context; None for a CPU."""
        room = CONTEXT if self.context is None else 0
        return None if self.capacity is None else self.used + room <= self.capacity

    samples_per_second = property(lambda self: self.time and self.time.per_second(self.samples))
    tokens_per_second = property(lambda self: self.time and self.time.per_second(self.tokens))

    def __str__(self) -> str:
        """The ledger of the peak, and for a card whether it fits."""
        lines = [f"{self.workload}, predicted for {self.device} in {self.took:.1f} s"]
        lines += [f"  {category:17}{gib(n):>12}" for category, n in self.by_category.items()]
        lines.append(f"{'peak allocated':19}{gib(self.peak_allocated):>12}")
        if self.capacity:
            share = f"with a CUDA context of {gib(self.context)}"
            if self.context is None:
                share = f"without the CUDA context, for which {gib(CONTEXT)} are assumed"
            verdict = "fits" if self.fits else "does not fit"
            lines.append(f"{'peak reserved':19}{gib(self.peak_reserved):>12}")
            lines.append(f"{'used':19}{gib(self.used):>12}  ({share})")
            lines.append(f"With the context it {verdict} the card's {gib(self.capacity)}.")
        if self.step_seconds:
            rate = self.samples_per_second
            lines.append(f"{rate} samples/s; {self.time}" if rate else str(self.time))
        return "\n".join(lines + ([self.note] if self.note else []))

    __repr__ = __str__  # the last line of a cell shows this, or in a notebook the table

    def _repr_html_(self) -> str:
        return compare(self).T.to_html()


class _Samples(torch.utils.data.IterableDataset):
    def __init__(self, workload: Workload):
        self.workload = workload

    def __iter__(self):
        while True:
            yield self.workload.sample()


class _Asked(NamedTuple):
    """What is to be simulated: the function that runs it, and what is known of it beforehand."""

    run: Callable
    workload: str
    note: str = ""
    changes: tuple[str, ...] = ()
    samples: int | None = None  # of a step
    tokens: int | None = None


def predict(
    workload: Workload | Callable,
    name: str | None = None,
    *,
    gpu: str = "here",
    optimizer: Callable | None = None,
    host: float | str | Timed | None = None,
    few: Sequence[Workload] = (),
    **settings,
) -> Prediction:
    """Predict memory and time of `train(workload, ...)` with the same keywords, without running it.

    fp16 is predicted as bf16 (the same bytes), tf32 as fp32.

    Args:
        workload: a `Workload`; or any function that builds its model, takes two optimizer steps on
            the CPU and returns nothing; or a `Script` of `fake_cuda.scripts`, which nobody changed.
        name: what tables call it; the workload's title without one.
        gpu: a card of `data/gpus.csv`, "cpu", or "here".
        optimizer: a function (model, args) that returns an optimizer.
        host: how many seconds the card's computer needs for one operation: a number, "fast",
            "typical" or "slow". `onegpu calibrate` finds it by one small step, or by one that was
            timed, and what it found of this machine holds for its own card.
        few: the workload with few layers, as many as `fake_cuda.simulate` takes, if all are alike.
        settings: keywords of `TrainingArguments`.

    Returns:
        Peaks in bytes, what they are made of, whether they fit, and for a card the time of a step.

    Raises:
        ValueError: a setting is unknown, or what it turns on cannot be predicted.

    Example:
        >>> from helpers import language_modelling, predict
        >>> small = language_modelling("tiny", length=16)
        >>> found = predict(small, gpu="T4", per_device_train_batch_size=2)
        >>> found.fits, found.device, found.samples
        (True, 'T4', 2)
        >>> 4 * small.parameters() == found.by_category["gradients"]
        True
    """
    spare_what_is_loaded()
    card = _card(gpu)
    seconds, about_host = host_of(host, card)
    settings, renamed = todays(settings)
    if isinstance(workload, Workload):
        asked = _training(workload, settings, optimizer, card)
    elif settings or optimizer:
        raise ValueError("a function of your own takes no settings: put them inside of it")
    else:
        asked = _own_function(workload, card)
    began = time.perf_counter()
    known, times = _known(card, settings), settings.get("gradient_accumulation_steps", 1)
    if isinstance(workload, Script):
        known = _with_memory(known, card)
    speed = {"host": seconds, "repeat": times / min(2, times)}
    if few:
        speed["few"] = [_training(one, settings, optimizer, card).run for one in few]
        speed["layers"] = workload.config.num_hidden_layers
    found = simulate(asked.run, known, **speed)
    notes = asked.note, renamed, _note_of(workload), found.time and found.time.note
    notes += found.step_seconds and about_host, not card and found.convolves and CONVOLUTIONS
    return Prediction(
        name=name or asked.workload,
        workload=asked.workload,
        device=card.name if card else "cpu",
        settings=settings | ({"optimizer": optimizer} if optimizer else {}),
        context=card and card.context,
        capacity=card and card.memory,
        took=time.perf_counter() - began,
        note=" ".join(filter(None, notes)),
        changes=asked.changes,
        samples=asked.samples,
        tokens=asked.tokens,
        **vars(found),
    )


def _training(
    workload: Workload, settings: dict, optimizer: Callable | None, card: GPU | None
) -> _Asked:
    """Two steps of the real `Trainer`, and an evaluation's batch where one is asked for."""
    arguments, note = arguments_for_two_steps(settings, optimizer, card)
    said = note, kernels_note(workload.config, bool(settings.get("use_liger_kernel")))
    changed = workload.with_model(_fp16_as_bf16) if settings.get("fp16") else workload
    samples = settings.get("per_device_train_batch_size", 8)
    samples *= settings.get("gradient_accumulation_steps", 1)

    def run():
        trainer = changed.trainer(optimizer, False, _Samples(workload), (), **arguments)
        with full_determinism(bool(settings.get("full_determinism"))):
            trainer.train()
        if settings.get("eval_strategy", "no") != "no":  # its batch may be the larger one
            batch = workload.collate([workload.sample()] * trainer.args.eval_batch_size)
            loss_only = trainer.compute_metrics is None
            trainer.prediction_step(trainer.model.eval(), batch, loss_only)
        return trainer  # its tensors live on until the log is closed

    found = run, workload.title, " ".join(filter(None, said)), workload.changed
    return _Asked(*found, samples, samples * workload.length)


def _own_function(run: Callable, card: GPU | None) -> _Asked:
    """A function or a script as it is."""
    if isinstance(run, Script) and card is None:
        raise ValueError("a script is predicted for a card: name one, such as gpu='T4'")
    return _Asked(run, getattr(run, "__name__", "function"))


def _note_of(run: Workload | Callable) -> str:
    """What is said of a workload, or of how a script ran."""
    return run.note if isinstance(run, Workload | Script) else ""


def _known(card: GPU | None, settings: dict) -> Card | None:
    tf32 = settings.get("tf32")
    if tf32 is None:  # which compiling switches on (TrainingArguments.__post_init__)
        tf32 = settings.get("torch_compile")
    return card and Card.of(card.name, card.capability, card.facts, bool(tf32))


def _with_memory(known: Card, card: GPU) -> Card:
    """As a script has to know it, which may ask how much memory there is, and run out of it."""
    context = CONTEXT if card.context is None else card.context
    return dataclasses.replace(known, memory=card.memory, context=context)


def _fp16_as_bf16(model: torch.nn.Module) -> torch.nn.Module:
    """Autocast runs as bf16 also for fp16: weights of that type must not be cast."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.bfloat16() if tensor.dtype == torch.float16 else tensor.data
    return model


def _card(name: str) -> GPU | None:
    if name == "here":
        return this_gpu() if device().type == "cuda" else None
    return None if name == "cpu" else hardware.gpu(name)
