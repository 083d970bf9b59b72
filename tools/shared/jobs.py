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


def bf16_weights(model):
    import torch

    return model.to(torch.bfloat16)


ONE = {"per_device_train_batch_size": 1, "bf16": True}
SIXTEEN = {"per_device_train_batch_size": 16, "bf16": True}


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


def small() -> Iterator[Job]:
    """Steps so short that the machine's processor sets their pace."""
    text = "language_modelling"
    for precision in ({}, {"bf16": True}):
        one = {"per_device_train_batch_size": 1} | precision
        kind = next(iter(precision), "fp32")
        yield Job(f"bert-base-uncased short {kind}", "bert-base-uncased", one, length=128, steps=22)
        yield Job(f"gpt2 short {kind}", "gpt2", one, text, 128, steps=22)
        yield Job(f"qwen3-0.6b short {kind}", "qwen3-0.6b", one, text, 128, steps=22)
    eight = {"per_device_train_batch_size": 8, "bf16": True}
    yield Job("distilbert short bf16", "distilbert-base-uncased", eight, length=128, steps=22)


def liger() -> Iterator[Job]:
    """Liger's kernels, which are written in Triton, beside the model's own layers."""
    four = {"per_device_train_batch_size": 4, "bf16": True}
    for model in ("qwen3-0.6b", "llama-3.2-1b", "gemma-3-1b"):
        for kernels in ({}, {"use_liger_kernel": True}):
            name = f"{model} {'Liger' if kernels else 'own layers'}"
            needs = ("liger_kernel",) if kernels else ()
            yield Job(name, model, four | kernels, "language_modelling", 2048, needs=needs)
    both = four | {"use_liger_kernel": True, "activation_checkpointing": True}
    name, needs = "llama-3.2-1b Liger checkpointed", ("liger_kernel", "activation_checkpointing")
    yield Job(name, "llama-3.2-1b", both, "language_modelling", 2048, needs=needs)


def compiled() -> Iterator[Job]:
    """torch.compile, alone and with what it is most often combined with."""
    text, eight = "language_modelling", {"per_device_train_batch_size": 8}
    half = {"bf16": True, "torch_compile": True}
    saved = half | {"per_device_train_batch_size": 4, "activation_checkpointing": True}
    yield Job("gpt2 compiled bf16", "gpt2", eight | half, text, 1024, steps=12)
    yield Job("bert-large-uncased compiled bf16", "bert-large-uncased", eight | half, length=512)
    four = {"per_device_train_batch_size": 4} | half
    yield Job("qwen3-0.6b compiled bf16", "qwen3-0.6b", four, text, 1024)
    yield Job("qwen3-0.6b compiled checkpointed", "qwen3-0.6b", saved, text, 2048)
    adapter = {"changes": (lora,), "needs": ("peft",)}
    yield Job("llama-3.2-1b compiled LoRA", "llama-3.2-1b", four, text, 1024, **adapter)


def modern() -> Iterator[Job]:
    """What people add today: other optimizers, tf32, longer texts, larger models with adapters."""
    text, checkpointed = "language_modelling", {"activation_checkpointing": True}
    two = {"per_device_train_batch_size": 2, "bf16": True}
    for optim in ("adamw_torch_8bit", "adamw_torch_4bit"):
        job = Job(f"qwen3-0.6b {optim}", "qwen3-0.6b", two | {"optim": optim}, text, 1024)
        job.needs = ("torchao",)
        yield job
    for optim in ("paged_adamw_8bit", "ademamix", "stable_adamw", "schedule_free_adamw"):
        job = Job(f"qwen3-0.6b {optim}", "qwen3-0.6b", two | {"optim": optim}, text, 1024)
        job.needs = {"stable_adamw": ("optimi",), "schedule_free_adamw": ("schedulefree",)}.get(
            optim, ("bitsandbytes",)
        )
        yield job
    eight = {"per_device_train_batch_size": 8, "tf32": True}
    yield Job("bert-large-uncased tf32", "bert-large-uncased", eight, length=512)
    yield Job("gpt2 tf32", "gpt2", eight, text, 1024)
    yield Job("tinyllama-1.1b tf32", "tinyllama-1.1b", eight | {**two, "bf16": False}, text, 2048)
    yield Job("qwen3-0.6b 4,096 tokens", "qwen3-0.6b", two, text, 4096)
    yield Job("qwen3-0.6b 16,384 tokens", "qwen3-0.6b", ONE | checkpointed, text, 16384)
    yield Job("llama-3.2-1b eager", "llama-3.2-1b", two, text, 1024, changes=(eager,))
    yield Job("modernbert-base batch 16", "modernbert-base", SIXTEEN, length=1024)
    offloaded = two | checkpointed | {"activation_checkpointing_kwargs": {"offload": True}}
    yield Job("qwen3-0.6b offloaded activations", "qwen3-0.6b", offloaded, text, 2048)
    emptied = two | {"torch_empty_cache_steps": 1}
    yield Job("qwen3-0.6b emptied cache", "qwen3-0.6b", emptied, text, 1024)
    half = {"changes": (bf16_weights,)}
    yield Job("llama-3.2-1b bf16 weights", "llama-3.2-1b", two, text, 2048, **half)
    yield Job("llama-3.2-3b bf16 weights", "llama-3.2-3b", two | checkpointed, text, 2048, **half)
    adapter = {"changes": (bf16_weights, lora), "needs": ("peft",)}
    yield Job("qwen3-4b LoRA", "qwen3-4b", two | checkpointed, text, 2048, **adapter)
    yield Job("smollm3-3b LoRA", "smollm3-3b", two, text, 1024, **adapter)


SECTIONS: dict[str, Callable[[], Iterator[Job]]] = {
    "classic": classic,
    "matrix": matrix,
    "waterfalls": waterfalls,
    "small": small,
    "liger": liger,
    "compiled": compiled,
    "modern": modern,
}
