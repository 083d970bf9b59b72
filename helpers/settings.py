"""Keywords of `TrainingArguments`: today's names, and what is refused before a run."""

from collections.abc import Callable
from dataclasses import fields
from numbers import Integral

from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from .hardware import GPU, suggest, supports
from .kernels import missing_for_liger

# Names of the guides' years that today's TrainingArguments no longer has, or is about to drop.
RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "warmup_ratio": "warmup_steps",
    "group_by_length": "train_sampling_strategy",
}
UNDERSTOOD = {  # TrainingArguments still takes these, until transformers 6
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
SAME_ON_CPU = {"fp16": "use bf16=True (the same bytes)", "tf32": "leave it out"}
COUNTS = ("per_device_train_batch_size", "gradient_accumulation_steps")
REFUSED = {  # what cannot be predicted: settings by how their names begin
    "deepspeed": "its kernels cannot run on fake tensors",
    "fsdp": "one process is predicted here; for rank 0 of several ask "
    "onegpu predict --gpus 8xA100-80GB --parallel fsdp2, or --gpus with a --script",
}
MODES = (None, "default")  # of torch.compile; the others' CUDA graphs or autotuning need more
REFUSED_OPTIMIZERS = {"grokadamw": "it keeps states on the host, out of sight"}
REFUSED_OPTIMIZERS["adalomo"] = "its library asks for a GPU"
# What has no bearing on the peak of a step, or would read real data, is replaced. Nor may a
# prediction reach the hub, a tracker or the settings of the whole process.
TWO_STEPS = {
    "use_cpu": True,
    "max_steps": 2,
    "save_strategy": "no",
    "eval_strategy": "no",
    "load_best_model_at_end": False,
    "eval_on_start": False,
    "auto_find_batch_size": False,
    "lr_scheduler_type": "constant",
    "lr_scheduler_kwargs": None,
    "report_to": "none",
    "push_to_hub": False,
    "full_determinism": False,
    "debug": "",
    "tf32": None,
    "log_level": "passive",
}


def todays(settings: dict) -> tuple[dict, str]:
    """Settings by the names of today's transformers, and a note where they had older ones.

    Args:
        settings: keywords of `TrainingArguments`.

    Raises:
        ValueError: a setting is given by both of its names.
    """
    old = [name for name in UNDERSTOOD if name in settings]
    for name in old:
        if UNDERSTOOD[name] in settings:
            raise ValueError(f"{name!r} is the old name of {UNDERSTOOD[name]!r}: give one of them")
    note = "".join(
        f"{name} is called {UNDERSTOOD[name]} since transformers 5.23." for name in old[:1]
    )
    return {UNDERSTOOD.get(name, name): value for name, value in settings.items()}, note


def check_settings(settings: dict, optimizer: Callable | None, on_cpu: bool) -> None:
    """Refuse, with the remedy, what the Trainer would not take or a CPU would ignore.

    Args:
        settings: keywords of `TrainingArguments`, by today's names.
        optimizer: a function (model, args) that returns an optimizer, or None.
        on_cpu: whether the run is one of a CPU.

    Raises:
        ValueError: a setting is unknown, impossible, or does nothing on a CPU.
    """
    if optimizer is not None and not callable(optimizer):
        raise ValueError(
            "optimizer takes a function (model, args) that returns an optimizer, not an "
            "optimizer: that one belongs to a model, and each run builds its own"
        )
    for name, value in settings.items():
        _check_name(name)
        _check_value(name, value)
        if on_cpu and value and name in SAME_ON_CPU:
            raise ValueError(
                f"{name}=True does nothing on a CPU, it would train in fp32: {SAME_ON_CPU[name]}, "
                'or predict it for a card with gpu="T4"'
            )
    if settings.get("use_liger_kernel"):
        _check_liger(on_cpu)
    if on_cpu and (settings.get("activation_checkpointing_kwargs") or {}).get("offload"):
        raise ValueError("a CPU has nowhere to offload to: predict it for a card, or leave it out")


def _check_liger(on_cpu: bool) -> None:
    if on_cpu:
        raise ValueError(
            "use_liger_kernel=True needs a card, a CPU cannot run Triton's kernels: leave it out, "
            'or predict it for a card with gpu="RTX 3090"'
        )
    if missing := missing_for_liger():
        raise ValueError(
            f"use_liger_kernel=True needs the package {missing}: on Linux, python -m pip "
            "install -c constraints.txt -e '.[liger]' installs it"
        )


def _usual() -> dict[str, object]:
    """The keywords of `TrainingArguments` with their usual values."""
    return {f.name: f.default for f in fields(TrainingArguments) if f.init}


def _check_name(name: str) -> None:
    if name in RENAMED:
        raise ValueError(f"{name!r} is called {RENAMED[name]!r} in today's transformers")
    if name == "batch_size":
        raise ValueError("'batch_size' is called 'per_device_train_batch_size' by Trainer")
    if name not in _usual():
        raise ValueError(suggest(name, _usual(), "keyword of TrainingArguments"))


def _check_value(name: str, value: object) -> None:
    whole = isinstance(value, Integral) and not isinstance(value, bool)  # np.int64 is one too
    if name in COUNTS and not (whole and value >= 1):
        raise ValueError(f"{name}={value!r} is impossible: it is a whole number from 1 on")
    usual = type(_usual()[name])
    if isinstance(value, str) and usual in (int, float, bool):
        raise ValueError(
            f"{name}={value!r} is not {'True or False' if usual is bool else 'a number'}"
        )
    optimizers = [optimizer.value for optimizer in OptimizerNames]
    if name == "optim" and value not in optimizers:
        raise ValueError(suggest(value, optimizers, "optimizer"))


def arguments_for_two_steps(
    settings: dict, optimizer: Callable | None, card: GPU | None
) -> tuple[dict, str]:
    """The settings for a run on fake tensors, and a note where they stand for something else.

    Args:
        settings: as in `check_settings`.
        optimizer: as in `check_settings`.
        card: what the run is predicted for; None is a CPU.

    Raises:
        ValueError: a setting is refused, or turns on what cannot be predicted.
    """
    check_settings(settings, optimizer, on_cpu=card is None)
    for key, value in settings.items():
        why = next((why for name, why in REFUSED.items() if value and key.startswith(name)), "")
        if key == "optim" and OptimizerNames(value).value in REFUSED_OPTIMIZERS:
            why = REFUSED_OPTIMIZERS[OptimizerNames(value).value]
        if key == "torch_compile_mode" and value not in MODES:
            why = "its CUDA graphs or its autotuning take memory that no plan states"
        if key == "torch_compile_backend" and value not in (None, "inductor"):
            why = "only inductor's plan is known"
        if why:
            raise ValueError(f"{key} cannot be predicted: {why}; measure it with train")
    note = ""
    if card is not None and settings.get("bf16") and not supports("bf16", card):
        capability = "{}.{}".format(*card.capability)
        note = f"bf16 is emulated on compute capability {capability}: slow, without fused attention"
    # Two micro-batches reach the peak of any number: gradients stand while activations grow.
    accumulation = min(2, settings.get("gradient_accumulation_steps", 1))
    return settings | TWO_STEPS | {"gradient_accumulation_steps": accumulation}, note
