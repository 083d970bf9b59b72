"""Lesson 05: with and without activation checkpointing, over batch size and length."""

import itertools
from collections.abc import Iterator
from functools import partial

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from helpers import language_modelling, predict, text_classification


class KeepLinearOutputs:
    """A `context_fn` that keeps what linear layers return, with a name for the recorded row."""

    def __call__(self):
        return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])

    def __repr__(self):
        return "keep_linear_outputs"


EVERY = {"activation_checkpointing": True}
VARIANTS = {
    "plain": {},
    "every second layer": EVERY | {"activation_checkpointing_kwargs": {"every_n_layers": 2}},
    "linear outputs kept": EVERY
    | {
        "activation_checkpointing_kwargs": {
            "use_reentrant": False,
            "context_fn": KeepLinearOutputs(),
        }
    },
    "every layer": EVERY,
    "every layer, inputs offloaded": EVERY | {"activation_checkpointing_kwargs": {"offload": True}},
}


def lora(model):
    """16-bit weights, adapters of rank 8 on every linear layer."""
    config = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model.to(torch.bfloat16), config)


def checkpointing() -> Iterator[tuple]:
    bert = text_classification("large")
    for batch, variant in itertools.product((1, 2, 4, 8, 16, 32, 64, 128), list(VARIANTS)[:4]):
        size = {"per_device_train_batch_size": batch}
        run = partial(predict, bert, gpu="T4", **size, **VARIANTS[variant])
        yield f"BERT-large, batch {batch}", variant, run
    one = {"per_device_train_batch_size": 1, "bf16": True}
    for length in (1024, 2048, 4096, 8192, 16384):
        llama = language_modelling("llama-3.2-1b", length=length)
        for variant in ("plain", "every layer", "every layer, inputs offloaded"):
            run = partial(predict, llama, gpu="A100-40GB", **one, **VARIANTS[variant])
            yield f"Llama-3.2-1B, {length} tokens", variant, run
    adapters = language_modelling("llama-3.1-8b", length=2048).with_model(lora)
    for variant in ("plain", "every layer"):
        run = partial(predict, adapters, gpu="RTX 4090", **one, **VARIANTS[variant])
        yield "Llama-3.1-8B with LoRA, 2048 tokens", variant, run


def layers() -> Iterator[tuple]:
    """What exercise 5.1 asks for: BERT-large with a batch of 13."""
    bert = text_classification("large")
    for n in range(1, 7):
        every = EVERY | {"activation_checkpointing_kwargs": {"every_n_layers": n}}
        run = partial(predict, bert, gpu="RTX 3060", per_device_train_batch_size=13, **every)
        yield f"every {n}", "BERT-large, batch 13", run


SETS = (checkpointing, layers)
