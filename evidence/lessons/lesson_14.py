"""Lesson 14: optimizer states, gradients and activations that leave the card."""

import functools
from collections.abc import Iterator

import torch
from torch.autograd.graph import save_on_cpu
from torch.optim import AdamW, Optimizer

from helpers import language_modelling, predict


class HostAdamW(Optimizer):
    """The optimizer of the lesson: weights in 32 bits, gradients and averages on the host."""

    is_paged = True  # `predict` counts the tensors in its state as host memory

    def __init__(self, parameters, early: bool = False, **settings):
        super().__init__(parameters, settings)
        parameters = self.param_groups[0]["params"]
        self.pairs = [(p, torch.nn.Parameter(to_host(p.detach()))) for p in parameters]
        self.on_host = AdamW([host for _, host in self.pairs], **settings, fused=True)
        for p, host in self.pairs if early else ():
            p.register_post_accumulate_grad_hook(functools.partial(self.fetch, host))

    def fetch(self, host, p):
        host.grad, p.grad = to_host(p.grad), None

    @torch.no_grad()
    def step(self, closure=None):
        self.on_host.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        for p, host in self.pairs:
            if p.grad is not None:
                host.grad = to_host(p.grad)
        self.on_host.step()
        for p, host in self.pairs:
            p.copy_(host)
            self.state[p] = {"weight": host, "gradient": host.grad, **self.on_host.state[host]}


def to_host(tensor):
    return tensor.to("cpu", torch.float32, copy=True)


def on_host(early: bool = False):
    def optimizer(model, args):
        return HostAdamW(model.parameters(), early, lr=args.learning_rate, weight_decay=0.0)

    return {"optimizer": optimizer}


def to_bf16(model):
    return model.to(torch.bfloat16)


def to_fp16(model):
    return model.to(torch.float16)


def everything_offloaded(model):
    forward = model.forward

    @functools.wraps(forward)
    def offloading(*args, **kwargs):
        with save_on_cpu():
            return forward(*args, **kwargs)

    model.forward = offloading
    return model


def offloading() -> Iterator[tuple]:
    """One sample of 512 tokens on a T4: what stays on the card."""
    decoder = language_modelling("tinyllama-1.1b", length=512)
    half = decoder.with_model(to_bf16)
    one = {"per_device_train_batch_size": 1}
    rows = {
        "AdamW": (decoder, {}),
        "paged AdamW": (decoder, {"optim": "paged_adamw_32bit"}),
        "states away": (decoder, on_host()),
        "states and gradients away": (decoder, on_host(early=True)),
        "16 bits, states away": (half, on_host()),
        "16 bits, states and gradients away": (half, on_host(early=True)),
    }
    for name, (workload, settings) in rows.items():
        run = functools.partial(predict, workload, gpu="T4", **one, **settings)
        yield "tinyllama-1.1b", name, run
    large = language_modelling("llama-2-7b", length=512).with_model(to_bf16)
    settings = one | on_host(early=True) | {"activation_checkpointing": True}
    name = "16 bits, states and gradients away"
    yield "llama-2-7b", name, functools.partial(predict, large, gpu="T4", **settings)


def activation_offloading() -> Iterator[tuple]:
    """Four samples of 2,048 tokens on an L4, weights in 16 bits, the rest already away."""
    decoder = language_modelling("tinyllama-1.1b").with_model(to_bf16)
    settings = {"per_device_train_batch_size": 4} | on_host(early=True)
    again = settings | {"activation_checkpointing": True}
    moved = again | {"activation_checkpointing_kwargs": {"offload": True}}
    rows = {
        "plain": (decoder, settings),
        "all saved tensors away": (decoder.with_model(everything_offloaded), settings),
        "checkpointed": (decoder, again),
        "checkpointed, inputs away": (decoder, moved),
    }
    for name, (workload, settings) in rows.items():
        yield "tinyllama-1.1b", name, functools.partial(predict, workload, gpu="L4", **settings)


class NoUpdate(Optimizer):
    """Leaves the card with a forward and a backward pass."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.0})

    def step(self, closure=None):
        """Nothing."""


class OverTheBus(HostAdamW):
    """The same, with journeys that `predict` sees: it knows those of `save_on_cpu`'s hooks.

    The update itself is counted as if the card made it, so that the time is a lower bound.
    """

    @torch.no_grad()
    def step(self, closure=None):
        hooks = save_on_cpu()
        for p, host in self.pairs:
            host.grad = hooks.pack_hook(p.grad)
        self.on_host.step()
        for p, host in self.pairs:
            p.copy_(hooks.unpack_hook(host))
            self.state[p] = {"weight": host, "gradient": host.grad, **self.on_host.state[host]}


def offloading_times() -> Iterator[tuple]:
    """The card's own work in a micro-batch of 2,048 tokens; and states that cross a T4's bus."""
    decoder, one = language_modelling("tinyllama-1.1b"), {"per_device_train_batch_size": 1}
    alone = one | {"optimizer": lambda model, args: NoUpdate(model.parameters())}
    alone |= {"max_grad_norm": 0.0}
    for card in ("T4", "A100-40GB", "H100"):
        half = decoder.with_model(to_fp16 if card == "T4" else to_bf16)
        yield "tinyllama-1.1b", card, functools.partial(predict, half, gpu=card, **alone)
    short = language_modelling("tinyllama-1.1b", length=512)
    away = {"optimizer": lambda model, args: OverTheBus(model.parameters(), lr=args.learning_rate)}
    run = functools.partial(predict, short, gpu="T4", **one, **away)
    yield "tinyllama-1.1b", "states away, over the bus", run


def offloading_checkpointed() -> Iterator[tuple]:
    """The same micro-batch with checkpointing: it fits each of the cards."""
    decoder, one = language_modelling("tinyllama-1.1b"), {"per_device_train_batch_size": 1}
    alone = one | {"optimizer": lambda model, args: NoUpdate(model.parameters())}
    alone |= {"max_grad_norm": 0.0, "activation_checkpointing": True}
    for card in ("T4", "A100-40GB", "H100"):
        half = decoder.with_model(to_fp16 if card == "T4" else to_bf16)
        yield "tinyllama-1.1b", card, functools.partial(predict, half, gpu=card, **alone)


SETS = (offloading, activation_offloading, offloading_times, offloading_checkpointed)
