"""LitGPT's model and LoRA of 2023 and 2024 in one small module, by what they keep.

What is behind each choice stands in `evidence/sources/litgpt.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

BF16, PIECE = torch.bfloat16, 128  # PIECE: tokens that the head takes at once


@dataclass(frozen=True)
class Shape:
    """A model of litgpt/config.py, and the settings of its file in config_hub/finetune."""

    layers: int
    width: int
    heads: int
    groups: int
    inner: int
    vocabulary: int
    mlp: str = "gated"  # or "gelu gated", "plain"
    head_size: int = 0
    rotary: float = 1.0
    bias: bool = False
    head_bias: bool = False
    layer_norm: bool = False
    parallel: bool = False
    shared_norm: bool = False
    scaled: bool = False  # embeddings times a number, norms with 1 + weight
    newer: bool = False  # code of July 2024 on: the norm's product in 32 bits, padding in place
    early: bool = False  # code of October 2023
    length: int = 512
    batch: int = 1
    rank: int = 32
    dropout: float = 0.05
    everywhere: bool = False  # LoRA in all layers; otherwise in queries and values
    quantized: bool = False
    twice: bool = False  # the scales, too
    accumulates: bool = True  # several batches a step


def expanded(shape: tuple[int, int], scales, dtype: torch.dtype):
    _opened = scales.float()  # a copy if they have 8 bits
    half = torch.empty(shape, dtype=torch.half)
    return half.to(dtype)


class Quantized(torch.autograd.Function):
    """A product with a 4-bit weight, as bitsandbytes 0.42 did it."""

    @staticmethod
    def forward(ctx, x, packed, scales, shape, bias):
        ctx.kept, ctx.shape, ctx.scales = (x, packed), shape, scales
        return F.linear(x, expanded(shape, scales, x.dtype), bias)

    @staticmethod
    def backward(ctx, grad):
        return grad @ expanded(ctx.shape, ctx.scales, grad.dtype), None, None, None, None


class Linear4(nn.Module):
    def __init__(self, inputs: int, outputs: int, bias: bool, twice: bool = False):
        super().__init__()
        self.shape = (outputs, inputs)
        n = inputs * outputs
        self.register_buffer("packed", torch.empty(n // 2, 1, dtype=torch.uint8))
        kind = torch.uint8 if twice else torch.float32
        self.register_buffer("scales", torch.empty(n // 64, dtype=kind))
        if twice:
            self.register_buffer("scales_of_scales", torch.empty(n // 64 // 256))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=BF16)) if bias else None

    def forward(self, x):
        return Quantized.apply(x, self.packed, self.scales, self.shape, self.bias)


def linear(shape: Shape) -> Callable:
    if shape.quantized:
        return partial(Linear4, twice=shape.twice)
    return partial(nn.Linear, dtype=BF16)


class Lora(nn.Module):
    """A frozen layer and, where `rank` is not 0, its two small matrices."""

    def __init__(self, shape: Shape, inputs: int, outputs: int, bias: bool, rank: int):
        super().__init__()
        kind = linear(shape)
        self.linear = kind(inputs, outputs, bias=bias)
        self.dropout, self.rank = nn.Dropout(shape.dropout), rank
        if rank:
            self.lora_a = nn.Parameter(torch.empty(rank, inputs, dtype=BF16))
            self.lora_b = nn.Parameter(torch.empty(outputs, rank, dtype=BF16))

    def forward(self, x):
        pretrained = self.linear(x)
        if not self.rank:
            return pretrained
        return pretrained + (self.dropout(x) @ self.lora_a.T @ self.lora_b.T) * 0.5


class LoraAttention(nn.Module):
    """Queries, keys and values in one layer, with LoRA for some of them."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.parts = [shape.heads * shape.head_size, shape.groups * shape.head_size]
        self.outputs = self.parts[0] + 2 * self.parts[1]
        self.parts.insert(1, self.parts[1])
        self.shape = shape
        if not shape.everywhere:
            self.parts = [self.parts[0], self.parts[2]]
        self.together = shape.heads == shape.groups
        kind = linear(shape)
        self.linear = kind(shape.width, self.outputs, bias=shape.bias)
        self.dropout = nn.Dropout(shape.dropout)
        if shape.rank:
            n = len(self.parts)
            self.lora_a = nn.Parameter(torch.empty(shape.rank * n, shape.width, dtype=BF16))
            self.lora_b = nn.Parameter(torch.empty(sum(self.parts), shape.rank, dtype=BF16))

    def padded(self, x):
        if self.shape.everywhere:
            return x
        if self.shape.newer:
            where = self.indices()
            return x.new_zeros(*x.shape[:-1], self.outputs).index_copy_(-1, where, x)
        x = x.transpose(0, 1)
        result = x.new_zeros(*x.shape[:-1], self.outputs).view(-1, self.outputs)
        result = result.index_copy(1, self.indices(), x.reshape(-1, x.shape[-1]))
        return result.view(*x.shape[:-1], self.outputs).transpose(0, 1)

    def indices(self):
        if not self.shape.newer:  # a list put on the card each time
            return torch.zeros(sum(self.parts), dtype=torch.long)
        if not hasattr(self, "where"):
            self.register_buffer("where", torch.zeros(sum(self.parts), dtype=torch.long))
        return self.where

    def forward(self, x):
        pretrained = self.linear(x)
        if not self.shape.rank:
            return pretrained
        a = F.linear(self.dropout(x), self.lora_a).transpose(-2, -1)  # (batch, ranks, length)
        b = self.lora_b.unsqueeze(-1)  # (outputs, rank, 1)
        if self.together:
            b = F.conv1d(a, b, groups=len(self.parts))
        else:
            pairs = zip(a.chunk(len(self.parts), dim=1), b.split(self.parts), strict=True)
            b = torch.cat([F.conv1d(x, w) for x, w in pairs], dim=1)
        return pretrained + self.padded(b.transpose(-2, -1)) * 0.5


class Norm(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape.width, dtype=BF16))
        self.shape = shape

    def forward(self, x):
        x = x.float()
        x = x * torch.rsqrt(torch.mean(x * x, -1, keepdim=True) + 1e-5)
        if self.shape.early:
            return (self.weight * x).to(BF16)
        x = x if self.shape.newer else x.to(BF16)
        weight = 1 + self.weight if self.shape.scaled else self.weight
        return (x * weight.float()).to(BF16) if self.shape.newer else x * weight


def rotated(x, cos, sin):
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    result = (x * cos) + (turned * sin)
    return result.to(x.dtype)


class Block(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        s, rank = shape, shape.rank if shape.everywhere else 0
        norm = partial(nn.LayerNorm, s.width, dtype=BF16) if s.layer_norm else partial(Norm, s)
        self.norms = nn.ModuleList(norm() for _ in range(1 if s.shared_norm else 2))
        self.qkv = LoraAttention(s)
        self.proj = Lora(s, s.heads * s.head_size, s.width, s.bias, rank)
        n = 1 if s.mlp == "plain" else 2
        self.up = nn.ModuleList(Lora(s, s.width, s.inner, s.bias, rank) for _ in range(n))
        self.down = Lora(s, s.inner, s.width, s.bias, rank)
        self.shape = s

    def attention(self, x, cos, sin):
        s, (batch, length, _) = self.shape, x.shape
        each = s.heads // s.groups
        qkv = self.qkv(x).view(batch, length, s.groups, each + 2, s.head_size)
        # (batch, groups, each | 1, length, size)
        q, k, v = qkv.permute(0, 2, 3, 1, 4).split((each, 1, 1), dim=2)
        if s.groups != s.heads:
            k, v = (t.expand(batch, s.groups, each, length, s.head_size) for t in (k, v))
        # (batch, heads, length, size)
        q, k, v = (t.reshape(batch, -1, length, s.head_size) for t in (q, k, v))
        n = cos.shape[-1]
        q_turned, k_turned = rotated(q[..., :n], cos, sin), rotated(k[..., :n], cos, sin)
        q = torch.cat((q_turned, q[..., n:]), -1)
        k = torch.cat((k_turned, k[..., n:]), -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.1).transpose(1, 2)
        return self.proj(y.reshape(batch, length, s.heads * s.head_size))

    def mlp(self, x):
        if self.shape.mlp == "plain":
            x = self.up[0](x)
            return self.down(F.gelu(x))
        first, second = self.up[0](x), self.up[1](x)
        act = F.silu if self.shape.mlp == "gated" else partial(F.gelu, approximate="tanh")
        x = act(first) * second
        return self.down(x)

    def forward(self, x, cos, sin):  # x and what is returned: (batch, length, width)
        normed = self.norms[0](x)
        attended = self.attention(normed, cos, sin)
        if self.shape.parallel:
            normed = normed if self.shape.shared_norm else self.norms[1](x)
            return self.mlp(normed) + attended + x
        x = attended + x
        return self.mlp(self.norms[1](x)) + x


class Model(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        s = self.shape = shape
        rank = s.rank if s.everywhere else 0
        self.head = Lora(s, s.width, s.vocabulary, s.head_bias, rank)
        self.embedding = nn.Embedding(s.vocabulary, s.width, dtype=BF16)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.layers))
        self.norm = nn.LayerNorm(s.width, dtype=BF16) if s.layer_norm else Norm(s)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(s.length, int(s.rotary * s.head_size)))

    def forward(self, ids, pieces: bool):
        x = self.embedding(ids)  # (batch, length, width)
        if self.shape.scaled:
            x = x * self.shape.width**0.5
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        x = self.norm(x)
        if pieces:
            return [self.head(piece) for piece in x.split(PIECE, dim=1)]
        return self.head(x)
