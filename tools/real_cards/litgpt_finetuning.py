"""Fine-tuning with LitGPT on one A10G: the table of config_hub/finetune/README.md, run again.

LitGPT's model, LoRA and loss of 2024 in one small module, by what they keep. What is behind each
choice, in the versions that the table was made with (litgpt of April to September 2024, lightning
2.3 and 2.4, bitsandbytes 0.42):

- Every sample is cut to 512 tokens and the longest of Alpaca2k reaches them (the log in
  tutorials/0_to_litgpt.md says so), so each epoch has a batch of 512.
- The norm reads 32-bit floats; the rotary tables are 32-bit, and so are its products (model.py).
- The head runs over pieces of 128 tokens (lora.py); Fabric turns what a model returns into 32 bits
  (plugins/precision/half.py); the loss is taken piece by piece (utils.py).
- Quantized: every linear layer, the head too, in 4 bits of blocks of 64 with 32-bit scales, made
  from 16-bit floats (`half`), which is therefore what it is expanded to before it becomes bfloat16
  (plugins/precision/bitsandbytes.py). bitsandbytes 0.42 keeps the input of each quantized product
  (autograd/_functions.py); newer ones do not.

And the table of October 2023 (tutorials/resource-tables.md, commit 8641822b, lightning at 71aed751,
bitsandbytes 0.41.1) on an A100, where the first batch has the longest sample of Alpaca, uncut:

- The norm is taken in 32 bits, its product too (rmsnorm.py since pull request 606 of 24 October,
  which the table must have been made with: the commit it names, a week older, kept less).
- The rotary tables are made again, in 32 bits, for the longest sample (`max_seq_length` in
  model.py, set outside of Fabric's context).
- "nf4-dq" keeps the scales in 8 bits, with a 32-bit scale for each 256 of them.
- Attention is torch 2.1.0's own. Until pull request 668 of 24 October the code took the package
  flash-attn 2 wherever that was installed, and the table does not say whether it was: of a single
  text both leave the result by heads, so its copy by tokens is kept too, and of several texts only
  rows in 16 bits are in the table, whose frozen layers keep no input.
- The peak is the first batch's: no later one is that long, and AdamW's states are small.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from behaviours_2023 import behaving, of
from fake_cuda import Simulation, simulate

TORCH_2023 = "2.1.0"  # the column torch of the set in data/measurements/peaks.csv
BF16, A10G, A100, PIECE = torch.bfloat16, (8, 6), (8, 0), 128


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
        a, b = F.linear(self.dropout(x), self.lora_a).transpose(-2, -1), self.lora_b.unsqueeze(-1)
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
        q, k, v = qkv.permute(0, 2, 3, 1, 4).split((each, 1, 1), dim=2)
        if s.groups != s.heads:
            k, v = (t.expand(batch, s.groups, each, length, s.head_size) for t in (k, v))
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

    def forward(self, x, cos, sin):
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
        x = self.embedding(ids)
        if self.shape.scaled:
            x = x * self.shape.width**0.5
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        x = self.norm(x)
        if pieces:
            return [self.head(piece) for piece in x.split(PIECE, dim=1)]
        return self.head(x)


def loss(logits, targets):
    """`chunked_cross_entropy`: piece by piece, in the pieces of the head where it had some."""
    if isinstance(logits, list):
        targets = [t.reshape(-1) for t in targets.split(PIECE, dim=1)]
        logits = [piece.reshape(-1, piece.shape[-1]) for piece in logits]
    else:
        logits = logits.reshape(-1, logits.shape[-1]).split(PIECE)
        targets = targets.reshape(-1).split(PIECE)
    pairs = zip(logits, targets, strict=True)
    return torch.cat([F.cross_entropy(x, t, reduction="none") for x, t in pairs]).sum()


class Paged(torch.optim.Optimizer):
    """bitsandbytes' AdamW as the card sees it: 32-bit states, those of parameters of 100,000
    values and more on the host (optim/optimizer.py: get_state_buffer)."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            if parameter.numel() < 100_000 and not self.state[parameter]:
                for name in ("state1", "state2"):
                    self.state[parameter][name] = torch.zeros_like(parameter, dtype=torch.float32)


def handed_out(model: Model, ids, pieces: bool):
    """What Fabric makes of the logits, while those of the last batch, and with them its graph and
    the inputs that quantized products kept, still stand."""
    logits = model(ids, pieces)
    return [piece.float() for piece in logits] if pieces else logits.float()


def train(shape: Shape, card: tuple[int, int] = A10G, batches: int = 3) -> Simulation:
    """Batches of equal length, and a step after the first and the last, or after each."""

    def run():
        model = Model(shape)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora" in name or not shape.rank)
        kind = Paged if shape.quantized else torch.optim.AdamW
        optimizer = kind([p for p in model.parameters() if p.requires_grad])
        for batch in range(batches):
            ids = torch.ones(shape.batch, shape.length, dtype=torch.long)
            targets = torch.ones_like(ids)[..., 1:]
            logits = handed_out(model, ids, pieces=bool(shape.rank))
            if shape.rank:
                logits[-1] = logits[-1][..., :-1, :]
            else:
                logits = logits[..., :-1, :]
            (loss(logits, targets) / 4).backward()
            if batch != 1 or not shape.accumulates:
                optimizer.step()
                optimizer.zero_grad()

    return simulate(run, card)


LLAMA_2 = Shape(32, 4096, 32, 32, 11008, 32000, batch=2, head_size=128)
MISTRAL = replace(LLAMA_2, groups=8, inner=14336)
LLAMA_3 = replace(MISTRAL, vocabulary=128256, batch=1)
LLAMA_3_1 = replace(LLAMA_3, newer=True)
LLAMA_3_2_1B = replace(LLAMA_3_1, layers=16, width=2048, inner=8192, head_size=64)
LLAMA_3_2_3B = replace(LLAMA_3_1, layers=28, width=3072, inner=8192, heads=24)
TINY = replace(MISTRAL, layers=22, width=2048, groups=4, inner=5632, head_size=64)
TINY_LORA = replace(TINY, batch=8, everywhere=True, accumulates=False)
FALCON = Shape(32, 4544, 71, 1, 4 * 4544, 65024, "plain", head_size=64, layer_norm=True)
FALCON = replace(FALCON, parallel=True, shared_norm=True)
STABLELM = Shape(16, 4096, 32, 32, 4 * 4096, 50688, "plain", head_size=128, layer_norm=True)
STABLELM = replace(STABLELM, rotary=0.25, bias=True, parallel=True)
PHI_2 = Shape(32, 2560, 32, 32, 4 * 2560, 51200, "plain", head_size=80, layer_norm=True)
PHI_2 = replace(PHI_2, rotary=0.4, bias=True, head_bias=True, parallel=True, shared_norm=True)
PHI_2 = replace(PHI_2, batch=4, rank=8, everywhere=True)
PHI_3 = replace(LLAMA_2, width=3072, inner=8192, vocabulary=32064, head_size=96, batch=4, rank=8)
PHI_3 = replace(PHI_3, everywhere=True)
GEMMA = Shape(18, 2048, 8, 1, 16384, 256000, "gelu gated", head_size=256, scaled=True)
GEMMA = replace(GEMMA, batch=2, rank=8, dropout=0.1, everywhere=True)
GEMMA_7B = replace(GEMMA, layers=28, width=3072, heads=16, groups=16, inner=24576, batch=1)


def in_4_bits(shape: Shape, **changes) -> Shape:
    return replace(shape, quantized=True, **changes)


RUNS = {
    "falcon-7b lora": FALCON,
    "falcon-7b qlora": in_4_bits(FALCON),
    "gemma-2b lora": GEMMA,
    "gemma-2b qlora": in_4_bits(GEMMA, rank=16),
    "gemma-7b qlora": in_4_bits(GEMMA_7B, rank=16),
    "llama-2-7b lora": LLAMA_2,
    "llama-2-7b qlora": in_4_bits(LLAMA_2),
    "llama-3-8b lora": LLAMA_3,
    "llama-3-8b qlora": in_4_bits(LLAMA_3, batch=2),
    "llama-3.1-8b lora": LLAMA_3_1,
    "llama-3.1-8b qlora": in_4_bits(LLAMA_3_1, batch=2),
    "llama-3.2-1b lora": LLAMA_3_2_1B,
    "llama-3.2-1b qlora": in_4_bits(LLAMA_3_2_1B, batch=2),
    "llama-3.2-3b lora": LLAMA_3_2_3B,
    "llama-3.2-3b qlora": in_4_bits(LLAMA_3_2_3B, batch=2),
    "mistral-7b lora": MISTRAL,
    "mistral-7b qlora": in_4_bits(MISTRAL),
    "mistral-7b-v0.2 lora": MISTRAL,
    "mistral-7b-v0.2 qlora": in_4_bits(MISTRAL),
    "phi-2 lora": PHI_2,
    "phi-2 qlora": in_4_bits(PHI_2),
    "phi-3 lora": PHI_3,
    "phi-3 qlora": in_4_bits(PHI_3),
    "stablelm-base-alpha-3b lora": STABLELM,
    "stablelm-base-alpha-3b qlora": in_4_bits(STABLELM),
    "tiny-llama full": replace(TINY, rank=0, batch=4),
    "tiny-llama lora": TINY_LORA,
    "tiny-llama qlora": in_4_bits(TINY_LORA),
}


def in_2023(shape: Shape, length: int, batches: dict[str, tuple[int, ...]]) -> dict[str, Shape]:
    """The lines of one model in the table of October 2023."""
    shape = replace(shape, early=True, length=length, rank=8)
    found = {}
    for kind, sizes in batches.items():
        how = {"quantized": bool(kind), "twice": kind == "nf4-dq"}
        found |= {
            f"{kind}, batch {n}" if kind else f", batch {n}": replace(shape, batch=n, **how)
            for n in sizes
        }
    return found


PHI_1_5 = replace(PHI_2, layers=24, width=2048, inner=8192, rotary=0.5, head_size=64)
PHI_1_5 = replace(PHI_1_5, everywhere=False)
LLAMA_2_13B = replace(LLAMA_2, layers=40, width=5120, heads=40, groups=40, inner=13824)
FOUR_BITS = {"nf4": (1,), "nf4-dq": (1,)}
RUNS_2023 = {
    f"{model}{' ' * (name[0] != ',')}{name}": found
    for model, shape, length, batches in (
        ("phi-1.5", PHI_1_5, 1044, (1, 2, 4)),
        ("stablelm-alpha-3b", STABLELM, 1034, (1, 2, 4)),
        ("llama-2-7b", LLAMA_2, 1304, (1, 2)),
        ("llama-2-13b", LLAMA_2_13B, 1304, (1,)),
    )
    for name, found in in_2023(shape, length, {"": batches} | FOUR_BITS).items()
}


def runs() -> Iterator[tuple[str, Callable]]:
    """Each line of the table that was run on one card and ended, by its file's name."""
    for name, shape in RUNS.items():
        yield name, partial(train, shape)


def then(shape: Shape) -> Simulation:
    """A run of 2023, with what that torch did otherwise."""
    with behaving(of(TORCH_2023)):
        return train(shape, A100, batches=1)


def runs_2023() -> Iterator[tuple[str, Callable]]:
    for name, shape in RUNS_2023.items():
        yield name, partial(then, shape)


SETS = {"litgpt": runs, "litgpt-2023": runs_2023}
