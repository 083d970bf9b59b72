"""ViT-L/16 on an A100, one memory-saving step after another: rasbt/pytorch-memory-optim, 2023.

`vit_l_16` of torchvision is written anew by its shapes; with dropouts of 0, which keep nothing. The
loop is the scripts': gradients are freed after the forward pass, before backward, or after a step
where they accumulate; the logits live until the next ones. Lightning's Fabric turns what a model of
lower precision returns into 32 bits; its "16-mixed" is autocast to float16 with a gradient scaler
(02_mixed-precision.py). From 16-mixed on they allow tf32. The card's 40 GB are assumed.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from evidence.cards import card
from evidence.models import VisionTransformer
from fake_cuda import Simulation, simulate

WIDTH, HEADS, INNER, LAYERS, CLASSES = 1024, 16, 4096, 24, 10


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x):  # (batch, 197, width), and so are y and what is returned
        y = self.ln_1(x)
        y, _ = self.attention(y, y, y, need_weights=False)
        x = y + x
        y = self.ln_2(x)
        return x + self.down(F.gelu(self.up(y)))


def train(
    batch: int,
    dtype: torch.dtype = torch.float32,
    mixed: bool = False,
    accumulation: int = 0,
    optimizer: type = torch.optim.Adam,
    tf32: bool = True,
) -> Simulation:
    """Two steps; `accumulation` is how many batches share one, 0 where each has its own."""

    def run():
        model = VisionTransformer(WIDTH, (Layer() for _ in range(LAYERS)), CLASSES).to(dtype)
        steps = optimizer(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", enabled=mixed)
        for micro_batch in range(2 * max(accumulation, 1)):
            images, targets = torch.empty(batch, 3, 224, 224), torch.zeros(batch).long()
            with torch.autocast("cuda", torch.float16, enabled=mixed):
                logits = model(images.to(dtype))  # (batch, classes)
            logits = logits.float()
            loss = F.cross_entropy(logits, targets)
            if accumulation:
                loss = loss / accumulation
            else:
                steps.zero_grad()
            scaler.scale(loss).backward()
            if not accumulation or micro_batch % accumulation == 0:
                scaler.step(steps)
                scaler.update()
                if accumulation:
                    steps.zero_grad()

    return simulate(run, card=card("A100-40GB", tf32))


HALF = partial(train, dtype=torch.bfloat16)
RUNS: dict[str, Callable[[], Simulation]] = {
    "fp32": partial(train, 64, tf32=False),
    "fp32, Fabric": partial(train, 64, tf32=False),
    "16-mixed": partial(train, 64, mixed=True),
    "bf16-true": partial(HALF, 64),
    "bf16-true, batch size 16": partial(HALF, 16),
    "bf16-true, accumulation 4 x 4": partial(HALF, 4, accumulation=4),
    "bf16-true, accumulation 4 x 4, SGD": partial(
        HALF, 4, accumulation=4, optimizer=torch.optim.SGD
    ),
}
TIMED = [run for run in RUNS if run not in ("fp32, Fabric", "bf16-true, accumulation 4 x 4, SGD")]


def measured() -> Iterator[tuple[str, Callable]]:
    for name, predict in RUNS.items():
        yield name, lambda predict=predict: {"reserved": predict().peak_reserved}


def timed() -> Iterator[tuple[str, Callable]]:
    for name in TIMED:
        yield name, RUNS[name]


PEAKS = {"vit-l-2023": measured}
STEPS = {"vit-l-2023": timed}
