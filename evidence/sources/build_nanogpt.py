"""GPT-2 in its first steps on an A100: karpathy/build-nanogpt, before flash attention came in.

Three runs of the same loop: 32-bit products, tf32, and autocast to bfloat16. The seconds are those
that the source says, rounded.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from evidence.cards import card
from fake_cuda import Simulation, simulate

WORDS, LENGTH, WIDTH, HEADS, LAYERS, BATCH = 50257, 1024, 768, 12, 12, 16


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("past", torch.ones(LENGTH, LENGTH).tril()[None, None])

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.into(x).split(width, dim=2)  # (batch, length, width) each
        q, k, v = (t.view(batch, length, HEADS, -1).transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.shape[-1]))
        scores = scores.masked_fill(self.past[:, :, :length, :length] == 0, -math.inf)
        y = F.softmax(scores, dim=-1) @ v  # (batch, heads, length, size)
        return self.out(y.transpose(1, 2).contiguous().view(batch, length, width))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.attention = (
            nn.LayerNorm(WIDTH),
            nn.LayerNorm(WIDTH),
            Attention(),
        )
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):  # (batch, length, width), and so is what is returned
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.words.weight = self.head.weight

    def forward(self, ids):
        places = self.places(torch.arange(ids.shape[1]))  # (length, width)
        x = self.words(ids) + places  # (batch, length, width)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # (batch, length, words)


def train(tf32: bool, autocast: bool) -> Simulation:
    """Two steps."""

    def run():
        model = Gpt2()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                loss = F.cross_entropy(model(ids).view(-1, WORDS), ids.view(-1))
            loss.backward()
            optimizer.step()
        return model, optimizer

    return simulate(run, card=card("A100-80GB", tf32))


def runs() -> Iterator[tuple[str, Callable]]:
    yield "fp32", partial(train, tf32=False, autocast=False)
    yield "tf32", partial(train, tf32=True, autocast=False)
    yield "bf16", partial(train, tf32=True, autocast=True)


STEPS = {"build-nanogpt": runs}
