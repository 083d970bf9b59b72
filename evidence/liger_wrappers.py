"""Liger's operations as its own benchmark runs them, in a release that stands in build/liger.

A function here builds what an operation needs and returns one pass of it, for `peak_of_a_pass`.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import nn
from transformers import LlamaConfig

from evidence.liger_releases import liger
from evidence.sources.liger_operations import (
    BF16,
    forward_and_backward,
    probabilities,
    with_gradient,
    with_new_gradient,
)


def cross_entropy(classes: int) -> Callable:
    x = torch.randn(8 * 2048, classes, requires_grad=True)
    target = torch.randint(classes, (8 * 2048,))
    loss = liger("transformers.cross_entropy.LigerCrossEntropyLoss")()
    return forward_and_backward(loss, x, target, retain=False)


def linear_cross_entropy(rows: int) -> Callable:
    """Of both providers' heads, one is used."""
    heads = [nn.Linear(4096, 128256, bias=False, dtype=BF16) for _ in range(2)]
    x = torch.randn(rows, 4096, dtype=BF16, requires_grad=True)
    target = torch.randint(128256, (rows,))
    name = "transformers.fused_linear_cross_entropy.LigerFusedLinearCrossEntropyLoss"
    loss = liger(name)()

    def once(keep=heads):
        loss(heads[0].weight, x, target).backward()

    return once


def kl_divergence(classes: int) -> Callable:
    pair = probabilities(8 * 2048, classes, True, False)
    return forward_and_backward(
        liger("transformers.kl_div.LigerKLDIVLoss")(reduction="batchmean"), *pair
    )


def jensen_shannon(classes: int) -> Callable:
    pair = probabilities(4 * 2048, classes, True, True)
    return forward_and_backward(liger("transformers.jsd.LigerJSD")(), *pair)


def jensen_shannon_2026(rows: int) -> Callable:
    student, teacher = probabilities(rows, 128256, True, True)
    loss = liger("transformers.jsd.LigerJSD")()
    return with_new_gradient(lambda q: loss(q, teacher), student)


def linear_jensen_shannon(rows: int) -> Callable:
    heads = [nn.Linear(4096, 128256, bias=False, dtype=BF16) for _ in range(2)]
    x = torch.rand(rows, 4096, dtype=BF16, requires_grad=True)
    y = torch.rand(rows, 4096, dtype=BF16)
    loss = liger("transformers.fused_linear_jsd.LigerFusedLinearJSD")()

    def once():
        loss(x, heads[0].weight, y, heads[1].weight, None).backward()

    return once


def total_variation(classes: int) -> Callable:
    pair = probabilities(8 * 2048, classes, False, False)
    return forward_and_backward(
        liger("transformers.tvd.LigerTVDLoss")(reduction="batchmean"), *pair
    )


class Mlp(NamedTuple):
    """The sides of an MLP in a row."""

    name: str
    batch: int
    hidden: int = 4096
    inner: int = 11008
    shards: int | None = None


def mlp(sizes: Mlp, mode: str, length: int) -> Callable:
    """The mode "forward" keeps no result, "backward" goes over one graph again; full passes ran
    before in the same process, so cuBLAS has a workspace for backward, too."""
    act = "silu" if "SwiGLU" in sizes.name else "gelu_pytorch_tanh"
    config = LlamaConfig(hidden_size=sizes.hidden, intermediate_size=sizes.inner, hidden_act=act)
    x = torch.randn(sizes.batch, length, sizes.hidden, dtype=BF16, requires_grad=True)
    options = dict(num_shards=sizes.shards) if sizes.shards else {}
    layer = liger(f"transformers.{sizes.name}")(config=config, **options).to(BF16)
    if mode == "forward":
        (torch.ones(1, 1, requires_grad=True) @ torch.ones(1, 1)).backward()
        return lambda: layer(x) is None
    if mode == "full":
        return with_new_gradient(layer, x)
    do, y = torch.randn_like(x), layer(x)
    return lambda: y.backward(do, retain_graph=True)


def normalized(name: str, shape: tuple, dtype=torch.float32, twin: Callable | None = None, **given):
    """A norm with its eager twin's weights beside it."""
    norm = liger(f"transformers.{name}")(**given)
    other = twin() if twin else None
    x = torch.randn(shape, dtype=dtype)
    dy = torch.randn_like(x)
    return with_gradient(lambda x, keep=other: norm(x), x.requires_grad_(), dy)


def layer_norm(width: int) -> Callable:
    twin = partial(nn.LayerNorm, width)
    return normalized("layer_norm.LigerLayerNorm", (4096, width), twin=twin, hidden_size=width)


def rms_norm(width: int) -> Callable:
    twin = partial(nn.RMSNorm, width)
    given = dict(hidden_size=width, eps=1e-6)
    return normalized("rms_norm.LigerRMSNorm", (2048, width), BF16, twin, **given)


def group_norm(channels: int) -> Callable:
    groups = channels // 4
    given = dict(num_channels=channels, num_groups=groups, eps=1e-6)
    twin = partial(nn.GroupNorm, groups, channels)
    return normalized("group_norm.LigerGroupNorm", (128, channels, 512), twin=twin, **given)


def sparsemax(classes: int) -> Callable:
    return normalized("sparsemax.LigerSparsemax", (4 * 512, classes), dim=-1)


def add_rms_norm(width: int, fused: bool) -> Callable:
    """Three layers' weights stand beside each other; `fused` adds and normalizes in one kernel."""
    adds = liger("transformers.fused_add_rms_norm.LigerFusedAddRMSNorm")(width, eps=1e-6)
    weights = [torch.ones(width, requires_grad=True) for _ in range(2)]
    norm = liger("transformers.rms_norm.LigerRMSNorm")(width, 1e-6, in_place=False)
    x, r, dy, ds = (torch.randn(2048, width) for _ in range(4))
    x.requires_grad_(), r.requires_grad_()

    def add_then_norm(hidden, residual):
        hidden = hidden + residual
        return weights[0] * norm(hidden), hidden

    def once(keep=weights):
        torch.autograd.backward((adds if fused else add_then_norm)(x, r), (dy, ds))

    return once


def rope(hidden: int, length: int) -> Callable:
    """In 2024 the angles were a matrix product, for which cuBLAS took its workspace. They come
    first: the benchmark counts from the first pass on, without what it took to make them."""
    width = hidden // 32
    frequencies, positions = torch.ones(1, width // 2, 1), torch.arange(length).unsqueeze(0)
    angles = (frequencies @ positions[:, None].float()).transpose(1, 2)
    angles = torch.cat((angles, angles), -1)
    cos, sin = angles.cos().to(BF16), angles.sin().to(BF16)
    del angles
    q, k = (
        torch.randn(1, length, heads, width, dtype=BF16, requires_grad=True).transpose(1, 2)
        for heads in (32, 8)
    )
    dq, dk = torch.randn_like(q), torch.randn_like(k)
    rotate = liger("transformers.rope.liger_rotary_pos_emb")

    def once(keep=(frequencies, positions)):
        out = rotate(q, k, cos, sin, positions)
        torch.autograd.grad(out, (q, k), (dq, dk), allow_unused=True, retain_graph=True)

    return once


def complex_rope(hidden: int, length: int) -> Callable:
    """Llama 4's rotation: angles as complex numbers, from a matrix product."""
    width = hidden // 32
    frequencies, positions = torch.ones(1, width // 2, 1), torch.arange(length).unsqueeze(0)
    angles = (frequencies @ positions[:, None].float()).transpose(1, 2)
    turns = torch.polar(torch.ones_like(angles), angles)
    del angles
    q, k = (
        torch.randn(1, length, heads, width, dtype=BF16, requires_grad=True) for heads in (32, 8)
    )
    dq, dk = torch.randn_like(q), torch.randn_like(k)
    rotate = liger("transformers.llama4_rope.liger_llama4_text_rotary_pos_emb")

    def once(keep=(frequencies, positions)):
        out = rotate(q, k, turns)
        torch.autograd.grad(out, (q, k), (dq, dk), allow_unused=True, retain_graph=True)

    return once


def several_tokens(length: int, sparse: bool) -> Callable:
    """Attention scores convolved over neighbouring tokens, beside the eager twin's weights."""
    dtype = torch.float32 if sparse else BF16
    name = "transformers.multi_token_attention.LigerMultiTokenAttention"
    sizes = dict(in_channels=4, out_channels=4, kernel_size=3, padding=1, bias=True)
    layers = [liger(name)(**sizes, sparse=sparse).to(dtype) for _ in range(2)]
    x = torch.randn(2, 4, length, length, dtype=dtype)
    dy = torch.randn_like(x)
    return with_gradient(lambda x, keep=layers: layers[0](x), x.requires_grad_(), dy)


class Near(NamedTuple):
    """A neighbourhood attention's sizes."""

    batch: int
    hidden: int
    heads: int
    width: int
    dilation: int


def neighbourhood(sizes: Near, length: int) -> Callable:
    """Beside it the eager twin's four projections."""
    name = "transformers.fused_neighborhood_attention.LigerFusedNeighborhoodAttention"
    given = dict(hidden_size=sizes.hidden, num_heads=sizes.heads, kernel_size=sizes.width)
    layer = liger(name)(**given, dilation=sizes.dilation, bias=True, dropout=0.0)
    twin = [nn.Linear(sizes.hidden, sizes.hidden) for _ in range(4)]
    x = torch.randn(sizes.batch, length, sizes.hidden)
    dy = torch.randn_like(x)
    return with_gradient(lambda x, keep=twin: layer(x), x.requires_grad_(), dy)


def experts(tokens: int, number: int, mode: str) -> Callable:
    """Eight experts a token; the weights are products by a number, whose graph is kept. Eager
    experts ran before in the same process, so cuBLAS has its workspaces though nothing here is a
    product of its."""
    (torch.ones(1, 1, requires_grad=True) @ torch.ones(1, 1)).backward()
    x = torch.randn(tokens, 2048, dtype=BF16, requires_grad=True)
    up = torch.randn(number, 2 * 768, 2048, dtype=BF16, requires_grad=True) * 0.02
    down = torch.randn(number, 2048, 768, dtype=BF16, requires_grad=True) * 0.02
    logits = torch.randn(tokens, number)
    chosen = torch.topk(logits, 8, dim=-1).indices.to(torch.int32)
    weights = torch.softmax(torch.gather(logits, 1, chosen.long()), dim=-1).to(BF16)
    weights.requires_grad_()
    del logits
    mixture = liger("ops.fused_moe.LigerFusedMoEFunction").apply
    if mode == "forward":
        return lambda: mixture(x, up, down, chosen, weights) is None
    if mode == "full":
        return with_new_gradient(lambda x: mixture(x, up, down, chosen, weights), x)
    y = mixture(x, up, down, chosen, weights)
    do = torch.randn_like(y)
    return lambda: y.backward(do, retain_graph=True)


def summed(function: Callable) -> Callable:
    """One pass; what the function returned lives through backward."""

    def once():
        y = function()
        y.sum().backward()

    return once


def megatron_rms_norm(width: int) -> Callable:
    facts = dict.fromkeys(("sequence_parallel", "layernorm_zero_centered_gamma"), False)
    config = SimpleNamespace(normalization="RMSNorm", **facts)
    layer = liger("megatron.rms_norm.LigerMegatronRMSNorm")(config, width, eps=1e-6).to(BF16)
    x = torch.randn(4096, 1, width, dtype=BF16, requires_grad=True)
    return summed(lambda: layer(x))


def megatron_cross_entropy(classes: int) -> Callable:
    """The gradient is dropped before each pass (benchmark_megatron_cross_entropy.py of #1260)."""
    logits = torch.randn(2048, 4, classes, dtype=BF16, requires_grad=True)
    target = torch.randint(0, classes, (2048, 4))
    loss = liger("megatron.cross_entropy.LigerMegatronCrossEntropy")(reduction="none")

    def forward():
        logits.grad = None
        return loss(logits, target)

    return summed(forward)


def megatron_swiglu(inner: int, in_place: bool) -> Callable:
    given = dict(in_place=True) if in_place else {}
    module = liger("megatron.swiglu.LigerMegatronSwiGLU")(**given)
    x = torch.randn(2048, 4, 2 * inner, dtype=BF16, requires_grad=True)

    def once():
        x.grad = None
        y = module(x, None, False, False)  # which lives through backward
        y.sum().backward()

    return once
