"""What `make gpu` measures: runs by section, each with its model, settings and needs."""

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass


@dataclass
class Job:
    """A run to predict and to measure. `needs` names packages or keywords it cannot do without."""

    run: str
    model: str
    settings: dict
    task: str = "text_classification"
    length: int | None = None
    optimizer: Callable | None = None
    changes: tuple[Callable, ...] = ()
    needs: tuple[str, ...] = ()
    steps: int = 7


def missing(names: Iterable[str]) -> list[str]:
    """The packages that are not installed here."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def eager(model):
    model.set_attn_implementation("eager")
    return model


def lora(model):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))


def classic() -> Iterator[Job]:
    """The nine runs of 2022, with that year's attention and optimizers and with today's."""
    from evidence import classic as old

    for run, (optimizer, settings) in old.CLASSIC.items():
        needs = ("bitsandbytes",) if optimizer == "8-bit Adam" else ()
        options = {"model": "large", "needs": needs, "steps": 22}
        today = settings | {"optim": old.TODAY[optimizer]}
        yield Job(f"{run}, today", settings=today, **options)
        factory = old.OPTIMIZERS[optimizer]
        yield Job(f"{run}, 2022", settings=settings, optimizer=factory, changes=(eager,), **options)


def matrix() -> Iterator[Job]:
    """Prediction against measurement over models, sizes, precisions, optimizers and adapters."""
    bert, llama, text = "bert-large-uncased", "tinyllama-1.1b", "language_modelling"
    for batch in (1, 4, 16):
        for precision in ({}, {"bf16": True}, {"fp16": True}):
            settings = {"per_device_train_batch_size": batch} | precision
            name = f"batch {batch} {next(iter(precision), 'fp32')}"
            yield Job(f"{bert} {name}", bert, settings, length=512)
            yield Job(f"gpt2 {name}", "gpt2", settings, text, 1024)
    four = {"per_device_train_batch_size": 4}
    for optim in ("adamw_torch", "adafactor", "sgd", "rmsprop", "adamw_bnb_8bit", "lion_8bit"):
        needs = ("bitsandbytes",) if "8bit" in optim else ()
        yield Job(f"{bert} {optim}", bert, four | {"optim": optim}, length=512, needs=needs)
    yield Job(f"{bert} eager", bert, four, length=512, changes=(eager,))
    yield Job(f"{bert} eager bf16", bert, four | {"bf16": True}, length=512, changes=(eager,))
    yield Job(f"{bert} length 128", bert, four, length=128)
    yield Job("roberta-large length 256", "roberta-large", four, length=256)
    yield Job("modernbert-base bf16", "modernbert-base", four | {"bf16": True}, length=1024)
    checkpointed = {"activation_checkpointing": True}
    accumulated = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    for name, model, task in (("bert", bert, "text_classification"), ("gpt2", "gpt2", text)):
        for precision in ({}, {"bf16": True}):
            kind = next(iter(precision), "fp32")
            yield Job(f"{name} accumulated {kind}", model, accumulated | precision, task, 512)
            both = accumulated | checkpointed | precision
            yield Job(f"{name} checkpointed {kind}", model, both, task, 512, needs=(*checkpointed,))
    for model in ("qwen3-0.6b", llama, "llama-3.2-1b", "smollm2-1.7b"):
        for precision in ({}, {"bf16": True}):
            settings = {"per_device_train_batch_size": 2} | precision
            yield Job(f"{model} {next(iter(precision), 'fp32')}", model, settings, text, 1024)
        saved = {"per_device_train_batch_size": 4, "bf16": True} | checkpointed
        yield Job(f"{model} checkpointed", model, saved, text, 2048, needs=(*checkpointed,))
        adapter = {"changes": (lora,), "needs": ("peft",)}
        settings = {"per_device_train_batch_size": 4, "bf16": True}
        yield Job(f"{model} LoRA", model, settings, text, 1024, **adapter)


def waterfalls() -> Iterator[Job]:
    """The two models of lesson 16, one technique after another."""
    if missing(["bitsandbytes", "peft"]):
        print("waterfalls: skipped, bitsandbytes or peft is missing here", flush=True)
        return
    from evidence import waterfalls as both

    models = {
        "bert-large-uncased": ("text_classification", 512, both.classic()),
        "llama-3.2-3b": ("language_modelling", 4096, both.decoder()),
    }
    for model, (task, length, steps) in models.items():
        for step in steps:
            job = Job(f"{model} {step.name}", model, step.settings, task, length, step.optimizer)
            job.changes, job.needs = step.changes, ("bitsandbytes", "peft")
            yield job


SECTIONS: dict[str, Callable[[], Iterator[Job]]] = {
    "classic": classic,
    "matrix": matrix,
    "waterfalls": waterfalls,
}
