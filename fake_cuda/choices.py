"""What CUDA does otherwise than a CPU, and what fake tensors cannot do, put in by hand."""

import copy
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
import torch.nn.functional as F
import transformers
from accelerate.state import AcceleratorState
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.optim import optimizer as optimizers
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import masking_utils, trainer
from transformers.integrations import moe

from .trace import HOST, Trace
from .values import known

aten = torch.ops.aten
DEVICES = ["cpu", "cuda"]  # the second where a script asks a tensor for its device


# Memory-efficient attention reads grouped heads (fewer keys than queries) as they are from 2.14 on.
READS_GROUPS = torch.__version__ >= "2.14"


CUDNN = 91501  # the version that is taken for granted below where there is none


def cudnn_first(capability: tuple[int, int]) -> bool:
    """Whether cuDNN's attention is tried first: on Hopper and B200 with cuDNN after 9.15.0.

    Every wheel for CUDA 13 brings that, torch's usual one since 2.11; a build for the CPU has none
    and is taken for such a wheel (check_prefer_cudnn_attention in sdp_utils.cpp).
    """
    return capability[0] in (9, 10) and (torch.backends.cudnn.version() or CUDNN) > 91500


# With cuDNN after 9.22.0, which wheels of torch 2.15 bring, its attention on Hopper and B200 takes
# wider heads, too (check_cudnn_tensor_shapes, check_cudnn_d256_bprop_head_dim in sdp_utils.cpp).
WIDE_CUDNN = torch.__version__ >= "2.15" and (torch.backends.cudnn.version() or 92600) > 92200


def _cudnn_takes(widths: tuple[int, int, int], trains: bool) -> bool:
    most = 128 if trains or not WIDE_CUDNN else 256
    wide = WIDE_CUDNN and (widths[0], widths[2]) in ((192, 128), (256, 256))
    return all(n % 8 == 0 for n in widths) and (max(widths) <= most or wide)


def _attention(capability: tuple[int, int], trace: Trace) -> Callable:
    """`scaled_dot_product_attention` with the kernel that CUDA picks, by its memory.

    Where cuDNN's comes first it needs 16 bits, a dropout in sixteenths and heads in eights, up to
    128 or as `_cudnn_takes`. Flash needs 16 bits, no mask and heads up to 256; where it is to be
    trained on capability 8.6 to 8.9 or 12, heads up to 192, or more than 224 without dropout
    (check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120). Memory-efficient takes
    the rest, except bf16 on a card without flash and, before torch 2.14, grouped heads; those fall
    back to plain matrices (aten/.../transformers/cuda/sdp_utils.cpp).
    The kernels' shape functions and gradient formulas are part of every build of torch.
    """
    flash, cudnn = capability >= (8, 0), cudnn_first(capability)
    narrow = (8, 6) <= capability <= (8, 9) or capability in ((12, 0), (12, 1))

    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **more):
        q, k, v, scale = query, key, value, more.get("scale")
        enable_gqa = more.get("enable_gqa", False)
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
            if attn_mask is not None and attn_mask.is_floating_point():
                attn_mask = attn_mask.to(dtype)
        asked = torch.backends.cuda  # what `sdpa_kernel` or the caller switched off
        half = q.dtype in (torch.float16, torch.bfloat16) and q.dim() == 4
        widths = q.shape[-1], k.shape[-1], v.shape[-1]
        trains = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        by_cudnn = cudnn and half and _cudnn_takes(widths, trains)
        by_cudnn = by_cudnn and k.shape[-2] > 1 and dropout_p * 16 % 1 == 0
        by_cudnn = by_cudnn and asked.cudnn_sdp_enabled()
        fits = half and attn_mask is None and len(set(widths)) == 1 and widths[0] <= 256
        if narrow and trains and (192 < widths[0] <= 224 or widths[0] > 224 and dropout_p):
            fits = False
        if flash and asked.flash_sdp_enabled() and fits and not by_cudnn:
            kernel = aten._scaled_dot_product_flash_attention
            return kernel(q, k, v, dropout_p, is_causal, scale=scale)[0]
        grouped = enable_gqa and q.shape[-3] != k.shape[-3] and not READS_GROUPS
        old = not (flash or trace.fp16) and q.dtype == torch.bfloat16
        plain = grouped or old or q.dim() != 4 or q.dtype == torch.float64
        if not by_cudnn and (plain or not asked.mem_efficient_sdp_enabled()):
            if not asked.math_sdp_enabled():  # select_sdp_backend in sdp_utils.cpp
                raise RuntimeError("No available kernel. Aborting execution.")
            kernel = aten._scaled_dot_product_attention_math
            options = {"scale": scale, "enable_gqa": enable_gqa}
            return kernel(q, k, v, attn_mask, dropout_p, is_causal, **options)[0]
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                zeros = torch.zeros_like(attn_mask, dtype=q.dtype)
                attn_mask = zeros.masked_fill_(~attn_mask, -math.inf)
            attn_mask = attn_mask.expand(*q.shape[:3], k.shape[2])
        kernel = aten._scaled_dot_product_efficient_attention
        if by_cudnn:
            kernel = aten._scaled_dot_product_cudnn_attention
        return kernel(q, k, v, attn_mask, True, dropout_p, is_causal, scale=scale)[0]

    return attention


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


AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


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

    def run(*args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
            if inside and args[0].dtype in half and kwargs.get("dtype") is None:
                kwargs["dtype"] = torch.float32
            elif kwargs.get("dtype") is None:
                args = [a.float() if getattr(a, "dtype", None) in half else a for a in args]
            return op(*args, **kwargs)

    return run


def _rms_norm(x, shape, weight=None, eps=None):
    """CUDA's kernel leaves the output and, in float32, a number for each row."""
    rows = [*x.shape[: x.dim() - len(shape)], *[1] * len(shape)]
    return torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)


def _rms_norm_backward(grad, x, shape, rstd, weight, wanted):
    return tuple(
        torch.empty_like(t) if w else None for t, w in zip((x, weight), wanted, strict=True)
    )


@contextmanager
def cuda_choices(trace: Trace, capability: tuple[int, int] | None) -> Iterator[None]:
    """Make fake CPU tensors take CUDA's way: attention, autocast, optimizers, host copies."""
    if capability is None:
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    known = torch._C._dispatch_has_kernel_for_dispatch_key
    copies = WeakTensorKeyDictionary()
    for name in HALF.split():
        library.impl(name, _in_half(getattr(aten, name).default, copies), "AutocastCPU")
    for name in FLOAT32.split():
        if not known(f"aten::{name}", "AutocastCUDA"):  # rms_norm in torch 2.11
            continue
        packet, _, overload = name.partition(".")
        op = getattr(getattr(aten, packet), overload or "default")
        library.impl(name, _in_float32(op), "AutocastCPU")
    # RMSNorm is one kernel on CUDA, elsewhere ten operations (native_functions.yaml).
    library.impl("_fused_rms_norm", _rms_norm, "CPU")
    library.impl("_fused_rms_norm_backward", _rms_norm_backward, "CPU")
    saved = torch.autograd.graph

    def to_host(tensor):
        copy = torch.empty_like(tensor)
        trace.see(copy, HOST)
        trace.work.copy(tensor, trace)
        trace.work.wait(trace)  # a copy to the CPU returns when it is done
        return copy

    def from_host(tensor):  # what comes back is a new tensor on the GPU
        trace.work.copy(tensor, trace)
        return torch.empty_like(tensor)

    def save_on_cpu(self, *_, **__):
        saved.saved_tensors_hooks.__init__(self, to_host, from_host)

    begin = torch.autocast.__init__

    def autocast(self, device_type, dtype=None, *args, **options):
        if device_type == "cuda":  # which fake tensors never are
            device_type, dtype = "cpu", dtype or torch.float16
        begin(self, device_type, dtype, *args, **options)

    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__

    def entered(self):
        trace.autocasts.append(self._enabled)
        return enter(self)

    def left(self, *error):
        trace.autocasts.pop()
        if not trace.autocasts:
            copies.clear()
        return leave(self, *error)

    def of_cpu(ask):
        return lambda kind="cuda": ask("cpu" if kind == "cuda" else kind)

    prepare = AcceleratorState.__init__

    def state(self, mixed_precision=None, *args, **options):
        asked = mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        if asked == "fp16":  # in which Accelerate does not train on a CPU: bf16 has the same bytes
            trace.fp16, mixed_precision = True, "bf16"
        prepare(self, mixed_precision, *args, **options)

    attention = _attention(capability, trace)
    # Optimizers and the clipping of gradients take all parameters at once (foreach) by default.
    lists = (optimizers._foreach_supported_types, _foreach_utils._foreach_supported_types)
    for types in lists:
        types.append(FakeTensor)
    try:
        with (
            patch.object(F, "scaled_dot_product_attention", attention),
            patch.object(optimizers, "_get_foreach_kernels_supported_devices", lambda: DEVICES),
            patch.object(saved.save_on_cpu, "__init__", save_on_cpu),
            patch.object(torch.autocast, "__init__", autocast),
            patch.object(torch.autocast, "__enter__", entered),
            patch.object(torch.autocast, "__exit__", left),
            patch.object(torch, "is_autocast_enabled", of_cpu(torch.is_autocast_enabled)),
            patch.object(torch, "get_autocast_dtype", of_cpu(torch.get_autocast_dtype)),
            patch.object(AcceleratorState, "__init__", state),
            patch.object(trainer, "clear_device_cache", trace.empty_cache),
            patch.object(torch.cuda, "empty_cache", trace.empty_cache),
            patch.object(torch.accelerator, "empty_cache", trace.empty_cache),
            patch.object(torch.cuda, "synchronize", lambda *_: trace.work.wait(trace)),
            patch.object(torch.cuda, "reset_peak_memory_stats", lambda *_: None),
        ):
            yield
    finally:
        for types in lists:
            types.remove(FakeTensor)
        library._destroy()


def _apply(self, fn: Callable, recurse: bool = True):
    """`nn.Module._apply` (.to, .half, .cuda) for fake parameters, which torch's own cannot swap."""
    memo: dict[int, tuple] = {}
    for module in self.modules() if recurse else [self]:
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is not None and id(old) not in memo:
                    with torch.no_grad():
                        new = fn(old)
                    if new is not old and isinstance(old, torch.nn.Parameter):
                        new = torch.nn.Parameter(new, old.requires_grad)
                    memo[id(old)] = (new, old)
                tensors[name] = old if old is None else memo[id(old)][0]
    return self


def _quantized(kind: type) -> Callable:
    """bitsandbytes' weights are a kind of tensor that no fake one can become: one stands in."""

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


def _bitsandbytes(put: Callable, cuda: bool) -> None:
    """Quantized layers on fake tensors. Their kernels run as the Python that defines them, so
    that a weight expanded for a product is seen (bitsandbytes/backends/default/ops.py)."""
    import bitsandbytes
    from bitsandbytes.autograd import _functions
    from bitsandbytes.backends.cpu import ops as cpu
    from bitsandbytes.backends.default import ops

    library, tables = torch.ops.bitsandbytes, bitsandbytes.functional

    def multiply_8bit(A, B, rows, columns, bias=None, dtype=None):  # backends/cuda/ops.py
        product = library.int8_linear_matmul.default(A, B)
        return library.int8_mm_dequant.default(product, rows, columns, bias=bias).to(dtype)

    for kind in (bitsandbytes.nn.Params4bit, bitsandbytes.nn.Int8Params):
        put(kind, "__new__", _quantized(kind))
    put(library.gemm_4bit, "default", ops._gemm_4bit_default_impl)
    # The table of 256 values, which each optimizer makes anew, one value after another.
    put(tables, "create_dynamic_map", lambda *_, **__: torch.empty(256))
    put(tables, "name2qmap", {})
    if cuda:
        put(library.int8_scaled_mm, "default", multiply_8bit)
        put(_functions, "MatMul8bitFp", _functions.MatMul8bitLt)
    else:  # a CPU expands states to 32 bits for their update
        put(library, "optimizer_update_32bit", cpu._optimizer_update_32bit_cpu)
        put(library, "optimizer_update_8bit_blockwise", cpu._optimizer_update_8bit_blockwise_cpu)


def _deepcopy(tensor, memo: dict):
    """As torch's own, which trips over a fake tensor's known values (`Tensor.__deepcopy__`).

    A parameter is copied without its gradient, which a fake one would keep. Anything else is copied
    as its storage lies, once for all its views, and what is known of its values is copied, too.
    """
    if id(tensor) in memo:
        return memo[id(tensor)]
    if isinstance(tensor, torch.nn.Parameter):
        new = torch.nn.Parameter(tensor.detach().clone(), tensor.requires_grad)
    elif not tensor.is_leaf or tensor.layout is not torch.strided:
        return torch.Tensor.__deepcopy__(tensor, memo)  # refuses the first, clones the second
    else:
        new = _copied(tensor.detach(), memo).requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = new
    return new


def _copied(tensor, memo: dict):
    storage, size = tensor.untyped_storage(), tensor.element_size()
    place = ("storage", storage._cdata, tensor.dtype)
    if place not in memo:
        memo[place] = tensor.as_strided((storage.nbytes() // size,), (1,), 0).clone()
    new = memo[place].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    with _disable_current_modes():  # the values are real
        new._known = copy.deepcopy(known(tensor), memo)
    return new


def _number(tensor):
    return tensor if tensor.dim() else tensor.item()  # as torch.tensor reads a list of them


def _generate(*_, **__):
    raise DataDependentOutputException("generate")  # no text of fake tensors ever ends


@contextmanager
def fake_modules(cuda: bool) -> Iterator[None]:
    """What modules do with real tensors only: move, guess at packed sequences, quantize."""
    with ExitStack() as stack:

        def put(owner, name, value):
            stack.enter_context(patch.object(owner, name, value, create=name == "__deepcopy__"))

        begin = torch.utils.data.DataLoader.__init__

        def loader(self, *args, **options):  # workers are other processes, without fake tensors
            options |= dict(num_workers=0, prefetch_factor=None, persistent_workers=False)
            begin(self, *args, **options | dict(multiprocessing_context=None, pin_memory=False))

        put(torch.nn.Module, "_apply", _apply)
        put(FakeTensor, "__deepcopy__", _deepcopy)
        put(torch.Tensor, "pin_memory", lambda tensor, *_: tensor)
        put(torch.utils.data.DataLoader, "__init__", loader)
        put(transformers.GenerationMixin, "generate", _generate)
        # It would find infinite gradients, because every value is 1, and skip the step.
        put(torch.amp.GradScaler, "_maybe_opt_step", lambda _, o, __, *a, **k: o.step(*a, **k))
        # A copied tensor belongs to the same simulation, not to a copy of it (peft, averages).
        put(FakeTensorMode, "__deepcopy__", lambda mode, memo: mode)
        # The shape function of grouped products asks for bf16; without them experts run in turn.
        put(moe, "_can_use_grouped_mm", lambda *_, **__: False)
        # Position ids without values look like several sequences packed in one, with a mask.
        packed, make = masking_utils.find_packed_sequence_indices, torch.tensor
        put(
            masking_utils,
            "find_packed_sequence_indices",
            lambda i: None if known(i) is None else packed(i),
        )
        put(masking_utils, "is_tracing", lambda tensor: known(tensor) is None)
        put(torch, "tensor", lambda data, **o: make(tree_map_only(FakeTensor, _number, data), **o))
        if "bitsandbytes" in sys.modules:
            _bitsandbytes(put, cuda)
        yield
