"""Lesson 12: a step of Llama-2-7B under LoRA and its relatives, on an A100."""

import itertools
from collections.abc import Iterator
from functools import partial

import torch
from peft import IA3Config, LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model

from helpers import language_modelling, predict

MODEL = "llama-2-7b"
ATTENTION, LINEAR = ["q_proj", "v_proj"], "all-linear"


def lora(**options):
    options = {"r": 8, "target_modules": ATTENTION} | options
    return lambda model: get_peft_model(model, LoraConfig(**options))


def other(config, **options):
    return lambda model: get_peft_model(model, config(task_type="CAUSAL_LM", **options))


def halved(change):
    """The frozen weights in 16 bits; peft makes its own in float32."""
    return lambda model: change(model.to(torch.bfloat16))


BF16, CHECKPOINTED = {"bf16": True}, {"bf16": True, "activation_checkpointing": True}
SCALED = ["k_proj", "v_proj", "down_proj"]  # by IA3: keys, values and what leaves the feed-forward
VARIANTS = {
    "full": (lambda model: model, {}),
    "full, bf16=True": (lambda model: model, BF16),
    "full, bfloat16 weights": (halved(lambda model: model), {}),
    "LoRA": (lora(), {}),
    "LoRA, bf16=True": (lora(), BF16),
    "LoRA, bfloat16 base": (halved(lora()), BF16),
    "LoRA on all linears": (halved(lora(target_modules=LINEAR)), BF16),
    "DoRA on all linears": (halved(lora(target_modules=LINEAR, use_dora=True)), BF16),
    "LoRA, upper half": (halved(lora(layers_to_transform=list(range(16, 32)))), BF16),
    "prompt tuning, 20": (halved(other(PromptTuningConfig, num_virtual_tokens=20)), BF16),
    "prefix tuning, 20": (halved(other(PrefixTuningConfig, num_virtual_tokens=20)), BF16),
    "IA3": (halved(other(IA3Config, target_modules=SCALED, feedforward_modules=SCALED[2:])), BF16),
    "LoRA, checkpointed": (halved(lora()), CHECKPOINTED),
    "LoRA on all linears, checkpointed": (halved(lora(target_modules=LINEAR)), CHECKPOINTED),
}
RANKS = (1, 4, 16, 64, 256)


def adapters() -> Iterator[tuple]:
    workload = language_modelling(MODEL, length=1024)
    for variant, (change, settings) in VARIANTS.items():

        def run(change=change, settings=settings):
            return predict(
                workload.with_model(change),
                gpu="A100-80GB",
                per_device_train_batch_size=1,
                **settings,
            )

        yield MODEL, variant, run


def adapter_ranks() -> Iterator[tuple]:
    workload = language_modelling(MODEL, length=1024)
    for targets, rank in itertools.product((ATTENTION, LINEAR), RANKS):

        def run(targets=targets, rank=rank):
            change = halved(lora(r=rank, target_modules=targets))
            size = {"per_device_train_batch_size": 1}
            return predict(workload.with_model(change), gpu="A100-80GB", **size, **BF16)

        yield "q and v" if targets is ATTENTION else "all linears", rank, run


PACKED = {"per_device_train_batch_size": 4, "activation_checkpointing": True}


def adapter_precisions() -> Iterator[tuple]:
    """Many tokens: 4 x 4,096, checkpointed. In what precision do the thin matrices multiply?"""
    workload = language_modelling("mistral-7b", length=4096)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]

    def adapted(model, autocast=True):  # autocast: the adapters in float32
        config = LoraConfig(r=16, target_modules=targets)
        return get_peft_model(model, config, autocast_adapter_dtype=autocast)

    rows = {
        "full": (halved(lambda model: model), {}),
        "LoRA, adapters in 32 bits": (halved(adapted), {}),
        "LoRA, bf16=True": (halved(adapted), BF16),
        "LoRA, adapters in 16 bits": (halved(partial(adapted, autocast=False)), {}),
    }
    for name, (change, settings) in rows.items():
        options = PACKED | settings
        run = partial(predict, workload.with_model(change), gpu="A100-80GB", **options)
        yield "mistral-7b", name, run


SETS = (adapters, adapter_ranks, adapter_precisions)
