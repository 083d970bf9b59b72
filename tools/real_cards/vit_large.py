"""ViT-L/16 on an A100, one memory-saving step after another: rasbt/pytorch-memory-optim, 2023.

`vit_l_16` of torchvision is written anew by its shapes; with dropouts of 0, which keep nothing. The
loop is the scripts': gradients are freed after the forward pass, before backward, or after a step
where they accumulate; the logits live until the next ones. Lightning's Fabric turns what a model of
lower precision returns into 32 bits, and its scaler unscales gradients list by list.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from behaviours_2023 import behaving, of
from fake_cuda import simulate

WIDTH, HEADS, INNER, LAYERS, CLASSES = 1024, 16, 4096, 24, 10
A100 = (8, 0)
TORCH = "2.1.0.dev20230623"  # the column torch of data/measurements/peaks.csv


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        y = self.ln_1(x)
        y, _ = self.attention(y, y, y, need_weights=False)
        x = y + x
        y = self.ln_2(x)
        return x + self.down(F.gelu(self.up(y)))


class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.zeros(1, 14 * 14 + 1, WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, images):
        x = self.patches(images).reshape(len(images), WIDTH, -1).permute(0, 2, 1)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


def unscaled(parameters) -> None:
    """What a gradient scaler does before a step: all gradients times a number, in place."""
    torch._foreach_mul_([p.grad for p in parameters], 1.0)


def train(batch: int, dtype=torch.float32, mixed=False, accumulation=0, kind=torch.optim.Adam):
    """Two steps; `accumulation` is how many batches share one, 0 where each has its own."""

    def run():
        model = Large().to(dtype)
        optimizer = kind(model.parameters(), lr=0.01)
        for micro_batch in range(2 * max(accumulation, 1)):
            images, targets = torch.empty(batch, 3, 224, 224), torch.zeros(batch).long()
            with torch.autocast("cuda", torch.bfloat16, enabled=mixed):
                logits = model(images.to(dtype))
            logits = logits.float()
            loss = F.cross_entropy(logits, targets)
            if accumulation:
                loss = loss / accumulation
            else:
                optimizer.zero_grad()
            loss.backward()
            if not accumulation or micro_batch % accumulation == 0:
                if mixed:
                    unscaled(model.parameters())
                optimizer.step()
                if accumulation:
                    optimizer.zero_grad()

    with behaving(of(TORCH)):
        return {"reserved": simulate(run, A100).peak_reserved}


HALF = partial(train, dtype=torch.bfloat16)
RUNS: dict[str, Callable] = {
    "fp32": partial(train, 64),
    "fp32, Fabric": partial(train, 64),
    "16-mixed": partial(train, 64, mixed=True),
    "bf16-true": partial(HALF, 64),
    "bf16-true, batch size 16": partial(HALF, 16),
    "bf16-true, accumulation 4 x 4": partial(HALF, 4, accumulation=4),
    "bf16-true, accumulation 4 x 4, SGD": partial(HALF, 4, accumulation=4, kind=torch.optim.SGD),
}


def runs() -> Iterator[tuple[str, Callable]]:
    yield from RUNS.items()


SETS = {"vit-l-2023": runs}
