"""bitsandbytes on fake tensors: its kernels run as the Python that defines them, so that a weight
expanded for a product is seen (bitsandbytes/backends/default/ops.py)."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from ..here import DictHere, Here


def _stand_in(kind: type) -> Callable:
    """Its weights are a kind of tensor that no fake one can become: a parameter stands in."""

    def new(cls, data=None, requires_grad=False, **state):
        weight = torch.nn.Parameter(torch.empty(0) if data is None else data.detach(), False)
        usual = dict(blocksize=64, quant_type="fp4", compress_statistics=True, quant_state=None)
        usual |= dict(quant_storage=torch.uint8, module=None, bnb_quantized=False)
        vars(weight).update(usual | dict(CB=None, SCB=None, has_fp16_weights=False) | state)

        def to(*args, **kwargs):  # as theirs: the first move to a device quantizes
            if torch._C._nn._parse_to(*args, **kwargs)[0] and weight.is_floating_point():
                return kind._quantize(weight, "cpu")
            moved = torch.Tensor.to(weight, *args, **kwargs)
            return weight if moved is weight else new(cls, moved, False, **vars(weight))

        weight.to = to
        return weight

    return new


def _multiply_8bit(A, B, rows, columns, bias=None, dtype=None):
    """As on CUDA (bitsandbytes/backends/cuda/ops.py)."""
    library = torch.ops.bitsandbytes
    product = library.int8_linear_matmul.default(A, B)
    return library.int8_mm_dequant.default(product, rows, columns, bias=bias).to(dtype)


def _replacements(cuda: bool) -> Iterator[tuple[object, str, Callable]]:
    import bitsandbytes
    from bitsandbytes.autograd import _functions
    from bitsandbytes.backends.cpu import ops as cpu
    from bitsandbytes.backends.default import ops

    library = torch.ops.bitsandbytes
    for kind in (bitsandbytes.nn.Params4bit, bitsandbytes.nn.Int8Params):
        yield kind, "__new__", _stand_in(kind)
    yield library.gemm_4bit, "default", ops._gemm_4bit_default_impl
    # The table of 256 values, which each optimizer makes anew, one value after another.
    yield bitsandbytes.functional, "create_dynamic_map", lambda *_, **__: torch.empty(256)
    if cuda:
        yield library.int8_scaled_mm, "default", _multiply_8bit
        yield _functions.MatMul8bitFp, "apply", _functions.MatMul8bitLt.apply
    else:  # a CPU expands states to 32 bits for their update
        yield library, "optimizer_update_32bit", cpu._optimizer_update_32bit_cpu
        blockwise = cpu._optimizer_update_8bit_blockwise_cpu
        yield library, "optimizer_update_8bit_blockwise", blockwise


@contextmanager
def quantized(here: Here, cuda: bool) -> Iterator[None]:
    """Quantized layers and 8-bit optimizers, on CUDA or on a CPU; nothing if it is not loaded."""
    if "bitsandbytes" not in sys.modules:
        yield
        return
    import bitsandbytes

    tables = bitsandbytes.functional
    with here.replaced(*_replacements(cuda)):
        with patch.object(tables, "name2qmap", DictHere(here, tables.name2qmap)):
            yield
