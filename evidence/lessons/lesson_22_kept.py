"""Lesson 22: why a published run with pictures takes more a token than was predicted first."""

from collections.abc import Iterator
from functools import partial

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForImageTextToText

from evidence.lessons.lesson_22_pictures import ATTENTION, pictures_and_words
from helpers import predict
from helpers.models import find_model


class KeepsItsInput(torch.autograd.Function):
    """A product that keeps its input for the backward pass, as ZeRO-3's does, and its weight."""

    @staticmethod
    def forward(ctx, given, weight, bias):
        ctx.save_for_backward(given, weight)
        return given.matmul(weight.t()) if bias is None else given.matmul(weight.t()) + bias

    @staticmethod
    def backward(ctx, grad):
        given, weight = ctx.saved_tensors
        into, of_weight, of_bias = ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        return (
            grad.matmul(weight) if into else None,
            rows.t().matmul(given.flatten(0, -2)) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


def keeping(pictures: int, adapters_in_32_bits: bool):
    """The published run with what it keeps beside: inputs of frozen layers, and all logits."""

    def run():
        config = find_model("qwen3-vl-8b").config
        config.text_config.use_cache = False
        model = AutoModelForImageTextToText.from_config(config)
        lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules=ATTENTION)
        model = get_peft_model(model, lora, autocast_adapter_dtype=adapters_in_32_bits)
        optimizer = torch.optim.AdamW(
            (p for p in model.parameters() if p.requires_grad), fused=True
        )
        batch = pictures_and_words(config, pictures, 256, 12)
        linear = torch.nn.functional.linear
        torch.nn.functional.linear = lambda x, w, b=None: KeepsItsInput.apply(x, w, b)
        try:
            for _ in range(2):
                out = model(**batch)  # with its logits until the next one
                out.loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        finally:
            torch.nn.functional.linear = linear

    return run


def qwen3_vl_kept() -> Iterator[tuple]:
    """The same two runs with what their DeepSpeed and their script keep, found afterwards.

    ZeRO-3 puts a product of its own in place of `linear` (`memory_efficient_linear`), which keeps
    the input of every layer, frozen ones included; the script holds the logits through the
    backward pass. PEFT makes adapters of 32 bits, and DeepSpeed 0.19.8 does not cast them.
    """
    for variant, wide in {"adapters in 16 bits": False, "adapters in 32 bits": True}.items():
        for pictures in (4, 24):
            yield (
                f"{pictures} pictures",
                variant,
                partial(predict, keeping(pictures, wide), gpu="A10"),
            )


SETS = (qwen3_vl_kept,)
