"""Lesson 19: real mixtures under the planner's recipes, and the experts' kernels by card.

A module of its own, since it stands on the planner, which the lesson's other rows do not.
"""

import copy
import dataclasses
import functools
from collections.abc import Iterator

import torch
from bitsandbytes.nn.parametrize import replace_parameter_4bit
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from evidence.lessons import lesson_19
from helpers import language_modelling, predict
from planner.changes import in_16_bits
from planner.techniques import Plan

CARD, LENGTH, RANK = "A100-80GB", 1024, 16
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MODELS = ("qwen3-30b-a3b", "gpt-oss-20b")
DEPTHS = (2, 6)  # layers of the twins
IN_FULL = ("qwen3-30b-a3b", "LoRA on attention, experts in 4 bits")
KERNEL = "grouped_mm_in_16"


def experts_in_4_bits(model):
    """As the lesson's cell, without a card: each stack of experts packed by bitsandbytes."""
    for layer in model.model.layers:
        for name in ("gate_up_proj", "down_proj"):
            replace_parameter_4bit(layer.mlp.experts, name, quant_type="nf4")
    return model


def on_attention(model):
    return get_peft_model(model, LoraConfig(r=RANK, target_modules=ATTENTION))


RECIPES = {  # by what the lesson calls them: functions that change the model, in order
    "LoRA, all-linear": Plan.named("LoRA, checkpointing").model_changes(),
    "QLoRA, all-linear": Plan.named("QLoRA, checkpointing").model_changes(),
    "LoRA on attention": [in_16_bits, on_attention],
    "LoRA on attention, experts in 4 bits": [in_16_bits, experts_in_4_bits, on_attention],
}


def of_depth(model: str, layers: int):
    """A mixture with fewer layers; its kinds of layers take turns, so a few have them all."""
    found = language_modelling(model, length=LENGTH)
    config = copy.deepcopy(found.config)
    config.num_hidden_layers = layers
    if kinds := getattr(config, "layer_types", None):
        config.layer_types = kinds[:layers]
    return dataclasses.replace(found, config=config)


def mixtures() -> Iterator[tuple]:
    """Real mixtures of a few layers, one sample a step, checkpointing: the planner's recipes and
    the lesson's. All layers are alike, so a line through two depths leads to the whole model; one
    recipe stands in full, to hold the line to it."""
    settings = {"per_device_train_batch_size": 1, "bf16": True, "activation_checkpointing": True}
    jobs = [(model, recipe, n) for model in MODELS for recipe in RECIPES for n in DEPTHS]
    for model, recipe, layers in [*jobs, (*IN_FULL, 48)]:
        found = of_depth(model, layers)
        for change in RECIPES[recipe]:
            found = found.with_model(change)
        job = functools.partial(predict, found, gpu=CARD, **settings)
        yield model, f"{recipe}: {layers} layers", job


class Cast:
    """As the lesson's cell: the same experts, their weights in another type."""

    def __init__(self, experts: nn.Module, dtype: torch.dtype):
        self.experts, self.dtype = experts, dtype

    def __getattr__(self, name):
        found = getattr(self.experts, name)
        return found.to(self.dtype) if torch.is_tensor(found) else found


def grouped_mm_in_16(experts, x, *routing):
    """As the lesson's cell: the default kernel, in the type of autocast."""
    if torch.is_autocast_enabled(x.device.type):
        experts = Cast(experts, torch.get_autocast_dtype(x.device.type))
    return grouped_mm_experts_forward(experts, x, *routing)


def with_kernel(model):
    ALL_EXPERTS_FUNCTIONS.register(KERNEL, grouped_mm_in_16)
    model.set_experts_implementation(KERNEL)
    return model


def experts_by_card() -> Iterator[tuple]:
    """The default kernel, the one that obeys autocast, and a dense model of the same cost."""
    jobs = {(run, variant): job for run, variant, job in lesson_19.experts()}
    mixture, dense = jobs["experts", "each layer"], jobs["dense", "same cost"]
    workload = mixture.args[0]
    ways = {"grouped_mm": workload, KERNEL: workload.with_model(with_kernel)}
    ways["same cost"] = dense.args[0]
    for card in ("A100-40GB", "H100"):
        for variant, found in ways.items():
            yield (
                card,
                variant,
                functools.partial(predict, found, **mixture.keywords | {"gpu": card}),
            )


SETS = (mixtures, experts_by_card)
