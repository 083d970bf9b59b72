"""What CUDA's kernels allocate for themselves, beside their results. Fake ones allocate nothing."""

import torch

from .allocator import MiB

aten = torch.ops.aten
PRODUCTS = {  # all that asks for cuBLAS's handle, and with it for its workspace
    *(aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default),
    *(aten.mv.default, aten.addmv.default, aten.dot.default, aten.vdot.default),
    *(aten._addmm_activation.default, aten.addbmm.default),
}


def workspace(capability: tuple[int, int], version: str = torch.__version__) -> int:
    """cuBLAS's workspace, of which each thread takes one with its first product: 8 MiB and a bit,
    32 MiB on Hopper and, from torch 2.12 on, on Blackwell too
    (aten/src/ATen/cuda/CublasHandlePool.cpp; pull request 175344 came after the cut of 2.11)."""
    recent = tuple(int(n) for n in version.split(".")[:2]) >= (2, 12)
    large = capability[0] in ((9, 10, 12) if recent else (9,))
    return 32 * MiB if large else 8519680


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _flash_backward(grad, q, k, v, *_) -> list[int]:
    """The sums of each row and the gradient of the queries in float32; with grouped heads also
    gradients of all keys and values, which are added up (mha_bwd in flash_attn/flash_api.cpp)."""
    batch, heads, length, width = q.shape
    rows = batch * heads * _up(length, 128)
    sizes = [4 * rows, 4 * rows * _up(width, 32 if width <= 128 else 64)]
    if k.shape[1] != heads:
        sizes += 2 * [batch * heads * k.shape[2] * width * q.element_size()]
    return sizes


KERNELS = {aten._scaled_dot_product_flash_attention_backward.default: _flash_backward}


def scratch(func, args) -> list[int]:
    """The sizes in bytes of what a kernel allocates and frees again, in its order."""
    return KERNELS[func](*args) if func in KERNELS else []
