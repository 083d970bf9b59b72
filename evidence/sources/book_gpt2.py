"""GPT-2 small from scratch on an A100, one change after another: rasbt/LLMs-from-scratch.

The code of the book's chapter 5 (ch05/10_llm-training-speed), by what it keeps: attention by
matrices with separate layers for queries, keys and values, a norm and a GELU of plain operations,
dropout of 0.1 everywhere. Before each step it frees the gradients, so they are there between steps.
It evaluates a batch after the first step and every 15 steps since; timed is a step without one. Its
last rows are compiled, which is not predicted. The card's 40 GB are assumed.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from evidence.cards import card, readings_before_emptying
from fake_cuda import Simulation, simulate

WORDS, LENGTH, WIDTH, HEADS, LAYERS, DROPOUT, BATCH = 50257, 1024, 768, 12, 12, 0.1, 8


@dataclass(frozen=True)
class Version:
    """What a row of the table has that the ones before it had not."""

    stored_mask: bool = True
    tf32: bool = False
    fused: bool = False
    dtype: torch.dtype = torch.float32
    of_torch: bool = False  # norm and GELU
    flash: bool = False


class Attention(nn.Module):
    def __init__(self, version: Version):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(DROPOUT)
        if version.stored_mask:
            self.register_buffer("mask", torch.triu(torch.ones(LENGTH, LENGTH), diagonal=1))

    def forward(self, x):
        keys, queries, values = self.k(x), self.q(x), self.v(x)  # (batch, length, width) each
        keys, values, queries = (
            y.view(*y.shape[:2], HEADS, -1).transpose(1, 2) for y in (keys, values, queries)
        )  # (batch, heads, length, size) each
        scores = queries @ keys.transpose(2, 3)  # (batch, heads, length, length)
        n = x.shape[1]
        if hasattr(self, "mask"):
            mask = self.mask.bool()[:n, :n]
        else:
            mask = torch.triu(torch.ones(n, n, dtype=torch.bool), diagonal=1)
        scores.masked_fill_(mask, -math.inf)
        weights = torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1)
        weights = self.dropout(weights)
        mixed = (weights @ values).transpose(1, 2)  # (batch, length, heads, size)
        return self.out(mixed.reshape(*x.shape[:2], WIDTH))


class Flash(nn.Module):
    def __init__(self, version: Version):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        qkv = self.qkv(x).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        queries, keys, values = qkv.permute(2, 0, 3, 1, 4)  # (batch, heads, length, size) each
        rate = DROPOUT if self.training else 0.0
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, dropout_p=rate, is_causal=True
        )
        mixed = mixed.transpose(1, 2).contiguous().view(*x.shape[:2], WIDTH)
        return self.out(mixed)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        mean = x.mean(dim=-1, keepdim=True)
        var = x.var(dim=-1, keepdim=True, unbiased=False)
        norm = (x - mean) / torch.sqrt(var + 1e-5)
        return self.scale * norm + self.shift


class Gelu(nn.Module):
    def forward(self, x):
        root = torch.sqrt(torch.tensor(2.0 / torch.pi))
        return 0.5 * x * (1 + torch.tanh(root * (x + 0.044715 * torch.pow(x, 3))))


class Block(nn.Module):
    def __init__(self, version: Version):
        super().__init__()
        norm = partial(nn.LayerNorm, WIDTH) if version.of_torch else Norm
        gelu = nn.GELU(approximate="tanh") if version.of_torch else Gelu()
        self.attention = (Flash if version.flash else Attention)(version)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), gelu, nn.Linear(4 * WIDTH, WIDTH))
        self.norm1, self.norm2, self.dropout = norm(), norm(), nn.Dropout(DROPOUT)

    def forward(self, x):  # (batch, length, width), and so is what is returned
        shortcut = x
        x = self.norm1(x)
        x = self.attention(x)
        x = self.dropout(x)
        x = x + shortcut
        shortcut = x
        x = self.norm2(x)
        x = self.feed(x)
        x = self.dropout(x)
        return x + shortcut


class Model(nn.Module):
    def __init__(self, version: Version):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.Sequential(*[Block(version) for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH) if version.of_torch else Norm()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids):
        words = self.words(ids)  # (batch, length, width)
        places = self.places(torch.arange(ids.shape[1]))  # (length, width)
        x = words + places
        x = self.dropout(x)
        x = self.blocks(x)
        x = self.norm(x)
        return self.head(x)  # (batch, length, words)


def loss_of(model, ids, targets):
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.zeros(BATCH, LENGTH, dtype=torch.long) for _ in range(2))


@torch.no_grad()
def evaluate(model) -> None:
    """A batch of the training data and one of the rest."""
    model.eval()
    for _ in range(2):
        loss_of(model, *batch())
    model.train()


def train(version: Version) -> Simulation:
    """Three steps, an evaluation after the first; what stands then is what the script prints."""

    def run():
        model = Model(version).to(version.dtype)
        optimizer = torch.optim.AdamW(model.parameters(), fused=version.fused or None)
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(model, *batch())  # which are copies on the card, of that function
            loss.backward()
            optimizer.step()
            if step == 0:
                evaluate(model)
        torch.cuda.empty_cache()  # marks the end
        return model, optimizer, loss

    return simulate(run, card=card("A100-40GB", version.tf32))


def quantities(found: Simulation) -> dict[str, int]:
    after = readings_before_emptying(found)[0].allocated
    return {"reserved": found.peak_reserved, "allocated after an epoch": after}


CHANGES = {
    "baseline": {},
    "+ causal mask on the fly": {"stored_mask": False},
    "+ tensor cores (tf32)": {"tf32": True},
    "+ fused AdamW": {"fused": True},
    "+ bfloat16": {"dtype": torch.bfloat16},
    "+ PyTorch LayerNorm and GELU": {"of_torch": True},
    "+ FlashAttention": {"flash": True},
}
VERSIONS = {
    name: replace(
        Version(), **{k: v for change in list(CHANGES.values())[: n + 1] for k, v in change.items()}
    )
    for n, name in enumerate(CHANGES)
}
TIMED = {"fp32": "+ causal mask on the fly", "+ tf32": "+ tensor cores (tf32)"}  # otherwise named
TIMED |= {name: name for name in list(CHANGES)[3:]}


def measured() -> Iterator[tuple[str, Callable]]:
    for name, version in VERSIONS.items():
        if name != "+ tensor cores (tf32)":  # in memory the same run as the one before
            yield name, lambda version=version: quantities(train(version))


def timed() -> Iterator[tuple[str, Callable]]:
    for run, name in TIMED.items():
        yield run, partial(train, VERSIONS[name])


PEAKS = {"llms-from-scratch": measured}
STEPS = {"llms-from-scratch": timed}
