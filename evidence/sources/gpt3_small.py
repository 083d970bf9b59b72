"""A decoder of GPT-2's size on eight rented cards: Any-Winter-4079's experiments, late in 2025.

versions/06-gpt-3-small-cuda-gpu-comparison.py: half a million tokens a step in equal batches,
compiled, autocast to bfloat16. One batch stands for all of a step, so gradients are not freed
between steps here: but for the first batch of a step, each adds to what is there.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from evidence.cards import card
from fake_cuda import Simulation, simulate

WORDS, LENGTH, WIDTH, HEADS, LAYERS, SAMPLES = 50304, 1024, 768, 12, 12, 512


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.scale = (2 * LAYERS) ** -0.5

    def attend(self, x):  # (batch, length, width), and so is what is returned
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, -1).transpose(1, 2)
            for part in self.into(x).split(WIDTH, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(batch, length, WIDTH))

    def forward(self, x):
        x = x + self.scale * self.attend(self.norm1(x))
        return x + self.scale * self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.words.weight = self.head.weight

    def forward(self, ids, targets):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))  # (batch, length, width)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))  # (batch, length, words)
        return logits, F.cross_entropy(logits.view(-1, WORDS), targets.view(-1))


def train(gpu: str, batch: int) -> Simulation:
    """Two steps, of each one batch, which counts as often as there are some."""
    times = SAMPLES // batch

    def run():
        model = torch.compile(Gpt())
        weights = list(model.parameters())
        groups = [
            {"params": [p for p in weights if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in weights if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)
        ids = torch.zeros(batch, LENGTH, dtype=torch.long)
        for _ in range(2):
            with torch.autocast("cuda", torch.bfloat16):
                _, loss = model(ids, ids)
            loss /= times
            loss.backward()
            nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            loss.item()
        return model, optimizer

    return simulate(run, card=card(gpu, tf32=True), repeat=times)


def runs(gpu: str, batches: tuple[int, ...]) -> Iterator[tuple[str, Callable]]:
    for batch in batches:
        yield f"batch {batch}", partial(train, gpu, batch)


STEPS = {
    "gpt3-small-l4": partial(runs, "L4", (8, 16)),
    "gpt3-small-l40s": partial(runs, "L40S", (16, 32)),
    "gpt3-small-5090": partial(runs, "RTX 5090", (16, 32)),
    "gpt3-small-a100": partial(runs, "A100-80GB", (32, 64)),
    "gpt3-small-h100": partial(runs, "H100", (32, 64)),
    "gpt3-small-h100-pcie": partial(runs, "H100-PCIe", (32, 64)),
    "gpt3-small-h200": partial(runs, "H200", (64, 128)),
    "gpt3-small-b200": partial(runs, "B200", (64, 128)),
}
