"""The arithmetic of an operation: matrix products, convolutions, fused attention."""

import math
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .card import Card
from .values import known

EXPERTS = ["_grouped_mm", "grouped_mm_fallback", "grouped_mm_fallback_backward"]
PRODUCTS = "mm addmm _addmm_activation bmm baddbmm _scaled_mm _int_mm int8_linear_matmul".split()
PRODUCTS += [*EXPERTS, "convolution", "convolution_backward"]
TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
TYPES |= {torch.float64: "fp64", torch.int8: "int8"}  # 8 bits of either kind are as fast
TYPES |= dict.fromkeys((torch.float8_e4m3fn, torch.float8_e5m2), "int8")


class Product(NamedTuple):
    """A matrix product, or several of one shape: [rows, inner] times [inner, columns]."""

    batch: int
    rows: float  # whole, but where an expert's share of the tokens is not
    columns: float
    inner: float
    type: str  # "fp32", "tf32", "fp16", "bf16", "fp64" or "int8"
    aligned: bool  # whether rows of both matrices begin at multiples of 16 bytes
    turned: int = 0  # of a convolution: bytes that change places if its channels are not last

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.rows * self.columns * self.inner


class Attention(NamedTuple):
    """A fused attention's operations, and what their rate depends on."""

    flops: float
    kernel: str  # "flash", "cudnn" or "efficient"
    backward: bool
    type: str


def _asks_tf32() -> bool:
    """Whether products of fp32 may run as tf32, by whichever way it was asked."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # by torch.backends.fp32_precision, after which torch answers no more
        return torch.backends.cuda.matmul.fp32_precision == "tf32"


def size(t) -> int:
    """Bytes of a tensor; what is only expanded counts once."""
    if 0 not in t.stride():
        return t.numel() * t.element_size()
    return t.element_size() * math.prod(n for n, s in zip(t.shape, t.stride(), strict=True) if s)


def channels_last(t) -> bool:
    """Whether a tensor's channels lie last."""
    return t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last)


def at_once(card: Card, matrix) -> bool:
    """Whether one kernel does the products of all experts (_grouped_mm_cuda in
    aten/src/ATen/native/cuda/GroupedBlas.cpp); cuBLAS does them one after another else."""
    return card.capability[0] in (9, 10) and matrix.dtype == torch.bfloat16


def products(name: str, args, outs) -> list[Product]:
    """The matrix products of an operation."""
    if name == "int8_linear_matmul":  # bitsandbytes: both operands lie with the inner side last
        a, b = args[0], args[1]
        return [Product(1, a.numel() // a.shape[-1], b.shape[0], a.shape[-1], "int8", True)]
    if name.startswith("convolution"):
        return _convolution(args, outs, name.endswith("backward"))
    a, b = args[1:3] if "add" in name else args[:2]
    kind = TYPES.get(a.dtype, "fp32")
    kind = "tf32" if kind == "fp32" and _asks_tf32() else kind
    even = all(max(t.stride()[-2:]) * t.element_size() % 16 == 0 for t in (a, b))
    batch, m, k, n = a.shape[0] if a.dim() == 3 else 1, *a.shape[-2:], b.shape[-1]
    if name in EXPERTS and b.dim() < a.dim():  # a part of the columns for each
        return [Product(batch, m, n / batch, k, kind, even)]
    if name not in EXPERTS or a.dim() == 3:
        return [Product(batch, m, n, k, kind, even)]
    # Which rows are whose depends on values: each expert is taken to have an equal share of them.
    batch = len(args[2])
    m, k = (m / batch, k) if b.dim() == 3 else (m, k / batch)
    shapes = [(m, k, n), (k, n, m)] if name.endswith("backward") else [(m, n, k)]
    return [Product(batch, *shape, kind, even) for shape in shapes]


def _convolution(args, outs, back: bool) -> list[Product]:
    """A convolution as the products that it is; backward those for the input and the weight."""
    out, x, weight = args[:3] if back else (outs[0], *args[:2])
    transposed, _, groups = args[7:10] if back else args[6:9]
    kind = TYPES.get(weight.dtype, "fp32")
    kind = "tf32" if kind == "fp32" else kind  # cuDNN's default (torch.backends.cudnn)
    turned = 2 * sum(size(t) for t in (x, weight, out))
    out = x if transposed else out  # the side whose every place meets every weight
    rows, columns = out.numel() // out.shape[1], weight.shape[0] // groups
    if columns == 1 or channels_last(
        x
    ):  # a filter for each channel has no tiles (DepthwiseConv2d.cu)
        turned = 0
    product = Product(groups, rows, columns, weight[0].numel(), kind, True, turned)
    return [product] * (sum(args[10][:2]) if back else 1)


def attention(name: str, causal: int | None, args) -> Attention:
    """A fused attention: two products forward, five backward; half of them where it is causal."""
    back = name.endswith("backward")
    q, k, v = args[1:4] if back else args[:3]
    wide = q.shape[-1] * (3 if back else 1) + v.shape[-1] * (2 if back else 1)
    half = causal is not None and causal < len(args) and args[causal]
    flops = 2.0 * q.numel() // q.shape[-1] * k.shape[-2] * wide / (2 if half else 1)
    kernel = next((w for w in ("flash", "cudnn") if w in name), "efficient")
    return Attention(flops, kernel, back, TYPES.get(q.dtype, "fp32"))


def texts_end_to_end(name: str, args) -> tuple[Attention, bool]:
    """Fused attention of texts end to end (`torch.nn.attention.varlen`), of which each row meets
    its own text alone; and whether their lengths are known. Else all are as long as the longest."""
    back = name.endswith("backward")
    q, k, v = args[1:4] if back else args[:3]
    borders, other, _, longest, half = args[6:11] if back else args[3:8]
    wide = q.shape[-1] * (3 if back else 1) + v.shape[-1] * (2 if back else 1)
    ends = [known(of) for of in (borders, borders if other is None else other)]
    told = all(of is not None for of in ends)
    pairs = q.shape[0] * min(longest, k.shape[0])
    if told:
        with _disable_current_modes():
            lengths = [of.double().diff() for of in ends]
            pairs = (lengths[0] * lengths[1]).sum().item()
    flops = 2.0 * q.shape[1] * pairs * wide / (2 if half else 1)
    return Attention(flops, "flash", back, TYPES.get(q.dtype, "fp32")), told
