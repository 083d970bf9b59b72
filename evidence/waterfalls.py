"""Two models made smaller one technique at a time: what lesson 16 teaches, for recording.

The classes and functions are those of the lesson's cells, read from the notebook, and the planner's
loss in chunks, which the lesson prints: what is recorded and measured is what is taught.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import bitsandbytes as bnb
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn

from planner import chunked_loss

LESSON = Path(__file__).resolve().parents[1] / "notebooks" / "16_all_together.ipynb"
CELLS = ("in-backward", "recipe", "lora-nf4")


@cache
def taught() -> SimpleNamespace:
    """What the cells of the lesson define, by name. They are run at the first call."""
    stored = json.loads(LESSON.read_text(encoding="utf-8"))["cells"]
    sources = {cell["id"]: "".join(cell["source"]) for cell in stored}
    found = {"bnb": bnb, "torch": torch, "F": F, "nn": nn}
    found |= {"LoraConfig": LoraConfig, "get_peft_model": get_peft_model}
    found["DEVICE"] = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    for cell in CELLS:
        exec(compile(sources[cell], f"<lesson 16, {cell}>", "exec"), found)
    return SimpleNamespace(**found)


def bf16_weights(model):
    return model.to(torch.bfloat16)


def inside_adamw(model, args):
    return taught().in_backward(model, args, torch.optim.AdamW)


def inside_8bit(model, args):
    return taught().in_backward(model, args, bnb.optim.AdamW8bit)


def inside_8bit_paged(model, args):
    return taught().in_backward(model, args, bnb.optim.PagedAdamW8bit)


@dataclass
class Step:
    """One bar of a waterfall. `changes` are functions of the model, `optimizer` as in `train`.

    `card` is predicted for where it is not the waterfall's own.
    """

    name: str
    settings: dict
    changes: tuple[Callable, ...] = ()
    optimizer: Callable | None = None
    card: str | None = None


FOUR = {"per_device_train_batch_size": 4}
TWO = {"per_device_train_batch_size": 2}
SAVED = {"activation_checkpointing": True}
OFFLOADED = SAVED | {"activation_checkpointing_kwargs": {"offload": True}}
OWN_CLIPPING = {"max_grad_norm": 0}
LAST = FOUR | SAVED | OWN_CLIPPING
EIGHT = {"optim": "adamw_bnb_8bit"}  # keeps the embedding's states in 32 bits
SMALL = (bf16_weights, chunked_loss)


def classic() -> tuple[Step, ...]:
    """bert-large-uncased, 512 tokens, weights in float32."""
    inside = taught().in_backward
    return (
        Step("plain", FOUR),
        Step("+ checkpointing", FOUR | SAVED),
        Step("+ Adafactor", FOUR | SAVED | {"optim": "adafactor"}),
        Step("+ update inside backward", LAST, (), inside),
        Step("8-bit AdamW instead", LAST, (), inside_8bit),
        Step("8-bit AdamW, pages away", LAST, (), inside_8bit_paged),
        Step("+ bf16", LAST | {"bf16": True}, (), inside, "L4"),
        Step("+ offloading", LAST | OFFLOADED | {"bf16": True}, (), inside, "L4"),
    )


def decoder() -> tuple[Step, ...]:
    """llama-3.2-3b, 4,096 tokens."""
    qlora = (bf16_weights, taught().nf4, chunked_loss, taught().lora)
    return (
        Step("mixed precision", TWO | {"bf16": True}),
        Step("weights in bf16", TWO, (bf16_weights,)),
        Step("+ loss in chunks", TWO, SMALL),
        Step("+ checkpointing", TWO | SAVED, SMALL),
        Step("+ 8-bit AdamW", TWO | SAVED | EIGHT, SMALL),
        Step("+ update inside backward", TWO | SAVED | OWN_CLIPPING, SMALL, inside_8bit),
        Step("LoRA", TWO | SAVED, (*SMALL, taught().lora)),
        Step("QLoRA", TWO | SAVED, qlora),
        Step("QLoRA + offloading", TWO | OFFLOADED, qlora),
    )


TECHNIQUES = ("checkpointing", "loss in chunks", "8-bit AdamW", "update inside backward")
TRAINED = ("all weights", "LoRA", "QLoRA")


def combined(on: tuple[str, ...], trained: str = "all weights") -> Step:
    """The decoder, two samples at a time, with some of the four techniques."""
    settings, optimizer = dict(TWO), None
    changes = (bf16_weights, *([taught().nf4] if trained == "QLoRA" else []))
    if "loss in chunks" in on:
        changes += (chunked_loss,)
    if "checkpointing" in on:
        settings |= SAVED
    if "update inside backward" in on:  # all states are then of the kind that is made there
        settings |= OWN_CLIPPING
        optimizer = inside_8bit if "8-bit AdamW" in on else inside_adamw
    elif "8-bit AdamW" in on:
        settings |= EIGHT
    if trained != "all weights":  # adapters come last
        changes += (taught().lora,)
    name = " + ".join(technique for technique in TECHNIQUES if technique in on) or "none"
    return Step(name, settings, changes, optimizer)
