"""Llama 3.1 8B by torchtitan on H100s, without compile (benchmarks/llama3_h100_202412_*.md).

This module is also the script of a rank. What is behind its choices (torchtitan at 9dec370):

- The model in plain operations: a norm in 32 bits, rotary positions by complex numbers, keys and
  values repeated for their queries (models/llama/model.py, models/norms.py).
- Each block checkpointed but for attention and every other product, then cut by FSDP2, gathered in
  bfloat16 and summed in 32 bits; the last block stays whole (parallelisms/parallelize_llama.py).
- Logits are turned into 32 bits for the loss and gone before backward; gradients are emptied when
  the next step begins (train.py).
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from evidence.cards import card
from evidence.several import as_they_ran
from fake_cuda import simulate
from fake_cuda.scripts import Script

WIDTH, LAYERS, HEADS, GROUPS, INNER, WORDS = 4096, 32, 32, 8, 14336, 128256
BATCH, LENGTH, SIZE = 2, 8192, WIDTH // HEADS
CARDS = (8, 128)
KEPT = (
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
)
linear = partial(nn.Linear, bias=False)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return normed.type_as(x) * self.weight


def turned(x, angles):  # (batch, length, heads, SIZE), (length, SIZE / 2)
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles[None, :, None]).flatten(3).type_as(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(Norm() for _ in range(2))
        self.q, self.out = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)
        self.k, self.v = (linear(WIDTH, GROUPS * SIZE) for _ in range(2))
        self.gate, self.up = linear(WIDTH, INNER), linear(WIDTH, INNER)
        self.down = linear(INNER, WIDTH)

    def attention(self, x, angles):
        batch, length, _ = x.shape
        q, k, v = (one(x).view(batch, length, -1, SIZE) for one in (self.q, self.k, self.v))
        q, k = turned(q, angles), turned(k, angles)
        each = HEADS // GROUPS
        k, v = (t[:, :, :, None].expand(-1, -1, -1, each, -1).flatten(2, 3) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.out(mixed.contiguous().view(batch, length, WIDTH))

    def forward(self, x, angles):  # x and what is returned: (batch, length, WIDTH)
        x = x + self.attention(self.norms[0](x), angles)
        normed = self.norms[1](x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        angles = torch.empty(LENGTH, SIZE // 2, dtype=torch.complex64)
        self.register_buffer("angles", angles)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.output = Norm(), linear(WIDTH, WORDS)

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x, self.angles)
        return self.output(self.norm(x))


def every_other_product():
    """What a checkpoint keeps: attention, what was reduced, and every other matrix product."""
    seen = defaultdict(int)

    def policy(context, operation, *_, **__):
        product = operation == torch.ops.aten.mm.default
        seen[context.is_recompute] += product
        kept = seen[context.is_recompute] % 2 if product else operation in KEPT
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def sharded(cards: int) -> Model:
    mesh = init_device_mesh("cuda", (cards,))
    with torch.device("meta"):
        model = Model()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = checkpoint_wrapper(
            block, context_fn=every_other_product, preserve_rng_state=False
        )
    cut = dict(mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    for block in model.blocks:
        fully_shard(block, **cut, reshard_after_forward=block is not model.blocks[-1])
    return fully_shard(model, **cut, reshard_after_forward=True).to_empty(device="cuda")


def loss_of(model: Model, ids):
    return F.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten(0, 1))


def train(cards: int) -> None:
    """Steps of rank 0."""
    dist.init_process_group("nccl")
    model = sharded(cards)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for _ in range(3):
        ids = torch.ones(BATCH, LENGTH, dtype=torch.long).to("cuda")
        optimizer.zero_grad()
        loss_of(model, ids).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()


def run(cards: int) -> dict[str, int]:
    """Predict a row."""
    script = Script(__file__, [str(cards)], ranks=cards)
    return {"reserved": simulate(script, card=card("H100")).peak_reserved}


def measured() -> Iterator[tuple[str, Callable]]:
    for cards in CARDS:
        yield f"Llama-3.1-8B, {cards} cards", partial(run, cards)


PEAKS = {"torchtitan-fsdp": lambda: as_they_ran("torchtitan-fsdp", measured())}

if __name__ == "__main__":
    train(int(sys.argv[1]))
