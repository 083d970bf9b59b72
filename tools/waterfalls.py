"""Two models made smaller one technique at a time: what lesson 16 teaches, for recording.

Lesson 16 writes the same classes and functions in its cells; here they serve the recorded
predictions and the GPU kit.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import bitsandbytes as bnb
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint

CHUNKS = 32  # of the tokens of a micro-batch, in the loss


class InBackward(torch.optim.Optimizer):
    """Updates each parameter as soon as its gradient is there, and drops the gradient.

    `make` builds an optimizer for one parameter. Each gradient is clipped by its own share of
    `clip`, since nothing may need all of them at once: no accumulation, no clipping by the common
    norm, no scaler of fp16.
    """

    def __init__(self, parameters, lr: float, make: Callable, clip: float = 1.0):
        super().__init__(parameters, {"lr": lr})
        trained = [p for p in self.param_groups[0]["params"] if p.requires_grad]
        self.each = {p: make([p], lr=lr) for p in trained}
        self.limit = clip / math.sqrt(len(trained))
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self.update)

    def update(self, parameter) -> None:
        torch.nn.utils.clip_grad_norm_([parameter], self.limit)
        own = self.each[parameter]
        own.param_groups[0]["lr"] = self.param_groups[0]["lr"]  # the scheduler sets it here
        own.step()
        parameter.grad = None

    def step(self, closure=None) -> None:
        """All is done already."""


def in_backward(model, args) -> InBackward:
    return InBackward(model.parameters(), args.learning_rate, bnb.optim.PagedAdamW8bit)


def bf16_weights(model):
    return model.to(torch.bfloat16)


def chunked_loss(model):
    """A decoder whose loss never holds the logits of more than one chunk of the tokens."""

    def part(hidden, targets):
        logits = F.linear(hidden, model.lm_head.weight).float()
        return F.cross_entropy(logits, targets, reduction="sum")

    def forward(input_ids, labels, attention_mask=None, num_items_in_batch=None):
        hidden = model.model(input_ids, attention_mask=attention_mask)[0][:, :-1].flatten(0, 1)
        targets = labels[:, 1:].flatten()
        pieces = zip(hidden.chunk(CHUNKS), targets.chunk(CHUNKS), strict=True)
        total = sum(checkpoint(part, h, t, use_reentrant=False) for h, t in pieces)
        return {"loss": total / (num_items_in_batch or targets.numel())}

    model.forward = forward
    return model


def nf4(model):
    """All linear layers but the output layer in 4 bits."""
    for name, old in list(model.named_modules()):
        if type(old) is nn.Linear and name != "lm_head":
            shape = old.in_features, old.out_features, old.bias is not None
            new = bnb.nn.Linear4bit(*shape, compute_dtype=torch.bfloat16)
            options = {"requires_grad": False, "quant_type": "nf4", "module": new}
            new.weight = bnb.nn.Params4bit(old.weight.data, **options)
            new.bias = old.bias
            device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
            model.set_submodule(name, new.to(device))
    return model


def lora(model):
    config = LoraConfig(r=8, target_modules="all-linear")
    return get_peft_model(model, config, autocast_adapter_dtype=False)


@dataclass
class Step:
    """One bar of a waterfall. `changes` are functions of the model, `optimizer` as in `train`."""

    name: str
    settings: dict
    changes: tuple[Callable, ...] = ()
    optimizer: Callable | None = None


ONE = {"per_device_train_batch_size": 4}
TWO = {"per_device_train_batch_size": 2}
SAVED = {"activation_checkpointing": True}
OFFLOADED = SAVED | {"activation_checkpointing_kwargs": {"offload": True}}
PAGED = {"optim": "paged_adamw_8bit"}
OWN_CLIPPING = {"max_grad_norm": 0}
SMALL = (bf16_weights, chunked_loss)

CLASSIC = (  # bert-large-uncased, 512 tokens, weights in float32
    Step("plain", ONE),
    Step("+ checkpointing", ONE | SAVED),
    Step("+ paged 8-bit AdamW", ONE | SAVED | PAGED),
    Step("+ update inside backward", ONE | SAVED | OWN_CLIPPING, (), in_backward),
    Step("+ bf16", ONE | SAVED | OWN_CLIPPING | {"bf16": True}, (), in_backward),
    Step("+ offloading", ONE | OFFLOADED | OWN_CLIPPING | {"bf16": True}, (), in_backward),
)
DECODER = (  # llama-3.2-3b, 4,096 tokens
    Step("mixed precision", TWO | {"bf16": True}),
    Step("weights in bf16", TWO, (bf16_weights,)),
    Step("+ loss in chunks", TWO, SMALL),
    Step("+ checkpointing", TWO | SAVED, SMALL),
    Step("+ paged 8-bit AdamW", TWO | SAVED | PAGED, SMALL),
    Step("+ update inside backward", TWO | SAVED | OWN_CLIPPING, SMALL, in_backward),
    Step("LoRA", TWO | SAVED, (*SMALL, lora)),
    Step("QLoRA", TWO | SAVED, (bf16_weights, nf4, chunked_loss, lora)),
    Step("QLoRA + offloading", TWO | OFFLOADED, (bf16_weights, nf4, chunked_loss, lora)),
)
