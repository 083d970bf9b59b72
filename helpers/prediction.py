"""Predict peak memory and time of `train` on a GPU, on any machine and before anything runs.

The same `Trainer` runs on fake tensors, which have a shape and a type but no data; the package
`fake_cuda` logs them and replays the log through a model of CUDA's allocator.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers.training_args import OptimizerNames

from fake_cuda import Simulation, cost, simulate
from fake_cuda.scripts import Script

from . import hardware
from .hardware import GPU, device, gib, supports, this_gpu
from .runs import compare
from .workloads import Workload, check_settings, todays

# Half a GiB stands in for a CUDA context that nobody measured: the low end of the 0.5 to 2 GiB in
# Bekman, Machine Learning Engineering, "Anatomy of model's memory usage".
CONTEXT = 2**29
# oneDNN lays inputs, weights and results out anew for its kernels (its developer guide, "Memory
# Format Propagation"), and other kernels unfold their input (aten/src/ATen/native/im2col.h).
CONVOLUTIONS = "A CPU's convolutions take scratch of their own, which is not counted."


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


REFUSED = {  # settings by how their names begin
    "torch_compile": "compiled code plans its own memory",
    "use_liger_kernel": "Triton kernels cannot run on fake tensors",
    "deepspeed": "its kernels cannot run on fake tensors",
    "fsdp": "one process is predicted, not several",
}
REFUSED_OPTIMIZERS = dict.fromkeys(("adamw_torch_8bit", "adamw_torch_4bit"), "it is compiled")
REFUSED_OPTIMIZERS["grokadamw"] = "it keeps states on the host, out of sight"
REFUSED_OPTIMIZERS["adalomo"] = "its library asks for a GPU"
# What has no bearing on the peak of a step, or would read real data, is replaced.
TWO_STEPS = dict(use_cpu=True, max_steps=2, save_strategy="no", eval_strategy="no")
TWO_STEPS |= dict(load_best_model_at_end=False, eval_on_start=False, auto_find_batch_size=False)
TWO_STEPS |= dict(lr_scheduler_type="constant", lr_scheduler_kwargs=None)
# Nor may a prediction reach the hub, a tracker or the settings of the whole process.
TWO_STEPS |= dict(report_to="none", push_to_hub=False, full_determinism=False, debug="")
TWO_STEPS |= dict(tf32=None, log_level="passive")


class _Samples(torch.utils.data.IterableDataset):
    def __init__(self, workload: Workload):
        self.workload = workload

    def __iter__(self):
        while True:
            yield self.workload.sample()


def predict(
    workload: Workload | Callable,
    name: str | None = None,
    *,
    gpu: str = "here",
    optimizer: Callable | None = None,
    host: float = cost.HOST_SECONDS,
    **settings,
) -> Prediction:
    """Predict memory and time of `train(workload, ...)` with the same keywords, without running it.

    `gpu` is a card of `data/gpus.csv`, "cpu", or "here". Instead of a workload any function will do
    that builds its model, takes two optimizer steps on the CPU and returns nothing, or a `Script`
    of `fake_cuda.scripts`, which nobody changed. `host` is how many seconds the card's computer
    needs for one operation; the notebook measure_your_card finds it with one small step. fp16 is
    predicted as bf16 (the same bytes), tf32 as fp32. ValueError for an unknown or refused setting.
    """
    card = _card(gpu)
    if not (isinstance(host, float | int) and host >= 0):
        raise ValueError(f"host={host!r} is not a number of seconds, such as {cost.HOST_SECONDS}")
    settings, renamed = todays(settings)
    if isinstance(workload, Workload):
        arguments, note = _fake_arguments(settings, optimizer, card)
        asked = workload.with_model(_fp16_as_bf16) if settings.get("fp16") else workload
        samples = settings.get("per_device_train_batch_size", 8)
        samples *= settings.get("gradient_accumulation_steps", 1)
        about = {"workload": workload.title, "changes": workload.changed}
        about |= {"samples": samples, "tokens": samples * workload.length}

        def run():
            trainer = asked.trainer(optimizer, False, _Samples(workload), **arguments)
            trainer.train()
            if settings.get("eval_strategy", "no") != "no":  # its batch may be the larger one
                batch = workload.collate([workload.sample()] * trainer.args.eval_batch_size)
                loss_only = trainer.compute_metrics is None
                trainer.prediction_step(trainer.model.eval(), batch, loss_only)
            return trainer  # its tensors live on until the log is closed

    else:
        if settings or optimizer:
            raise ValueError("a function of your own takes no settings: put them inside of it")
        if isinstance(workload, Script):
            if card is None:
                raise ValueError("a script is predicted for a card: name one, such as gpu='T4'")
            workload.card, workload.memory = card.name, card.memory
            workload.context = CONTEXT if card.context is None else card.context
        about, note = {"workload": getattr(workload, "__name__", "function")}, ""
        run = workload
    began = time.perf_counter()
    tf32, times = bool(settings.get("tf32")), settings.get("gradient_accumulation_steps", 1)
    known = card and cost.Card.of(card.name, card.capability, card.facts, tf32)
    found = simulate(run, None, card=known, host=host, repeat=times / min(2, times))
    notes = note, renamed, getattr(workload, "note", ""), found.time and found.time.note
    notes += (not card and found.convolves and CONVOLUTIONS,)
    return Prediction(
        name=name or about["workload"],
        device=card.name if card else "cpu",
        settings=settings | ({"optimizer": optimizer} if optimizer else {}),
        context=card and card.context,
        capacity=card and card.memory,
        took=time.perf_counter() - began,
        note=" ".join(filter(None, notes)),
        **about,
        **vars(found),
    )


def _fp16_as_bf16(model: torch.nn.Module) -> torch.nn.Module:
    """Autocast runs as bf16 also for fp16: weights of that type must not be cast."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.bfloat16() if tensor.dtype == torch.float16 else tensor.data
    return model


def _card(name: str) -> GPU | None:
    if name == "here":
        return this_gpu() if device().type == "cuda" else None
    return None if name == "cpu" else hardware.gpu(name)


def _fake_arguments(settings: dict, optimizer, card: GPU | None) -> tuple[dict, str]:
    """The settings for the run on fake tensors, and a note where they stand for something else."""
    check_settings(settings, optimizer, on_cpu=card is None)
    for key, value in settings.items():
        why = next((why for name, why in REFUSED.items() if value and key.startswith(name)), "")
        if key == "optim" and OptimizerNames(value).value in REFUSED_OPTIMIZERS:
            why = REFUSED_OPTIMIZERS[OptimizerNames(value).value]
        if why:
            raise ValueError(f"{key} cannot be predicted: {why}; measure it with train")
    note = ""
    if card is not None and settings.get("bf16") and not supports("bf16", card):
        capability = "{}.{}".format(*card.capability)
        note = f"bf16 is emulated on compute capability {capability}: slow, without fused attention"
    # Two micro-batches reach the peak of any number: gradients stand while activations grow.
    accumulation = min(2, settings.get("gradient_accumulation_steps", 1))
    return settings | TWO_STEPS | {"gradient_accumulation_steps": accumulation}, note
