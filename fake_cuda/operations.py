"""What each operation of a run asks of host and card: products, bytes, kernels, waits, copies."""

import math
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from .products import (
    EXPERTS,
    PRODUCTS,
    Attention,
    Product,
    at_once,
    attention,
    channels_last,
    products,
    size,
    texts_end_to_end,
)
from .wire import Wire

AS_THE_LONGEST = "Texts end to end whose lengths are not known are timed as if all had the longest."
EQUAL_SHARES = "Each expert is taken to have an equal share of the tokens."


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class Operation(NamedTuple):
    """What one call asks of host and card. `work`: what the time of its kernel depends on."""

    phase: int  # its place in `Trace.phases`
    event: int  # how many births and deaths had been seen when it ended
    issued: str  # what the host pays for: "forward", "backward", "update", ...
    kind: str  # "product", "attention", "stream", "scatter", "norms", "bus", "view" or "wait"
    work: tuple[Product, ...] | Attention = ()
    moved: int = 0  # bytes
    tensors: int = 0  # of a list operation
    flops: float = 0.0
    again: bool = False  # recomputed
    name: str = ""  # of the operation that has a kernel, such as "_softmax"

    def types(self) -> set[str]:
        """The types of its products."""
        return {self.work.type} if self.kind == "attention" else {p.type for p in self.work}


FREE = set("_unsafe_view empty empty_like empty_strided new_empty resize_ set_ lift_fresh".split())
WRITES_ONLY = set("zero_ fill_ copy_ normal_ uniform_ _foreach_zero_ _foreach_copy_".split())
ROWS_ONLY = set("embedding index_select gather index".split())  # read no more than they return
NORMS = ("native_layer_norm", "_fused_rms_norm", "native_group_norm", "native_batch_norm")
# Operations of whose arithmetic nothing is known here, by how their names begin.
UNKNOWN = tuple("linalg_ _linalg_ _cdist _trilinear _sparse_addmm _flash_ _efficient_".split())


class Facts(NamedTuple):
    """What an operation's name and schema say of every call."""

    name: str
    known: bool  # whether its time is predicted
    view: bool  # whether it has no kernel
    writes: tuple[bool, ...]  # by argument
    causal: int | None  # the place of the argument `is_causal`


@cache
def _facts(func) -> Facts:
    name, schema = func.overloadpacket.__name__, func._schema
    known = func.namespace in ("aten", "bitsandbytes", "fsdp", "torch_attn") or name in EXPERTS
    seen = [r.alias_info for r in schema.returns if r.alias_info]
    view = name in FREE or any(not alias.is_write for alias in seen)
    # A fused optimizer may write gradients, but does so only for a GradScaler's scale.
    names = [a.name for a in schema.arguments]
    written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    writes = tuple(a in written and a != "grads" for a in names)
    causal = names.index("is_causal") if "is_causal" in names else None
    return Facts(name, known, view, writes, causal)


def _listed(name: str) -> bool:
    """Whether an operation takes lists of tensors, as optimizers' do."""
    return name.startswith(("_foreach", "_fused_ada", "_fused_sgd"))


class Traffic(NamedTuple):
    """What an operation reads and writes."""

    moved: int  # bytes
    tensors: int
    alike: bool  # whether all have one shape and type, and no gaps


class Work:
    """The operations of a run, as the trace sees them."""

    def __init__(self):
        self.operations: list[Operation] = []
        self.compiled = False  # whether compiled code issues what comes now
        self.compiles = False  # whether torch.compile was asked for
        self.masks: set[int] = set()  # numbers of the storages that hold dropout's masks
        self.notes: dict[str, int] = {}  # what the times do not hold: where it was seen last
        self.wire = Wire()

    def see(self, func, args, kwargs, leaves: list, trace) -> None:
        """One call: `leaves` are the tensors it returned, `trace` a `Trace`."""
        if func.namespace == "_c10d_functional":  # as DTensor sends
            self.wire.see(func.__name__, args, leaves, len(trace.phases) - 1)
            return
        facts = _facts(func)
        if not facts.known:
            if func.namespace not in ("prim", "profiler"):  # questions and marks
                self.note(f"Not timed: {func.namespace}::{facts.name}.", trace)
            return
        issued = self.issued(trace) if func.namespace != "bitsandbytes" else "bitsandbytes"
        if facts.view:
            if not self.compiled:  # which makes its views and buffers by no operation
                self.add(trace, issued, "view")
        elif not self.of_a_mask(facts.name, args, trace):
            traffic = self.traffic(facts, args, kwargs, leaves, trace)
            self.kernel(facts, args, leaves, traffic, issued, trace)

    def of_a_mask(self, name: str, args, trace) -> bool:
        """Whether it only makes a mask: CUDA's dropout draws and scales in its only kernel."""
        if name == "bernoulli_":
            self.masks.add(trace.ids[args[0].untyped_storage()._cdata])
        return name in ("bernoulli_", "div_") and self.is_mask(args[0], trace)

    def traffic(self, facts: Facts, args, kwargs, leaves: list, trace) -> Traffic:
        """Arguments are read, and written where the schema says so; else results are written."""
        writes, only = facts.writes, facts.name in WRITES_ONLY
        moved = count = 0
        shapes, even = set(), True
        values = [(arg, i < len(writes) and writes[i]) for i, arg in enumerate(args)]
        values += [(arg, False) for arg in kwargs.values()] if kwargs else []
        values += [(leaves, None)] if not any(writes) else []  # None: a result
        for value, written in values:
            for t in (value,) if isinstance(value, torch.Tensor) else _tensors(value):
                mask = self.masks and self.is_mask(t, trace)
                n = t.numel() if mask else size(t)  # a byte for each value on CUDA
                if facts.name in ROWS_ONLY:
                    n = 2 * n if written is None else 0
                moved += 2 * n if written and not only else n
                count += 1
                if t.dim():
                    shapes.add((t.shape, t.dtype))
                    even = even and (t.is_contiguous() or channels_last(t))
        return Traffic(moved, count, even and len(shapes) < 2)

    def kernel(self, facts: Facts, args, leaves, traffic: Traffic, issued: str, trace) -> None:
        """What a call asks of the card."""
        name, work, flops = facts.name, (), 0.0
        listed = _listed(name)
        kind = _kind(name, args, listed or traffic.alike)
        if name in PRODUCTS:
            kind, work = "product", tuple(products(name, args, leaves))
            flops = sum(product.flops for product in work)
        elif name.startswith("_scaled_dot_product"):
            kind, work = "attention", attention(name, facts.causal, args)
            flops = work.flops
        elif name.startswith("_varlen_attn"):
            kind, (work, told) = "attention", texts_end_to_end(name, args)
            flops = work.flops
            if not told:
                self.note(AS_THE_LONGEST, trace)
        elif name.startswith(UNKNOWN) and "norm" not in name:
            self.note(f"Of {name} only the bytes are timed.", trace)
        again = issued == "forward" and trace.phases[-1] == "backward"
        if name in EXPERTS and len(args) > 2:  # else a batch of products of one size
            self.note(EQUAL_SHARES, trace)
            if trace.fp16 or not at_once(trace.card, args[0]):
                self.in_turn(trace, issued, work, traffic.moved, again, name)
                return
        tensors = traffic.tensors if listed else 0
        self.add(trace, issued, kind, work, traffic.moved, tensors, flops, again, name)

    def in_turn(
        self, trace, issued: str, work: tuple[Product, ...], moved: int, again: bool, name: str
    ) -> None:
        """Experts one after another, once the host has asked for the number of their rows.

        (_grouped_mm_fallback in aten/src/ATen/native/GroupedMMUtils.h, transformers' moe.py)

        Args:
            trace: the run.
            issued: what the host pays for an operation.
            work: the products of an operation, whose batch is the number of experts.
            moved: bytes that all of them read and write.
            again: whether a checkpointed layer computes them anew.
            name: of the operation.
        """
        self.wait(trace)
        for product in work:
            one, part = product._replace(batch=1), moved // (product.batch * len(work))  # bytes
            flops = 2.0 * math.prod(product[1:4])
            for _ in range(product.batch):
                for _ in range(4):  # the rows' end, the rows, a matrix, the place of the result
                    self.add(trace, issued, "view")
                self.add(trace, issued, "product", (one,), part, 0, flops, again, name)

    def issued(self, trace) -> str:
        """What the host pays for an operation now."""
        if self.compiled:
            return "compiled"
        if trace.phases[-1] == "optimizer step":
            return "update"
        if not torch.is_grad_enabled():
            return "backward" if in_backward() else "no gradients"
        return "forward"  # a checkpointed layer too, which Python computes anew

    def wait(self, trace) -> None:
        """The host asks for a value. Adam's step counters are on the CPU: nobody waits for them."""
        if trace.phases[-1] != "optimizer step":
            self.add(trace, "forward", "wait")
            trace.streams.host_waits()

    def copy(self, tensor, trace) -> None:
        """A tensor goes to the host's memory or comes back."""
        self.add(trace, self.issued(trace), "bus", (), size(tensor))

    def launch(self, kernel: str, moved: int, programs: int | None, trace) -> None:
        """A Triton kernel: what it does to its bytes is not known, so they alone are timed."""
        few = programs is not None and 0 < programs < trace.card.sms
        # Each multiprocessor has its share of the bandwidth: without a program it moves nothing.
        moved = moved * trace.card.sms // programs if few else moved
        self.add(trace, self.issued(trace), "stream", (), moved)
        self.note("Of Triton kernels only the bytes are timed.", trace)

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


def _kind(name: str, args, vector: bool) -> str:
    """How an operation moves its bytes. Vector loads need operands of one type and shape without
    gaps (CUDALoops.cuh)."""
    if name.startswith(NORMS):
        return "norms"
    # Whole rows: fast_gather_kernel_eligible in ATen/native/cuda/IndexKernelUtils.h.
    rows = name == "index" and len(args[1]) == 1 and args[0].dim() > 1
    return "stream" if vector or rows else "scatter"


def _tensors(value) -> Iterable:
    """The tensors in a list or tuple of arguments."""
    if not isinstance(value, list | tuple):
        return ()
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
