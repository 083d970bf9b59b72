"""What CUDA's kernels allocate for themselves, beside their results. Fake ones allocate nothing."""

import math
from typing import NamedTuple

import torch
from torch.nn.attention import varlen  # noqa: F401  its operations are registered

from .allocator import MiB
from .card import Card
from .ordered import in_order, workspace_told
from .products import at_once
from .versions import Versions

aten, KiB = torch.ops.aten, 2**10
PRODUCTS = {  # all that asks for cuBLAS's handle, and with it for its workspace
    *(aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default),
    *(aten.mv.default, aten.addmv.default, aten.dot.default, aten.vdot.default),
    *(aten._addmm_activation.default, aten.addbmm.default),
}


# Of setReduceConfig: threads of a block and of a warp, values that a thread adds up, bytes.
MAX_NUM_THREADS, WARP_SIZE = 512, 32
MIN_PER_THREAD, MAX_PER_THREAD = 16, 256
FLOAT = SEMAPHORE = 4
LITTLE_SHARED = {(7, 5), (8, 6), (8, 9), (12, 0), (12, 1)}  # no room for blocks of 128 rows
THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}  # of a multiprocessor, at most


def workspace(capability: tuple[int, int], versions: Versions | None = None) -> int:
    """Bytes of cuBLAS's workspace, of which each thread takes one with its first product, or
    (`Versions.workspace_is_kept`) each product one for itself.

    8 MiB and a bit (`:4096:2:16:8`), 32 MiB on Hopper and on today's Blackwell
    (aten/src/ATen/cuda/CublasHandlePool.cpp); or what CUBLAS_WORKSPACE_CONFIG says.

    Args:
        capability: of the card, such as (9, 0).
        versions: of the libraries of the run; today's where nothing is said.

    Returns:
        Bytes; 0 for a torch whose allocator does not count them.
    """
    versions = versions or Versions()
    if not versions.workspace_is_counted:
        return 0
    if (told := workspace_told()) is not None:
        return told
    large = capability[0] in ((9, 10, 12) if versions.large_workspace_on_blackwell else (9,))
    return 32 * MiB if large else (2 * 4096 + 8 * 16) * KiB


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _copy(tensor) -> list[int]:
    """A gradient laid out anew, if heads are not the second innermost dimension."""
    contiguous = tensor.transpose(1, 2).is_contiguous()
    return [] if contiguous else [tensor.numel() * tensor.element_size()]


def _splits(card, heads: int) -> int:
    """How many gradients of the queries flash attention adds up, where it has to do so in one
    order: as many as keep all multiprocessors at work (nsplits in flash_attn/flash_api.cpp)."""
    return max(1, -(-card.sms // heads)) if in_order() else 1


def _flash_backward(card, grad, q, k, v, *_) -> list[int]:
    """The sums of each row and the gradient of the queries in float32; with grouped heads also
    gradients of all keys and values, which are added up (mha_bwd in flash_attn/flash_api.cpp)."""
    batch, heads, length, width = q.shape
    rows = batch * heads * _up(length, 128)
    splits = _splits(card, batch * heads)
    sizes = [*_copy(grad), 4 * rows, splits * 4 * rows * _up(width, 32 if width <= 128 else 64)]
    if k.shape[1] != heads:
        sizes += 2 * [batch * heads * k.shape[2] * width * q.element_size()]
    return sizes


def _varlen_backward(card, grad, q, k, v, out, lse, borders, *_) -> list[int]:
    """As `_flash_backward` for texts end to end, [tokens, heads, width]: between two of them lie
    128 rows more, so that no block of one writes into the next (mha_varlen_bwd in
    flash_attn/flash_api.cpp). The gradient is laid out anew first (_flash_attention_backward in
    transformers/cuda/attention_backward.cu)."""
    tokens, heads, width = q.shape
    texts = borders.numel() - 1
    rows = heads * (tokens + 128 * texts)
    splits = _splits(card, texts * heads)
    sizes = [] if grad.is_contiguous() else [grad.numel() * grad.element_size()]
    sizes += [4 * rows, splits * 4 * rows * _up(width, 32 if width <= 128 else 64)]
    if k.shape[1] != heads:
        sizes += 2 * [k.shape[0] * heads * width * q.element_size()]
    return sizes


def _pieces(keys: int, rows: int) -> int:
    """Into how many pieces keys are cut where each adds up gradients of its own: none is counted
    twice where sums are in order (_efficient_attention_backward in attention_backward.cu)."""
    return 1 if in_order() else max(1, min(-(-keys // 64), 200 // rows))


def _efficient_backward(card, grad, q, k, v, *_) -> list[int]:
    """The sums of each row, and in float32 what is added up in memory: the gradient of the queries
    block by block; in 16 bits those of keys and values of each piece, where a head is wider than a
    block is high (attention_backward.cu, mem_eff_attention/kernel_backward.h: workspace_size; the
    sizes of the blocks: kernels/generate_kernels.py, where one more on 8.6 and 8.9 for heads up to
    96 is passed over)."""
    (batch, heads, length, width), values = q.shape, v.shape[-1]
    rows, half, widest = batch * heads, q.element_size() == 2, max(width, values)
    height = 64 if widest <= 64 or card.capability in LITTLE_SHARED else 128
    kept = half and widest <= height  # in registers
    across = 128 if kept and height == 128 and card.capability >= (8, 0) else 64
    blocks = -(-length // height) * -(-width // across)
    size = blocks * (4 * height * across + 16)
    if half and not kept:
        wide = _up(width, height) + _up(values, height)
        size += 4 * _pieces(k.shape[2], rows) * across * wide
    return [*_copy(grad), 4 * rows * length, rows * size]


def _last_power_of_2(n: int) -> int:
    return 1 << max(n, 1).bit_length() - 1


class _Block(NamedTuple):
    """Threads of a block, along the dimension that lies close and along the other."""

    width: int
    height: int


def _block(dim0: int, dim1: int, max_num_threads: int) -> _Block:
    """`set_block_dimension` of Reduce.cuh."""
    dim0_pow2 = min(_last_power_of_2(dim0), max_num_threads)
    dim1_pow2 = min(_last_power_of_2(dim1), max_num_threads)
    block_width = min(dim0_pow2, WARP_SIZE)
    block_height = min(dim1_pow2, max_num_threads // block_width)
    block_width = min(dim0_pow2, max_num_threads // block_height)
    return _Block(block_width, block_height)


class Sum(NamedTuple):
    """A sum over outer dimensions, as those of the gradients of biases and norm weights.

    Args:
        num_reductions: values that are added up for each output.
        num_outputs: sums.
        innermost: values that lie close together, none of which are added to each other.
    """

    num_reductions: int
    num_outputs: int
    innermost: int

    @classmethod
    def of(cls, x, dims=None) -> "Sum | None":
        """What `x.sum(dims)` is; None for any other sum."""
        dims = {d % x.dim() for d in dims or range(x.dim())}
        reduction_on_fastest_striding_dimension = x.dim() - 1 in dims
        if reduction_on_fastest_striding_dimension or x.dtype == torch.bool:
            return None
        if not x.is_contiguous():
            return None
        num_reductions = math.prod(x.shape[d] for d in dims)
        return cls(num_reductions, x.numel() // max(num_reductions, 1), x.shape[-1])

    def partial_sums(self, card) -> list[int]:
        """Bytes of partial sums and semaphores of several blocks of threads for each output.

        With the names of `setReduceConfig` and `gpu_reduce_kernel` in
        aten/src/ATen/native/cuda/Reduce.cuh.
        """
        num_reductions, num_outputs, innermost = self
        if not num_outputs:
            return []
        output_vec_size = next(n for n in (4, 2, 1) if innermost % n == 0)
        dim0, dim1 = num_outputs // output_vec_size, num_reductions
        block = _block(dim0, dim1, MAX_NUM_THREADS // output_vec_size)
        if num_reductions < min(block.height * 16, 256):  # block.y takes outputs, and reduces not
            return []
        values_per_thread = -(-num_reductions // block.height)
        grid = -(-dim0 // block.width)
        threads = THREADS.get(card.capability, 2048)
        blocks_per_sm = threads // (block.width * block.height)
        target_grid_size = card.sms * blocks_per_sm
        if values_per_thread < MAX_PER_THREAD or grid > target_grid_size:
            return []
        ctas_per_output = max(
            min(-(-target_grid_size // grid), -(-values_per_thread // MIN_PER_THREAD)),
            -(-values_per_thread // MAX_PER_THREAD),
        )
        if ctas_per_output == 1:
            return []
        # global_memory_size, where neither dimension of a block reduces with its neighbours
        global_memory = FLOAT * num_outputs * ctas_per_output * block.width * output_vec_size
        return [global_memory, SEMAPHORE * grid]


def _sum(card, x, dims=None, *_) -> list[int]:
    of = Sum.of(x, dims)
    return of.partial_sums(card) if of else []


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


def _experts(card, a, b, offs=None, *_) -> list[int]:
    """Where one kernel does all of them: their pointers, strides and sizes
    (bf16bf16_grouped_gemm_impl_sm90_sm100 in aten/src/ATen/native/cuda/GroupMM.cu), and for each
    multiprocessor the descriptors of four matrices (get_workspace_size in CUTLASS's collectives
    sm90_mma_array_tma_gmma_ss_warpspecialized and sm90_epilogue_array_tma_warpspecialized).
    """
    if not at_once(card, a):
        return []
    n = a.shape[0] if a.dim() == 3 else b.shape[0] if b.dim() == 3 else offs.shape[0]
    return [3 * 8 * _up(n, 2) + 3 * 4 * n + 3 * 8 * n, 4 * 128 * card.sms]


KERNELS = {
    aten._grouped_mm.default: _experts,
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


def asks_cublas(func, args, card: Card) -> bool:
    """Whether an operation takes cuBLAS's handle, and with it its workspace."""
    return func in PRODUCTS or func is aten._grouped_mm.default and not at_once(card, args[0])


def scratch(func, args, card: Card) -> list[int]:
    """The sizes in bytes of what a kernel allocates and frees again, in its order."""
    return KERNELS[func](card, *args) if func in KERNELS else []
