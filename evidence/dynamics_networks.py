"""The two small networks of lesson 20, and how copies of one are trained at once.

`Decoder`, `windows`, `next_byte` and `learn` stand in the lesson as here; a test says so.
"""

import math
from functools import partial

import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import get_scheduler

from helpers import language_modelling


class Bytes(nn.Module):
    """Four layers read eight bytes and guess the next."""

    def __init__(self, norm=False, gain=None, out=128, width=64):
        super().__init__()
        parts = [nn.Embedding(128, 16), nn.Flatten()]
        for n in [128, width, width, width]:
            linear = nn.Linear(n, width)
            if gain:
                nn.init.normal_(linear.weight, std=gain * (2 / n) ** 0.5)
            parts += [linear, *[nn.LayerNorm(width)] * norm, nn.ReLU()]
        self.body, self.head = nn.Sequential(*parts), nn.Linear(width, out)

    def forward(self, rows):
        return self.head(self.body(rows)).unsqueeze(1)


class Decoder(nn.Module):
    """Two layers of a transformer guess the next byte at each of 32 places."""

    def __init__(self, norm=True, out=128, width=32):
        super().__init__()
        self.bytes, self.places = nn.Embedding(128, width), nn.Embedding(32, width)
        make = partial(nn.TransformerEncoderLayer, width, 2, 4 * width, dropout=0.0)
        self.layers = nn.ModuleList(make(batch_first=True, norm_first=True) for _ in range(2))
        for layer in self.layers:
            if not norm:
                layer.norm1 = layer.norm2 = nn.Identity()
        self.norm, self.head = nn.LayerNorm(width) if norm else nn.Identity(), nn.Linear(width, out)
        self.mask = nn.Transformer.generate_square_subsequent_mask(32)

    def forward(self, rows):
        found = self.bytes(rows) + self.places.weight
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no rule for vmap
            for layer in self.layers:
                found = layer(found, self.mask)
        return self.head(self.norm(found))


def windows(split: str, blocks: int, size: int, stride: int) -> torch.Tensor:
    """Stretches of `size` bytes [n, size] of the text."""
    text = torch.as_tensor(language_modelling("tiny").data(split)["input_ids"][:blocks])
    return text.clamp(max=127).unfold(1, size, stride).reshape(-1, size)


def next_byte(net, weights, rows):
    logits = functional_call(net, weights, rows[:, :-1])  # of one place, or of all
    return F.cross_entropy(logits.flatten(0, 1), rows[:, -logits.shape[1] :].flatten())


def label(rows):
    """What kind of sign the next byte is: a letter, a digit, a space or another."""
    kinds = [1 * chr(b).isalpha() + 2 * chr(b).isdigit() + 3 * chr(b).isspace() for b in range(128)]
    return torch.tensor(kinds)[rows]


def kind_of_sign(net, weights, rows):
    logits = functional_call(net, weights, rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), label(rows)[:, -logits.shape[1] :].flatten())


def learn(
    nets,
    seeds,
    rate,
    data,
    optimizer,
    batches,
    *,
    schedule="constant",
    warm_up=0.0,
    decay=0.2,
    clip=math.inf,
    loss=next_byte,
    trains=lambda t, name: True,
):
    """Train copies of a network at once; hand out weights and gradient norms after each step.

    A seed draws the order of the data; `batches` are the sizes of the steps' batches.
    """
    weights = {name: w.detach().clone() for name, w in stack_module_state(nets)[0].items()}
    moved, steps = optimizer(list(weights.values()), rate), len(batches)
    stages = {"num_decay_steps": round(decay * steps)} if "decay" in schedule else None
    plan = get_scheduler(schedule, moved, round(warm_up * steps), steps, stages)
    gradient = vmap(grad(partial(loss, nets[0])))
    orders = [torch.Generator().manual_seed(1000 + seed) for seed in seeds]
    for t, size in enumerate(batches):
        drawn = [torch.randint(len(data), (size,), generator=order) for order in orders]
        grads = gradient(weights, data[torch.stack(drawn)])
        norms = sum(g.flatten(1).square().sum(1) for g in grads.values()).sqrt()
        factor = (clip / (norms + 1e-6)).clamp(max=1)  # each copy by its own norm
        for name, w in weights.items():
            kept = grads[name] * factor.view(-1, *[1] * (w.ndim - 1))
            w.grad = kept if trains(t, name) else None
        moved.step()
        plan.step()
        yield weights, norms


def judged(net, weights, rows, loss=next_byte):
    """The loss of each copy."""
    with torch.no_grad():
        return vmap(lambda w: loss(net, w, rows))(weights)


def sgd(weights, rate):
    return torch.optim.SGD(weights, rate)


def adamw(weights, rate, **options):
    return torch.optim.AdamW(weights, rate, weight_decay=0.0, **options)


def schedule_free(made, warm_up, weights, rate):
    """Of the package `schedulefree` (the extra `optimizers`); put into `made`, to be asked for its
    average at the end."""
    from schedulefree import AdamWScheduleFree

    made.append(AdamWScheduleFree(weights, rate, warmup_steps=warm_up))
    made[-1].train()
    return made[-1]


def scaled(times):
    """AdamW whose averages go over as many samples as before, in a batch `times` as large."""
    betas = tuple(1 - times * (1 - beta) for beta in (0.9, 0.999))
    return partial(adamw, betas=betas, eps=1e-8 / times**0.5)


def by_width(names, times):
    """AdamW by muP's rule for rates: the matrices that read a layer take the rate divided by
    `times`, what the layers have grown by; embeddings, norms and biases take it whole."""

    def optimizer(weights, rate):
        whole, divided = [], []
        for name, w in zip(names, weights, strict=True):
            matrix = w.ndim == 3  # copies of one
            (divided if matrix and name.startswith(("layers", "head")) else whole).append(w)
        groups = [{"params": whole}, {"params": divided, "lr": rate / times}]
        return torch.optim.AdamW(groups, rate, weight_decay=0.0)

    return optimizer
