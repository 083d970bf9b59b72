"""Autocast by CUDA's lists of operations, and CUDA's kernel for RMSNorm.

Fake tensors claim to lie on the CPU, so a run's autocast for CUDA is one for the CPU here, to which
is added what CUDA's lists have and the CPU's have not.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch._decomp import decompositions
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from ..here import Here
from ..trace import Trace

aten = torch.ops.aten
# Operations that CUDA's autocast runs in float32 and the CPU's does not (torch.amp documentation,
# "CUDA Ops that can autocast to float32"). Both keep a cache of the weights in 16 bits.
FLOAT32 = (
    "softmax.int log_softmax.int logsumexp layer_norm rms_norm group_norm cosine_similarity dist "
    "linalg_vector_norm norm.Scalar norm.ScalarOpt_dim pdist renorm pow.Scalar pow.Tensor_Scalar "
    "pow.Tensor_Tensor exp expm1 log log10 log1p log2 rsqrt reciprocal softplus cumprod cumsum sum "
    "sum.dim_IntList acos asin cosh sinh tan erfinv"
)
# And those that it runs in 16 bits and the CPU's does not (AT_FORALL_LOWER_PRECISION_FP in
# aten/src/ATen/autocast_mode.h): else a weight is cast with its dimensions moved, and not kept.
HALF = "einsum mv addmv addr"
# The CPU's autocast runs this one in float32, and CUDA's does not know it (autocast_mode.cpp): of
# logits in 16 bits it makes probabilities in 16 bits there, of which a float32 copy is kept.
LOSS = "cross_entropy_loss"
KEY = torch._C.DispatchKey.AutocastCPU
AUTOCAST = torch._C.DispatchKeySet(KEY)
AFTER_AUTOCAST = torch._C._dispatch_keyset_full_after(KEY)


def _in_half(op, copies: WeakTensorKeyDictionary) -> Callable:
    def cast(x):  # `cached_cast` in autocast_mode.cpp: copies of weights last to its end
        if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.dtype == torch.double:
            return x
        half = torch.get_autocast_dtype("cpu")
        kept = x.dtype == torch.float32 and x.requires_grad and x.is_leaf and not x._is_view()
        kept = kept and torch.is_autocast_cache_enabled() and not torch.is_inference_mode_enabled()
        if not kept:
            return x.to(half)
        if x not in copies:
            copies[x] = x.to(half)
        return copies[x]

    def run(*args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
            return op(*tree_map(cast, args), **kwargs)

    return run


def _in_float32(op) -> Callable:
    half = (torch.float16, torch.bfloat16)
    inside = op._schema.name in ("aten::sum", "aten::linalg_vector_norm")  # casts as it reads
    # A type that was asked for stays (`set_opt_dtype` in autocast_mode.h): `cross_entropy_loss` in
    # LossNLL.cpp asks for its input's, so of logits in 16 bits it makes probabilities in 16 bits.
    asked = op in (aten.softmax.int, aten.log_softmax.int)

    def run(*args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
            if asked and len(args) > 2 and args[2] is not None:
                return op(*args, **kwargs)
            if inside and args[0].dtype in half and kwargs.get("dtype") is None:
                kwargs["dtype"] = torch.float32
            elif kwargs.get("dtype") is None:
                args = [a.float() if getattr(a, "dtype", None) in half else a for a in args]
            return op(*args, **kwargs)

    return run


def _loss(here: Here) -> Callable:
    """A kernel for autocast on the CPU that does nothing, but for another thread what it did."""
    as_on_a_cpu = _in_float32(aten.cross_entropy_loss.default)

    def kernel(keys, *args, **kwargs):
        if not here():
            return as_on_a_cpu(*args, **kwargs)
        return aten.cross_entropy_loss.default.redispatch(keys & AFTER_AUTOCAST, *args, **kwargs)

    return kernel


def _here(here: Here, op, cast: Callable) -> Callable:
    """A kernel for autocast on the CPU, where another thread's operations have none: they go on to
    their next kernel, as if this one were not there."""

    def kernel(keys, *args, **kwargs):
        if here():
            return cast(*args, **kwargs)
        return op.redispatch(keys & AFTER_AUTOCAST, *args, **kwargs)

    return kernel


def _rms_norm(x, shape, weight=None, eps=None):
    """CUDA's kernel leaves the output and, in float32, a number for each row."""
    rows = [*x.shape[: x.dim() - len(shape)], *[1] * len(shape)]
    return torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)


def _rms_norm_backward(grad, x, shape, rstd, weight, wanted):
    return tuple(
        torch.empty_like(t) if w else None for t, w in zip((x, weight), wanted, strict=True)
    )


@contextmanager
def _kernels(here: Here, copies: WeakTensorKeyDictionary) -> Iterator[None]:
    """Registered with torch's dispatcher, which is the whole process's, and taken back."""
    library = torch.library.Library("aten", "IMPL")
    on_cuda = torch._C._dispatch_has_kernel_for_dispatch_key
    kinds = [(name, _in_half) for name in HALF.split()]
    # Some, as rms_norm in torch 2.11, CUDA's autocast does not know.
    known = [name for name in FLOAT32.split() if on_cuda(f"aten::{name}", "AutocastCUDA")]
    kinds += [(name, lambda op, _: _in_float32(op)) for name in known]
    for name, make in kinds:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(aten, packet), overload or "default")
        library.impl(name, _here(here, op, make(op, copies)), "AutocastCPU", with_keyset=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is replaced, which is the purpose
        library.impl(LOSS, _loss(here), "AutocastCPU", with_keyset=True)
    # RMSNorm is one kernel on CUDA, elsewhere ten operations (native_functions.yaml), which another
    # thread is given as torch's decompositions have them.
    elsewhere = decompositions._fused_rms_norm, decompositions._fused_rms_norm_backward
    for name, ours, theirs in zip(
        ("_fused_rms_norm", "_fused_rms_norm_backward"),
        (_rms_norm, _rms_norm_backward),
        elsewhere,
        strict=True,
    ):
        library.impl(name, here.instead(theirs, ours), "CPU")
    try:
        yield
    finally:
        library._destroy()


def _of_cpu(ask: Callable) -> Callable:
    return lambda kind="cuda": ask("cpu" if kind == "cuda" else kind)


@contextmanager
def autocast(trace: Trace) -> Iterator[None]:
    """A run's autocast for CUDA does what it does there."""
    copies = WeakTensorKeyDictionary()
    kind = torch.autocast
    begin, enter, leave = kind.__init__, kind.__enter__, kind.__exit__

    def begun(self, device_type, dtype=None, *args, **options):
        if device_type == "cuda":  # which fake tensors never are
            device_type, dtype = "cpu", dtype or torch.float16
        begin(self, device_type, dtype, *args, **options)

    def entered(self):
        trace.autocasts.append(self._enabled)
        return enter(self)

    def left(self, *error):
        trace.autocasts.pop()
        if not trace.autocasts:
            copies.clear()
        return leave(self, *error)

    with _kernels(trace.here, copies):
        with trace.here.replaced(
            (kind, "__init__", begun),
            (kind, "__enter__", entered),
            (kind, "__exit__", left),
            (torch, "is_autocast_enabled", _of_cpu(torch.is_autocast_enabled)),
            (torch, "get_autocast_dtype", _of_cpu(torch.get_autocast_dtype)),
        ):
            yield
