"""What each operation of a run asks of host and card: products, bytes, kernels, waits, copies."""

import math
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_leaves


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class Operation(NamedTuple):
    """What one call asks of host and card. `work`: what the time of its kernel depends on."""

    phase: int  # its place in `Trace.phases`
    event: int  # how many births and deaths had been seen when it ended
    issued: str  # what the host pays for: "forward", "backward", "update", ...
    kind: str  # "product", "attention", "stream", "scatter", "norms", "bus", "view" or "wait"
    work: tuple = ()
    moved: int = 0  # bytes
    tensors: int = 0  # of a list operation
    flops: float = 0.0
    again: bool = False  # recomputed


FREE = set("_unsafe_view empty empty_like empty_strided new_empty resize_ set_ lift_fresh".split())
WRITES_ONLY = set("zero_ fill_ copy_ normal_ uniform_ _foreach_zero_ _foreach_copy_".split())
ROWS_ONLY = set("embedding index_select gather index".split())  # read no more than they return
NORMS = ("native_layer_norm", "_fused_rms_norm", "native_group_norm", "native_batch_norm")
EXPERTS = ["_grouped_mm", "grouped_mm_fallback", "grouped_mm_fallback_backward"]
PRODUCTS = "mm addmm _addmm_activation bmm baddbmm _scaled_mm _int_mm int8_linear_matmul".split()
PRODUCTS += [*EXPERTS, "convolution", "convolution_backward"]
# Operations of whose arithmetic nothing is known here, by how their names begin.
UNKNOWN = tuple("linalg_ _linalg_ _cdist _trilinear _sparse_addmm _flash_ _efficient_".split())
TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
TYPES |= {torch.float64: "fp64", torch.int8: "int8"}  # 8 bits of either kind are as fast
TYPES |= dict.fromkeys((torch.float8_e4m3fn, torch.float8_e5m2), "int8")


def _asks_tf32() -> bool:
    """Whether products of fp32 may run as tf32, by whichever way it was asked."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # by torch.backends.fp32_precision, after which torch answers no more
        return torch.backends.cuda.matmul.fp32_precision == "tf32"


def _size(t) -> int:
    """Bytes of a tensor; what is only expanded counts once."""
    if 0 not in t.stride():
        return t.numel() * t.element_size()
    return t.element_size() * math.prod(n for n, s in zip(t.shape, t.stride(), strict=True) if s)


def _last(t) -> bool:
    """Whether a tensor's channels lie last."""
    return t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last)


@cache
def _facts(func) -> tuple:
    """An operation's name, whether it counts, has no kernel, what it writes, where it is causal."""
    name, schema = func.overloadpacket.__name__, func._schema
    known = func.namespace in ("aten", "bitsandbytes") or name in EXPERTS
    seen = [r.alias_info for r in schema.returns if r.alias_info]
    view = name in FREE or any(not alias.is_write for alias in seen)
    # A fused optimizer may write gradients, but does so only for a GradScaler's scale.
    names = [a.name for a in schema.arguments]
    written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    writes = [a in written and a != "grads" for a in names]
    causal = names.index("is_causal") if "is_causal" in names else None
    return name, known, view, writes, causal


def _products(name: str, args, outs, tf32: bool) -> list[tuple]:
    """Matrix products of an operation: (batch, rows, columns, inner, type, whether aligned); for a
    convolution also the bytes that change places if its channels are not last."""
    if name == "int8_linear_matmul":  # bitsandbytes: both operands lie with the inner side last
        a, b = args[0], args[1]
        return [(1, a.numel() // a.shape[-1], b.shape[0], a.shape[-1], "int8", True)]
    if name.startswith("convolution"):
        back = name.endswith("backward")
        out, x, weight = args[:3] if back else (outs[0], *args[:2])
        transposed, _, groups = args[7:10] if back else args[6:9]
        kind = TYPES.get(weight.dtype, "fp32")
        kind = "tf32" if kind == "fp32" else kind  # cuDNN's default (torch.backends.cudnn)
        turned = 2 * sum(_size(t) for t in (x, weight, out))
        out = x if transposed else out  # the side whose every place meets every weight
        rows, columns = out.numel() // out.shape[1], weight.shape[0] // groups
        if columns == 1 or _last(x):  # a filter for each channel has no tiles (DepthwiseConv2d.cu)
            turned = 0
        shape = (groups, rows, columns, weight[0].numel(), kind, True, turned)
        return [shape] * (sum(args[10][:2]) if back else 1)
    a, b = args[1:3] if "add" in name else args[:2]
    kind = TYPES.get(a.dtype, "fp32")
    kind = "tf32" if kind == "fp32" and tf32 else kind
    even = all(max(t.stride()[-2:]) * t.element_size() % 16 == 0 for t in (a, b))
    batch, m, k, n = a.shape[0] if a.dim() == 3 else 1, *a.shape[-2:], b.shape[-1]
    if name not in EXPERTS or a.dim() == 3:
        return [(batch, m, n, k, kind, even)]
    # Which rows are whose depends on values: each expert is taken to have an equal share of them.
    batch = len(args[2])
    m, k = (m / batch, k) if b.dim() == 3 else (m, k / batch)
    shapes = [(m, k, n), (k, n, m)] if name.endswith("backward") else [(m, n, k)]
    return [(batch, *shape, kind, even) for shape in shapes]


class Work:
    """The operations of a run, as the trace sees them."""

    def __init__(self):
        self.operations: list[Operation] = []
        self.masks: set[int] = set()  # numbers of the storages that hold dropout's masks
        self.notes: dict[str, int] = {}  # what the times do not hold: where it was seen last

    def see(self, func, args, kwargs, leaves: list, trace) -> None:
        """One call: `leaves` are the tensors it returned, `trace` a `Trace`."""
        name, known, view, writes, causal = _facts(func)
        if not known:
            if func.namespace not in ("prim", "profiler"):  # questions and marks
                self.note(f"Not timed: {func.namespace}::{name}.", trace)
            return
        issued = self.issued(trace) if func.namespace != "bitsandbytes" else "bitsandbytes"
        if view:
            self.add(trace, issued, "view")
            return
        if name in ("bernoulli_", "div_"):  # CUDA's dropout draws and scales in its only kernel
            if name == "bernoulli_":
                self.masks.add(trace.ids[args[0].untyped_storage()._cdata])
            if self.is_mask(args[0], trace):
                return
        moved = count = 0
        shapes, even = set(), True
        inputs = [(arg, i < len(writes) and writes[i]) for i, arg in enumerate(args)]
        inputs += [(arg, False) for arg in kwargs.values()] if kwargs else []
        inputs += [(leaves, None)] if not any(writes) else []
        for value, writing in inputs:
            for t in (value,) if isinstance(value, torch.Tensor) else _tensors(value):
                mask = self.masks and self.is_mask(t, trace)
                n = t.numel() if mask else _size(t)  # a byte for each value on CUDA
                if name in ROWS_ONLY:
                    n = 2 * n if writing is None else 0
                moved += 2 * n if writing and name not in WRITES_ONLY else n
                count += 1
                if t.dim():
                    shapes.add((t.shape, t.dtype))
                    even = even and (t.is_contiguous() or _last(t))
        listed = name.startswith(("_foreach", "_fused_ada", "_fused_sgd"))
        # Vector loads need operands of one type and shape without gaps (CUDALoops.cuh).
        kind = "stream" if listed or even and len(shapes) < 2 else "scatter"
        if name == "index" and len(args[1]) == 1 and args[0].dim() > 1:  # whole rows
            kind = "stream"  # fast_gather_kernel_eligible in ATen/native/cuda/IndexKernelUtils.h
        kind = "norms" if name.startswith(NORMS) else kind
        work, flops = (), 0.0
        if name in PRODUCTS:
            tf32 = _asks_tf32()
            kind, work = "product", tuple(_products(name, args, leaves, tf32))
            flops = sum(2.0 * b * m * n * k for b, m, n, k, *_ in work)
        elif name.startswith("_scaled_dot_product"):
            back = name.endswith("backward")
            q, k, v = args[1:4] if back else args[:3]
            wide = q.shape[-1] * (3 if back else 1) + v.shape[-1] * (2 if back else 1)
            half = causal is not None and causal < len(args) and args[causal]
            flops = 2.0 * q.numel() // q.shape[-1] * k.shape[-2] * wide / (2 if half else 1)
            which = next((w for w in ("flash", "cudnn") if w in name), "efficient")
            kind, work = "attention", (flops, which, back, TYPES.get(q.dtype, "fp32"))
        elif name.startswith(UNKNOWN) and "norm" not in name:
            self.note(f"Of {name} only the bytes are timed.", trace)
        again = issued == "forward" and trace.phases[-1] == "backward"
        tensors = count if listed else 0
        if name in EXPERTS:
            self.note("Each expert is taken to have an equal share of the tokens.", trace)
            # One kernel does them all: _grouped_mm_cuda in ATen/native/cuda/GroupedBlas.cpp.
            at_once = trace.card.capability[0] in (9, 10) and work[0][4] == "bf16"
            if trace.fp16 or not at_once:
                return self.in_turn(trace, issued, work, moved, again)
        self.add(trace, issued, kind, work, moved, tensors, flops, again)

    def in_turn(self, trace, issued: str, work: tuple, moved: int, again: bool) -> None:
        """Experts one after another, once the host has asked for the number of their rows
        (_grouped_mm_fallback in aten/src/ATen/native/GroupedMMUtils.h, transformers' moe.py)."""
        self.wait(trace)
        for experts, *shape in work:
            part, flops = moved // (experts * len(work)), 2.0 * math.prod(shape[:3])
            for _ in range(experts):
                for _ in range(4):  # the rows' end, the rows, a matrix, the place of the result
                    self.add(trace, issued, "view")
                self.add(trace, issued, "product", ((1, *shape),), part, 0, flops, again)

    @staticmethod
    def issued(trace) -> str:
        """What the host pays for an operation now."""
        if trace.phases[-1] == "optimizer step":
            return "update"
        if not torch.is_grad_enabled():
            return "backward" if in_backward() else "no gradients"
        return "forward"  # a checkpointed layer too, which Python computes anew

    def wait(self, trace) -> None:
        """The host asks for a value. Adam's step counters are on the CPU: nobody waits for them."""
        if trace.phases[-1] != "optimizer step":
            self.add(trace, "forward", "wait")

    def copy(self, tensor, trace) -> None:
        """A tensor goes to the host's memory or comes back."""
        self.add(trace, self.issued(trace), "bus", (), _size(tensor))

    def unscale(self, gradients: int, trace) -> None:
        """A GradScaler reads and writes all gradients, then asks whether all are finite."""
        self.add(trace, "update", "stream", (), 2 * gradients)
        self.add(trace, "update", "wait")

    def note(self, text: str, trace) -> None:
        self.notes[text] = len(trace.phases) - 1

    def add(self, trace, issued: str, kind: str, *what) -> None:
        phase, event = len(trace.phases) - 1, len(trace.events)
        self.operations.append(Operation(phase, event, issued, kind, *what))

    def is_mask(self, t, trace) -> bool:
        return trace.ids.get(t.untyped_storage()._cdata) in self.masks


def _tensors(value) -> Iterable:
    """The tensors in a list or tuple of arguments."""
    if not isinstance(value, list | tuple):
        return ()
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
