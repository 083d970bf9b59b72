"""Single operations on five cards, from the benchmarks of linkedin/Liger-Kernel.

Their table (benchmark/data/all_benchmark_data.csv) holds `max_memory_allocated` of one operation,
the median of ten passes in a row. What stands there under "huggingface" and "torch" is plain
PyTorch, and is repeated here; Triton kernels cannot run on fake tensors. Shapes and the order of
what is kept are those of benchmark/scripts/ at the version of each row.
"""

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

from fake_cuda import Card, simulate

BF16 = torch.bfloat16
# Compute capability, and multiprocessors (data/gpus.csv).
A100, H100, H100_PCIE, B200 = (8, 0, 108), (9, 0, 132), (9, 0, 114), (10, 0, 148)
RTX_3090, RTX_4090 = (8, 6, 82), (8, 9, 128)


def peak_of_a_pass(setup: Callable, card: tuple[int, int, int]) -> int:
    """Bytes allocated at the worst moment, at the latest when gradients stand already.

    `setup` builds what an operation needs and returns one pass of it.
    """

    def run():
        once = setup()
        for _ in range(3):
            once()
        return once

    return simulate(run, Card.like(card[:2], card[2])).peak_allocated


def forward_and_backward(function: Callable, *inputs, retain: bool = True) -> Callable:
    """One pass: a scalar loss, and backward with or without freeing its graph."""

    def once():
        function(*inputs).backward(retain_graph=retain)

    return once


def with_gradient(function: Callable, x, dy) -> Callable:
    """One pass with a gradient of the output that was made before."""

    def once():
        function(x).backward(dy, retain_graph=True)

    return once


def with_new_gradient(function: Callable, x) -> Callable:
    """One pass that draws a gradient of the output each time."""

    def once():
        y = function(x)
        y.backward(torch.randn_like(y), retain_graph=True)

    return once


def probabilities(rows: int, classes: int, log_input: bool, log_target: bool) -> tuple:
    """Student and teacher; the student's softmax belongs to the graph of every pass."""
    student = torch.randn(rows, classes, requires_grad=True)
    student = F.log_softmax(student, -1) if log_input else F.softmax(student, -1)
    teacher = torch.randn(rows, classes)
    return student, F.log_softmax(teacher, -1) if log_target else F.softmax(teacher, -1)


def cross_entropy(classes: int) -> Callable:
    x = torch.randn(8 * 2048, classes, requires_grad=True)
    target = torch.randint(classes, (8 * 2048,))
    return forward_and_backward(F.cross_entropy, x, target, retain=False)


def linear_cross_entropy(rows: int) -> Callable:
    head = nn.Linear(4096, 128256, bias=False, dtype=BF16)
    other = nn.Linear(4096, 128256, bias=False, dtype=BF16)  # of the fused one, not used
    x, target = torch.randn(rows, 4096, dtype=BF16, requires_grad=True), torch.ones(rows).long()

    def once(keep=other):
        F.cross_entropy(head(x), target).backward()

    return once


def divergence(log_q, log_p) -> torch.Tensor:
    """Jensen-Shannon, half and half, as written since 2024-10-02: a logarithm for each side."""
    kl = nn.KLDivLoss(reduction="batchmean", log_target=True)
    m = torch.lerp(torch.exp(log_p), torch.exp(log_q), 0.5)
    return 0.5 * kl(torch.log(m), log_p) + 0.5 * kl(torch.log(m), log_q)


def jensen_shannon(classes: int) -> Callable:
    return forward_and_backward(divergence, *probabilities(4 * 2048, classes, True, True))


def jensen_shannon_2026(rows: int) -> Callable:
    """Without a reduction of the divergences until each row's sum, as in 0.8.0."""
    kl = nn.KLDivLoss(reduction="none", log_target=True)

    def loss(log_q, log_p):
        m = torch.lerp(torch.exp(log_q), torch.exp(log_p), 0.5)
        rows = 0.5 * kl(torch.log(m), log_p).sum(-1) + 0.5 * kl(torch.log(m), log_q).sum(-1)
        return (rows / log_q.shape[0]).sum()

    log_q, log_p = probabilities(rows, 128256, True, True)
    return with_new_gradient(lambda q: loss(q, log_p), log_q)


def linear_jensen_shannon(rows: int) -> Callable:
    heads = [nn.Linear(4096, 128256, bias=False, dtype=BF16) for _ in range(2)]
    x = torch.rand(rows, 4096, dtype=BF16, requires_grad=True)
    y = torch.rand(rows, 4096, dtype=BF16)

    def once():
        logits = heads[0](x), heads[1](y)  # which live until the loss is there
        student = torch.log_softmax(logits[0] / 1.0, -1)
        teacher = torch.log_softmax(logits[1] / 1.0, -1)
        divergence(student.float(), teacher.float()).to(BF16).backward()

    return once


def kl_divergence(classes: int) -> Callable:
    pair = probabilities(8 * 2048, classes, True, False)
    return forward_and_backward(nn.KLDivLoss(reduction="batchmean"), *pair)


def total_variation(classes: int) -> Callable:
    pair = probabilities(8 * 2048, classes, False, False)
    loss = lambda p, q: torch.sum(torch.abs(p - q) / 2.0) / p.size(0)  # noqa: E731
    return forward_and_backward(loss, *pair)


def mlp(kind: str, batch: int, length: int, hidden=4096, inner=11008, mode="full") -> Callable:
    """transformers' LlamaMLP; "forward" keeps no result, "backward" goes over one graph again.

    Full passes ran before in the same process, so cuBLAS has a workspace for backward, too.
    """
    act = "silu" if kind == "swiglu" else "gelu_pytorch_tanh"
    config = LlamaConfig(hidden_size=hidden, intermediate_size=inner, hidden_act=act)
    x = torch.randn(batch, length, hidden, dtype=BF16, requires_grad=True)
    layer = LlamaMLP(config).to(BF16)
    if mode == "forward":
        (torch.ones(1, 1, requires_grad=True) @ torch.ones(1, 1)).backward()
        return lambda: layer(x) is None
    if mode == "full":
        return with_new_gradient(layer, x)
    do, y = torch.randn_like(x), layer(x)
    return lambda: y.backward(do, retain_graph=True)


def normalized(layer: Callable, shape: tuple, dtype=torch.float32) -> Callable:
    """A norm with its fused twin's weights beside it."""
    norm, twin = layer(), layer()
    x = torch.randn(shape, dtype=dtype)
    dy = torch.randn_like(x)
    return with_gradient(lambda x, keep=twin: norm(x), x.requires_grad_(), dy)


def layer_norm(width: int) -> Callable:
    return normalized(lambda: nn.LayerNorm(width, eps=1e-6), (4096, width))


def rms_norm(width: int) -> Callable:
    return normalized(lambda: LlamaRMSNorm(width, eps=1e-6), (2048, width), BF16)


def group_norm(channels: int) -> Callable:
    def layer():
        return nn.GroupNorm(channels // 4, channels, eps=1e-6)

    return normalized(layer, (128, channels, 512))


def add_rms_norm(width: int) -> Callable:
    weights = [torch.ones(width, requires_grad=True) for _ in range(4)]  # of three layers
    x, r, dy, ds = (torch.randn(2048, width) for _ in range(4))
    x.requires_grad_(), r.requires_grad_()

    def layer(hidden, residual):
        hidden = hidden + residual
        residual = hidden
        variance = hidden.pow(2).mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(variance + 1e-6)
        return weights[0] * hidden, residual

    def once():
        y, s = layer(x, r)
        torch.autograd.backward((y, s), (dy, ds))

    return once


def rope(hidden: int, length: int) -> Callable:
    """transformers' rotation; in 2024 the angles were a matrix product, for which cuBLAS took its
    workspace in forward."""
    width = hidden // 32
    q, k = (
        torch.randn(1, length, heads, width, dtype=BF16, requires_grad=True).transpose(1, 2)
        for heads in (32, 8)
    )
    dq, dk = torch.randn_like(q), torch.randn_like(k)
    frequencies, positions = torch.ones(1, width // 2, 1), torch.arange(length).unsqueeze(0)
    angles = (frequencies @ positions[:, None].float()).transpose(1, 2)
    angles = torch.cat((angles, angles), -1)
    cos, sin = angles.cos().to(BF16), angles.sin().to(BF16)
    del angles

    def once(keep=(frequencies, positions)):
        out = apply_rotary_pos_emb(q, k, cos, sin)
        torch.autograd.grad(out, (q, k), (dq, dk), allow_unused=True, retain_graph=True)

    return once


def neighbourhood(length: int) -> Callable:
    """Attention over all pairs with a mask of neighbours, in fp32; hidden 512, 8 heads."""

    def projections():
        return SimpleNamespace(layers=[nn.Linear(512, 512) for _ in range(4)])

    module, fused = projections(), projections()
    x = torch.randn(2, length, 512)
    dy = torch.randn_like(x)
    x.requires_grad_()

    def attend(x, keep=fused):
        q, k, v = (m(x).view(2, length, 8, 64).transpose(1, 2) for m in module.layers[:3])
        scores = torch.matmul(q, k.transpose(-2, -1)) * 0.125
        mask = torch.zeros(length, length, dtype=torch.bool)
        scores = scores.masked_fill(~mask, float("-inf"))
        weights = torch.softmax(scores, -1)
        out = torch.matmul(weights, v).transpose(1, 2).contiguous().view(2, length, 512)
        return module.layers[3](out)

    return with_gradient(attend, x, dy)


# What the run is called: the card, the operation by what varies, and the values of that.
OPERATIONS = {
    "cross_entropy, V": (A100, cross_entropy, (4096, 8192, 16384, 131072)),
    "fused_linear_cross_entropy, BT": (A100, linear_cross_entropy, (4096, 16384, 32768)),
    "geglu full, T": (A100, lambda t: mlp("geglu", 8, t), (4096, 8192)),
    "geglu forward, T": (A100, lambda t: mlp("geglu", 8, t, mode="forward"), (4096, 8192)),
    "geglu backward, T": (A100, lambda t: mlp("geglu", 8, t, mode="backward"), (4096, 8192)),
    "swiglu full, T": (A100, lambda t: mlp("swiglu", 4, t), (1024, 4096)),
    "layer_norm, N": (A100, layer_norm, (1024, 2048, 4096, 8192)),
    "layer_norm on H100, N": (H100, layer_norm, (1024, 2048, 4096, 8192)),
    "rms_norm, H": (A100, rms_norm, (1024, 4096, 16384)),
    "rope, H": (A100, lambda hidden: rope(hidden, 2048), (512,)),
    "rope, T": (A100, lambda t: rope(8192, t), (1024, 2048, 8192)),
    "kl_div, V": (H100_PCIE, kl_divergence, (4096, 8192, 16384, 65536)),
    "jsd, V": (H100_PCIE, jensen_shannon, (4096, 8192, 16384)),
    "jsd, BT": (B200, jensen_shannon_2026, (4096, 8192)),
    "fused_linear_jsd, BT": (H100, linear_jensen_shannon, (1024, 2048, 4096, 8192)),
    "tvd, V": (H100, total_variation, (32768, 65536, 131072)),
    "group_norm full, C": (B200, group_norm, (32, 512)),
    "fused_add_rms_norm, H": (H100, add_rms_norm, (1024, 4096, 8192)),
    "neighborhood attention on RTX 3090, T": (RTX_3090, neighbourhood, (512, 1024, 2048)),
    "neighborhood attention on H100, T": (H100, neighbourhood, (512, 1024, 2048)),
} | {
    f"tiled_{kind} {mode}, T": (
        RTX_4090,
        lambda t, kind=kind, mode=mode: mlp(kind, 2, t, 2048, 4096, mode),
        (1024, 16384),
    )
    for kind in ("geglu", "swiglu")
    for mode in ("full", "forward")
}


def runs() -> Iterator[tuple[str, Callable]]:
    """Each run's name, and a function that predicts what was allocated."""

    def predict(card, operation, n):
        return {"allocated": peak_of_a_pass(lambda: operation(n), card)}

    for name, (card, operation, values) in OPERATIONS.items():
        for n in values:
            yield f"{name} {n}", partial(predict, card, operation, n)


PEAKS = {"liger": runs}
