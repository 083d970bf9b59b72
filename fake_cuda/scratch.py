"""What CUDA's kernels allocate for themselves, beside their results. Fake ones allocate nothing."""

import math

import torch
from torch.nn.attention import varlen  # noqa: F401  its operations are registered

from .allocator import MiB
from .cost import Card

aten = torch.ops.aten
PRODUCTS = {  # all that asks for cuBLAS's handle, and with it for its workspace
    *(aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default),
    *(aten.mv.default, aten.addmv.default, aten.dot.default, aten.vdot.default),
    *(aten._addmm_activation.default, aten.addbmm.default),
}


THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}  # of a multiprocessor, at most


def workspace(capability: tuple[int, int], version: str = torch.__version__) -> int:
    """cuBLAS's workspace, of which each thread takes one with its first product: 8 MiB and a bit,
    32 MiB on Hopper and, from torch 2.12 on, on Blackwell too
    (aten/src/ATen/cuda/CublasHandlePool.cpp; pull request 175344 came after the cut of 2.11)."""
    recent = tuple(int(n) for n in version.split(".")[:2]) >= (2, 12)
    large = capability[0] in ((9, 10, 12) if recent else (9,))
    return 32 * MiB if large else 8519680


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _copy(tensor) -> list[int]:
    """A gradient laid out anew, if heads are not the second innermost dimension."""
    contiguous = tensor.transpose(1, 2).is_contiguous()
    return [] if contiguous else [tensor.numel() * tensor.element_size()]


def _flash_backward(card, grad, q, k, v, *_) -> list[int]:
    """The sums of each row and the gradient of the queries in float32; with grouped heads also
    gradients of all keys and values, which are added up (mha_bwd in flash_attn/flash_api.cpp)."""
    batch, heads, length, width = q.shape
    rows = batch * heads * _up(length, 128)
    sizes = [*_copy(grad), 4 * rows, 4 * rows * _up(width, 32 if width <= 128 else 64)]
    if k.shape[1] != heads:
        sizes += 2 * [batch * heads * k.shape[2] * width * q.element_size()]
    return sizes


def _varlen_backward(card, grad, q, k, v, out, lse, borders, *_) -> list[int]:
    """As `_flash_backward` for texts end to end, [tokens, heads, width]: between two of them lie
    128 rows more, so that no block of one writes into the next (mha_varlen_bwd in
    flash_attn/flash_api.cpp). The gradient is laid out anew first (_flash_attention_backward in
    transformers/cuda/attention_backward.cu)."""
    tokens, heads, width = q.shape
    rows = heads * (tokens + 128 * (borders.numel() - 1))
    sizes = [] if grad.is_contiguous() else [grad.numel() * grad.element_size()]
    sizes += [4 * rows, 4 * rows * _up(width, 32 if width <= 128 else 64)]
    if k.shape[1] != heads:
        sizes += 2 * [k.shape[0] * heads * width * q.element_size()]
    return sizes


def _efficient_backward(card, grad, q, k, v, *_) -> list[int]:
    """The sums of each row and the gradient of the queries in float32, block by block
    (attention_backward.cu, mem_eff_attention/kernel_backward.h: workspace_size; the sizes of the
    blocks: kernels/generate_kernels.py)."""
    batch, heads, length, width = q.shape
    height = 64 if width <= 64 else 128
    across = 64 if width <= 64 or q.dtype == torch.float32 else 128
    blocks = -(-length // height) * -(-width // across)
    rows = batch * heads
    return [*_copy(grad), 4 * rows * length, rows * blocks * (4 * height * across + 16)]


def _sum(card, x, dims=None, *_) -> list[int]:
    """Partial sums of several blocks of threads, where outer dimensions are summed over: bias and
    norm weights (setReduceConfig and gpu_reduce_kernel in aten/src/ATen/native/cuda/Reduce.cuh)."""
    dims = {d % x.dim() for d in dims or range(x.dim())}
    if x.dim() - 1 in dims or x.dtype == torch.bool or not x.is_contiguous():
        return []
    inputs = math.prod(x.shape[d] for d in dims)
    outputs = x.numel() // max(inputs, 1)
    if not outputs:
        return []
    vector = next(n for n in (4, 2, 1) if x.shape[-1] % n == 0)
    most = 512 // vector  # threads of a block
    wide, high = (1 << min(n, most).bit_length() - 1 for n in (outputs // vector, inputs))
    width = min(wide, 32)
    height = min(high, most // width)
    width = min(wide, most // height)
    if inputs < min(height * 16, 256):
        return []
    values = -(-inputs // height)
    grid = -(-(outputs // vector) // width)
    target = card.sms * (THREADS.get(card.capability, 2048) // (width * height))
    if values < 256 or grid > target:
        return []
    shares = max(min(-(-target // grid), -(-values // 16)), -(-values // 256))
    return [4 * outputs * shares * width * vector, 4 * grid] if shares > 1 else []


def _softmax_backward(card, grad, output, *_) -> list[int]:
    """The gradient times the output; log_softmax needs none (softmax_backward_cuda_out in
    aten/src/ATen/native/cuda/SoftMax.cu)."""
    return [grad.numel() * grad.element_size()]


def _group_norm_backward(card, grad, x, mean, rstd, weight, batch, channels, _, groups, *__):
    """Sums and factors of each channel and group in float32 (GroupNormBackwardKernelImplInternal
    in aten/src/ATen/native/cuda/group_norm_kernel.cu)."""
    return 3 * [4 * batch * channels] + 2 * [4 * batch * groups]


def _operands(card, *matrices) -> list[int]:
    """Copies of matrices of which neither the rows nor the columns lie close together, as einsum
    leaves them (prepare_batch_matrix_for_cublas in aten/src/ATen/native/cuda/Blas.cpp)."""
    sizes = []
    for x in matrices:
        (rows, columns), (down, across) = x.shape[-2:], x.stride()[-2:]
        close = (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))
        if not (close or x.is_contiguous() and down and across):
            sizes.append(x.numel() * x.element_size())
    return sizes


def _added_to(card, old, one, other, *_) -> list[int]:
    return _operands(card, one, other)


def _fourier(card, x, dims, *_) -> list[int]:
    """cuFFT's work area, which torch takes anew for each transform, the plan being kept (_exec_fft
    in aten/src/ATen/native/cuda/SpectralOps.cpp). Of several dimensions it is once to twice the
    data, least for pure powers of 2, 3, 5 and 7 (memory requirements in cuFFTMp's documentation);
    which other lengths need less is not said, so here they need twice. Of one dimension: unknown.
    """
    lengths = [x.shape[d] for d in dims]
    pure = all(any(b ** round(math.log(n, b)) == n for b in (2, 3, 5, 7)) for n in lengths)
    return [(1 if pure else 2) * x.numel() * x.element_size()] if len(dims) > 1 else []


KERNELS = {
    aten._fft_c2c.default: _fourier,
    aten.mm.default: _operands,
    aten.bmm.default: _operands,
    aten.addmm.default: _added_to,
    aten.baddbmm.default: _added_to,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    torch.ops.torch_attn._varlen_attn_backward.default: _varlen_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten._softmax_backward_data.default: _softmax_backward,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten.sum.dim_IntList: _sum,
}


def scratch(func, args, card: Card) -> list[int]:
    """The sizes in bytes of what a kernel allocates and frees again, in its order."""
    return KERNELS[func](card, *args) if func in KERNELS else []
