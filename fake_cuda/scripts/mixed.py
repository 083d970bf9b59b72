"""Operations that a card refuses: tensors of two places or two types in one, a wrong generator.

What is raised is torch's own error, in its words: a script may catch it. Looked at are operations
of which it is known what they take, and only while gradients are not computed: what autograd's
formulas make on the way is made here on the CPU.
"""

import torch

from ..operations import in_backward
from .plain import tensors

aten = torch.ops.aten
PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv, aten.addmv, aten.dot}
PRODUCTS |= {aten.linear, aten.matmul}
# Each tensor of them has to be on the card; a number, too.
WHOLE = PRODUCTS | {aten.convolution, aten.embedding, aten.cat, aten.stack, aten.gather}
WHOLE |= {aten.index_select, aten.native_layer_norm, aten.native_group_norm, aten.native_batch_norm}
WHOLE |= {aten.nll_loss_forward, aten.nll_loss2d_forward, aten.scaled_dot_product_attention}
# TensorIterator's, which takes a tensor without dimensions from the CPU, but not to write to
# (compute_types in aten/src/ATen/TensorIterator.cpp; masked_fill and where alike).
BY_ELEMENT = {aten.add, aten.sub, aten.rsub, aten.mul, aten.div, aten.pow, aten.add_, aten.sub_}
BY_ELEMENT |= {aten.mul_, aten.div_, aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge}
BY_ELEMENT |= {aten.maximum, aten.minimum, aten.addcmul, aten.addcdiv, aten.where, aten.masked_fill}
BY_ELEMENT |= {aten.mse_loss, aten.smooth_l1_loss, aten.binary_cross_entropy, aten.masked_fill_}
BY_ELEMENT |= {aten.binary_cross_entropy_with_logits, aten.huber_loss}
WRITES = {aten.add_, aten.sub_, aten.mul_, aten.div_, aten.masked_fill_}
INDICES = {aten.index, aten.index_put, aten.index_put_}

PLACES = (
    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
)
# make_info in aten/src/ATen/native/TensorAdvancedIndexing.cpp
INDEXED = "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
# addmm_out_cuda_impl in aten/src/ATen/native/cuda/Blas.cpp
TYPES = "mat1 and mat2 must have the same dtype, but got {} and {}"
# check_generator in aten/src/ATen/core/Generator.h
# check_type in aten/src/ATen/core/TensorMethods.cpp (templates/ there), by data_ptr<T> of a weight:
# LayerNormKernelImplInternal in layer_norm_kernel.cu asks for one of its input's type T
WEIGHT = "expected scalar type {} but found {}"
ATTENDED = "Expected query, key, and value to have the same dtype"  # torch says so itself
# _fused_adamw_kernel_cuda_ in aten/src/ATen/native/cuda/FusedAdamWKernel.cu, and FusedAdam's.
# States of the host come so far: torch groups them with their weights, as steps may lie there
# (_group_tensors_by_first_tensors_device_and_dtype in aten/src/ATen/native/ForeachUtils.h).
FUSED = "params, grads, exp_avgs, and exp_avg_sqs must have same dtype, device, and layout"
FUSED_AMSGRAD = FUSED.replace("and exp_avg_sqs", "exp_avg_sqs, and max_exp_avg_sqs")
GENERATOR = "Expected a '{}' device type for generator but found '{}'"
SAID = tuple(text.split("{")[0] for text in (PLACES, INDEXED, TYPES, GENERATOR))
SAID += (WEIGHT.split("{")[0], ATTENDED, FUSED, FUSED_AMSGRAD)


def refuse(where, func, args: tuple, kwargs: dict, card: bool) -> None:
    """RuntimeError if a card would not do this. `card`: whether it would work there."""
    kind = func.overloadpacket
    if not card or in_backward():
        return
    if kind in WHOLE or kind in BY_ELEMENT:
        _one_place(where, kind, args, kwargs)
        if kind in PRODUCTS:
            _one_type(where.trace, args[-3:], TYPES)
        elif kind is aten.native_layer_norm:
            _one_type(where.trace, (args[0], args[2]), WEIGHT)
    elif kind in INDICES:
        _indices(where, args)
    elif kind.__name__.startswith(("_foreach_", "_fused_")) and kind is not aten._foreach_copy_:
        _one_list(where, kind.__name__, args)


def refuse_generator(kwargs: dict, card: bool) -> None:
    """RuntimeError if a function is given a generator of the other place. A dispatch does not see
    the script's own object, a function does."""
    place = getattr(kwargs.get("generator"), "place", None)
    if place is not None and card != (place.type == "cuda"):
        raise RuntimeError(GENERATOR.format("cuda" if card else "cpu", place.type))


def _tensors(*values) -> list:
    return [t for t in tensors(values) if not t.is_meta]


def _one_place(where, kind, args: tuple, kwargs: dict) -> None:
    for tensor in _tensors(args, kwargs):
        number = tensor.dim() == 0 and not (kind in WRITES and tensor is args[0])
        if not where.on_card(tensor) and (kind in WHOLE or not number):
            raise RuntimeError(PLACES)


def _indices(where, args: tuple) -> None:
    """Of a tensor on the card also indices of the host will do, and one number to put there."""
    if not where.on_card(args[0]):
        raise RuntimeError(INDEXED)
    if any(t.dim() and not where.on_card(t) for t in _tensors(args[2:])):
        raise RuntimeError(PLACES)


def _one_list(where, name: str, args: tuple) -> None:
    """Of lists that belong together, all tensors but the steps."""
    if any(t.dim() and not where.on_card(t) for t in _tensors(args)):
        if not name.startswith(("_fused_adam_", "_fused_adamw_")):
            raise RuntimeError(PLACES)
        raise RuntimeError(FUSED_AMSGRAD if args[4] else FUSED)


def _one_type(trace, tensors: tuple, says: str) -> None:
    """Without autocast, which has cast them before; bf16 may stand for fp16 (`Trace.fp16`)."""
    types = [t.dtype for t in _tensors(tensors)]
    if trace.fp16:
        types = [torch.float16 if t == torch.bfloat16 else t for t in types]
    if len(set(types)) > 1 and not any(trace.autocasts):
        raise RuntimeError(says.format(*map(_name, types[-2:])))


def _name(dtype: torch.dtype) -> str:
    """As C++ calls it (c10/core/ScalarType.h)."""
    names = {torch.float32: "Float", torch.float16: "Half", torch.float64: "Double"}
    names |= {torch.bfloat16: "BFloat16", torch.int64: "Long", torch.int32: "Int"}
    return names.get(dtype, str(dtype).removeprefix("torch."))
