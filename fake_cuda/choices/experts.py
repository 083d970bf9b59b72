"""Products of a mixture's experts, all in one call (`torch.nn.functional.grouped_mm`), and how the
tokens of each expert are counted.

Torch's shape function takes bf16 alone, and pads nothing in a build for CPUs; the operation takes
fp32 and fp16, too, and lays the rows of its result at multiples of 16 bytes
(aten/src/ATen/native/GroupedMMUtils.h, which CUDA and the CPU share).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import _meta_registrations as shapes

from ..trace import Trace
from ..values import known

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
ROW = 16  # bytes


def _as_bf16(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix of bf16 whose rows lie as far apart in bytes, as the shape function asks for."""
    wide = matrix.element_size() // torch.bfloat16.itemsize
    strides = [n if n <= 1 else n * wide for n in matrix.stride()]
    return matrix.new_empty(0, dtype=torch.bfloat16).as_strided(matrix.shape, strides)


def shape_of(original: Callable) -> Callable:
    """Torch's shape function with all the types that the operation takes."""

    def grouped(mat_a, mat_b, scale_a, scale_b, offs, bias, scale_result, out_dtype=None, **more):
        one, other = mat_a.dtype, mat_b.dtype
        rest = (scale_a, scale_b, offs, bias, scale_result)
        if scale_a is not None or one not in FLOATS or other not in FLOATS:
            return original(mat_a, mat_b, *rest, out_dtype, **more)
        if one != other:
            raise RuntimeError(f"expected m1 and m2 to have the same dtype: {one} and {other}")
        if out_dtype not in (None, one):
            raise RuntimeError("Grouped gemm output dtype must match `mat_a` dtype")
        out = original(_as_bf16(mat_a), _as_bf16(mat_b), *rest, None, **more)
        columns, part = out.shape[-1], ROW // one.itemsize
        padded = -(-columns // part) * part
        strides = (out.shape[-2] * padded, padded, 1)[-out.dim() :]
        return torch.empty_strided(out.shape, strides, dtype=one, device=mat_a.device)

    return grouped


def histogram(original: Callable) -> Callable:
    """`torch.histc`: CUDA's takes whole numbers (_histc_cuda in
    aten/src/ATen/native/cuda/SummaryOps.cu), a CPU's does not."""

    def histc(input, bins=100, min=0, max=0, **options):
        if input.is_floating_point() or options.get("out") is not None:
            return original(input, bins, min, max, **options)
        return input.new_empty(bins)

    return histc


def counts(original: Callable, trace: Trace) -> Callable:
    """`torch.bincount`: it has `minlength` counts, where that is told, unless a number is larger;
    the host waits to know (_bincount_cuda_template in SummaryOps.cu)."""

    def bincount(input, weights=None, minlength=0):
        if not minlength or known(input) is not None:
            return original(input, weights, minlength)
        trace.work.wait(trace)
        dtype = torch.int64 if weights is None else torch.float64
        single = weights is not None and weights.dtype == torch.float32
        return input.new_empty(minlength, dtype=torch.float32 if single else dtype)

    return bincount


@contextmanager
def grouped_products(trace: Trace) -> Iterator[None]:
    """Grouped products take fake tensors of each type."""
    shape = shape_of(shapes._meta_grouped_mm_common)
    card = (
        (torch, "histc", histogram(torch.histc)),
        (torch.Tensor, "histc", histogram(torch.Tensor.histc)),
        (torch, "bincount", counts(torch.bincount, trace)),
        (torch.Tensor, "bincount", counts(torch.Tensor.bincount, trace)),
    )
    replaced = (shapes, "_meta_grouped_mm_common", shape), *(card if trace.cuda else ())
    with trace.here.replaced(*replaced):
        yield
