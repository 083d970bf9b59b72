"""Llama 3.2 3B with torchtune on packed samples: the one eager row of its table with fixed lengths.

README.md of meta-pytorch/torchtune, as of the commit that brought the table (1814feb1, November
2024): full fine-tuning in bfloat16, 2 x 4,096 tokens, full logits, no checkpointing, AdamW. The
model is torchtune's by what it keeps (torchtune/modules/): norms and rotations in 32 bits, rotary
tables picked by position for each layer anew, keys and values repeated for each query, logits in
32 bits. Its attention is flex attention, compiled for itself; flash keeps the same two tensors,
the output and a number for each row of scores, and stands in.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

from evidence.cards import card
from fake_cuda import Simulation, simulate

LAYERS, WIDTH, HEADS, GROUPS, INNER, VOCABULARY, LENGTH = 28, 3072, 24, 8, 8192, 128256, 4096
SIZE = WIDTH // HEADS


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        floats = x.float()
        normed = (floats * torch.rsqrt(floats.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x)
        return normed * self.scale


def rotated(x, table, positions):
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)  # (batch, length, heads, size / 2, 2)
    table = table[positions].view(-1, x.shape[1], 1, SIZE // 2, 2)
    turned = [
        pairs[..., 0] * table[..., 0] - pairs[..., 1] * table[..., 1],
        pairs[..., 1] * table[..., 0] + pairs[..., 0] * table[..., 1],
    ]
    return torch.stack(turned, -1).flatten(3).type_as(x)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = Norm(), Norm()
        self.q, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(WIDTH, GROUPS * SIZE, bias=False) for _ in range(2))
        self.w1, self.w3 = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.w2 = nn.Linear(INNER, WIDTH, bias=False)

    def attention(self, x, table, positions):
        batch, n, _ = x.shape
        q = rotated(self.q(x).view(batch, n, HEADS, SIZE), table, positions).transpose(1, 2)
        k, v = self.k(x).view(batch, n, -1, SIZE), self.v(x).view(batch, n, -1, SIZE)
        k, v = rotated(k, table, positions).transpose(1, 2), v.transpose(1, 2)
        shape = (batch, GROUPS, HEADS // GROUPS, n, SIZE)
        k, v = (t.unsqueeze(2).expand(shape).flatten(1, 2) for t in (k, v))
        # q, k, v: (batch, heads, length, size) each
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(batch, n, -1))

    def forward(self, x, table, positions):
        h = self.attention(self.norm1(x), table, positions) + x
        normed = self.norm2(h)
        gated = F.silu(self.w1(normed))
        gated = gated * self.w3(normed)
        return h + self.w2(gated)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers, self.norm = nn.ModuleList(Layer() for _ in range(LAYERS)), Norm()

    def forward(self, ids, table, positions):
        x = self.embedding(ids)  # (batch, length, width)
        for layer in self.layers:
            x = layer(x, table, positions)
        return F.linear(self.norm(x), self.embedding.weight).float()


def loss(model, ids, table, positions):
    logits = model(ids, table, positions)
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), ids.reshape(-1))


def run() -> None:
    """Two steps."""
    torch.set_default_dtype(torch.bfloat16)
    model = Model()
    table = torch.empty(131072, SIZE // 2, 2, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        ids = torch.ones(2, LENGTH, dtype=torch.long)
        loss(model, ids, table, torch.zeros_like(ids)).backward()
        optimizer.step()
        optimizer.zero_grad()


def train() -> Simulation:
    return simulate(run, card=card("A100-80GB"))


def measured() -> Iterator[tuple[str, Callable]]:
    """What is active is what is allocated, where all runs in one stream."""
    yield "Llama-3.2-3B, packed", lambda: {"active": train().peak_allocated}


def timed() -> Iterator[tuple[str, Callable]]:
    yield "+ packed data", train


PEAKS = {"torchtune": measured}
STEPS = {"torchtune-llama3.2-3b": timed}
