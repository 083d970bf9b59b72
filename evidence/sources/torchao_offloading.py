"""ViT-giant of DINOv2 with and without torchao's optimizer on the host, on an RTX 4070 Ti SUPER.

The rows of torchao/optim/README.md that ran eagerly: benchmark_low_bit_adam.py of pytorch/ao
(commit 1b1e94c5), a batch of 32 crops of 224 pixels, each layer recomputed, AdamW (fused). timm's
model is written anew by its shapes; its `checkpoint_seq` recomputes the old way (reentrant).
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from evidence.cards import card
from evidence.models import VisionTransformer
from fake_cuda import Simulation, simulate

WIDTH, HEADS, INNER, LAYERS, CLASSES = 1536, 24, 8192, 40, 45


class Layer(nn.Module):
    """timm's Block: one product for queries, keys and values, a gated MLP, a scale for each."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, INNER), nn.Linear(INNER // 2, WIDTH)
        self.scale1, self.scale2 = (nn.Parameter(torch.ones(WIDTH)) for _ in range(2))

    def forward(self, x):
        batch, n, _ = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(batch, n, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (batch, heads, length, size) each
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = x + self.proj(y) * self.scale1
        first, second = self.fc1(self.norm2(x)).chunk(2, -1)
        return x + self.fc2(first * F.silu(second)) * self.scale2


class Giant(VisionTransformer):
    def __init__(self):
        super().__init__(WIDTH, (Layer() for _ in range(LAYERS)), CLASSES, patch=14)

    def through(self, layer, x):
        return checkpoint(layer, x, use_reentrant=True)


class OnTheHost(torch.optim.Optimizer):
    """torchao's CPUOffloadOptimizer, as the card sees it: gradients stay, and no state is there."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self):
        pass


def train(optimizer: Callable, mixed: bool = False) -> Simulation:
    """Two steps: all in bfloat16, or mixed (autocast over 32-bit weights)."""

    def run():
        model = Giant().to(torch.float32 if mixed else torch.bfloat16)
        steps = optimizer(model.parameters())
        for _ in range(2):
            images = torch.randn(32, 3, 224, 224)
            images = images if mixed else images.bfloat16()
            with torch.autocast("cuda", torch.bfloat16, enabled=mixed):
                loss = F.cross_entropy(model(images), torch.zeros(32).long())
            loss.backward()
            steps.step()
            steps.zero_grad()

    return simulate(run, card=card("RTX 4070 Ti SUPER"))


def runs() -> Iterator[tuple[str, Callable]]:
    fused = partial(torch.optim.AdamW, fused=True)
    yield "ViT-giant, bf16", partial(train, fused)
    yield "ViT-giant, bf16, optimizer on the host", partial(train, OnTheHost)
    yield "ViT-giant, mixed, optimizer on the host", partial(train, OnTheHost, mixed=True)


PEAKS = {"torchao": runs}
