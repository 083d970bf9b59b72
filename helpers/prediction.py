"""Predict the peak memory of training on a GPU, on any machine and before anything runs.

The real training code runs on *fake* tensors, which have a shape and a type but no data. A dispatch
mode logs when each storage is born and when it dies; replayed through a model of CUDA's caching
allocator, the log gives the peak and what it is made of. Fake tensors claim to live on the CPU, so
the choices that CUDA makes differently are put in by hand (`cuda_choices`), each with its source.
"""

import bisect
import math
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import masking_utils, trainer
from transformers.training_args import OptimizerNames

from . import hardware
from .hardware import GPU, device, forget_libraries, supports, this_gpu
from .runs import CATEGORIES
from .workloads import Workload, check_settings

aten, MiB = torch.ops.aten, 2**20
in_backward = torch._C._current_graph_task_id  # -1 outside of a backward pass
# Half a GiB stands in for a CUDA context that nobody measured: the low end of the 0.5 to 2 GiB in
# Bekman, Machine Learning Engineering, "Anatomy of model's memory usage".
CONTEXT = 512 * MiB
HOST = "host"  # a storage in the CPU's memory: not one byte of the GPU's
BUILDING, EMPTY_CACHE = "building the model", "empty cache"


@dataclass
class Prediction:
    """What a run will need on `device` ("cpu", or a card's name). All sizes in bytes.

    `peak_allocated` is all tensors at the worst moment, `by_category` splits that moment, and
    `peak_by_category` holds each category's own maximum. `peak_reserved` is what the caching
    allocator takes for them; `context` what the driver adds, None where nobody measured it, and
    `used` the sum of both, as `nvidia-smi` shows it. On a CPU only the allocated bytes exist.
    """

    name: str
    workload: str
    device: str
    settings: dict
    peak_allocated: int
    by_category: dict[str, int]
    peak_by_category: dict[str, int]
    peak_reserved: int | None = None
    context: int | None = None
    capacity: int | None = None  # memory of the card
    seconds: float = 0.0  # that the prediction took
    note: str = ""
    # Each tensor's birth (number, bytes) and death (number, -bytes); (-1, 0): the cache is emptied.
    log: list[tuple[int, int]] = field(default_factory=list, repr=False)
    # The last step, to its end: bytes [events, categories] after each birth or death of a tensor,
    # and where each phase starts: (event, "forward" | "backward" | "optimizer step").
    timeline: np.ndarray = field(default=None, repr=False)
    phases: list[tuple[int, str]] = field(default_factory=list, repr=False)

    kind = "predicted"

    @property
    def used(self) -> int | None:
        return None if self.peak_reserved is None else self.peak_reserved + (self.context or 0)

    @property
    def fits(self) -> bool | None:
        """Whether it fits the card, with room for a CUDA context; None for a CPU."""
        room = CONTEXT if self.context is None else 0
        return None if self.capacity is None else self.used + room <= self.capacity


class Trace(TorchDispatchMode):
    """Logs the birth and death of every tensor storage, and what each is for."""

    def __init__(self, cuda: bool):
        super().__init__()
        self.cuda = cuda
        self.ids: dict[int, int] = {}  # a storage's address -> its number
        self.size: list[int] = []
        self.kind: list[str | None] = []
        self.born: list[int] = []  # the number of the phase in which a storage is born
        self.phases = [BUILDING]
        # i: storage i is born, ~i: it dies; text: a phase begins, or the cache is emptied.
        self.events: list[int | str] = []

    def empty_cache(self, *_) -> None:
        self.events.append(EMPTY_CACHE)

    def phase(self, name: str) -> None:
        if self.phases[-1] != name:
            self.phases.append(name)
            self.events.append(name)

    def see(self, tensor, kind: str | None = None) -> None:
        if not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        i = self.ids.get(key)
        if i is None:
            i = self.ids[key] = len(self.size)
            self.size.append(storage.nbytes())
            self.born.append(len(self.phases) - 1)
            self.events.append(i)
            # Born in backward with gradients on: a checkpointed layer is being recomputed.
            recomputed = in_backward() != -1 and torch.is_grad_enabled()
            self.kind.append("activations" if recomputed else None)
            weakref.finalize(storage, self.died, i, key)
        self.kind[i] = kind or self.kind[i]

    def died(self, i: int, key: int) -> None:
        self.ids.pop(key, None)
        self.events.append(~i)
        if self.kind[i] is None:  # what outlives its forward pass is an activation
            left = self.born[i] < len(self.phases) - 1
            kept = left and self.phases[self.born[i]] == "forward"
            self.kind[i] = "activations" if kept else "temporaries"

    def so_far(self) -> tuple[list[int | str], list[str]]:
        """The events until now, and the category of each storage."""
        # Scales of quantized weights stand since before the first forward pass; so do some scalars.
        stays = [
            "parameters" if phase == 0 and n > 8 else "temporaries"
            for phase, n in zip(self.born, self.size, strict=True)
        ]
        kinds = [kind or stay for kind, stay in zip(self.kind, stays, strict=True)]
        return list(self.events), kinds

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten._local_scalar_dense.default:
            # .item() and bool(): a fake tensor has no value. False keeps padding masks in place.
            return {torch.bool: False}.get(
                args[0].dtype, args[0].dtype.is_floating_point + 0.0 or 1
            )
        if in_backward() != -1:
            self.phase("backward")
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            self.see(tensor)
        if self.cuda and func is aten.bernoulli_.float:
            # The CPU's dropout keeps a mask in the input's type, CUDA's fused kernel a bool mask
            # (aten/src/ATen/native/cuda/Dropout.cu).
            self.size[self.ids[out.untyped_storage()._cdata]] = out.numel()
        return out

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Label parameters, gradients and optimizer states, and mark the phases of each step."""
        known = weakref.WeakSet()

        def enter(module, _):
            if in_backward() == -1:
                self.phase("forward")
            if module not in known:
                known.update(module.modules())
                for tensor in (*module.parameters(), *module.buffers()):
                    self.see(tensor, "parameters")

        def before(optimizer, *_):
            self.phase("optimizer step")
            for parameter in (p for g in optimizer.param_groups for p in g["params"]):
                if parameter.grad is not None:
                    self.see(parameter.grad, "gradients")

        def after(optimizer, *_):
            # bitsandbytes pages states of 100,000 values and more (optim/optimizer.py).
            paged = getattr(optimizer, "is_paged", False)
            leaves = [leaf for state in optimizer.state.values() for leaf in tree_leaves(state)]
            # GaLore and APOLLO keep their projections in objects of their own.
            leaves += [inner for leaf in leaves for inner in getattr(leaf, "__dict__", {}).values()]
            for tensor in leaves:
                big = paged and isinstance(tensor, torch.Tensor) and tensor.numel() >= 100_000
                self.see(tensor, HOST if big and self.cuda else "optimizer states")
            self.phase("between steps")

        hooks = [
            modules.register_module_forward_pre_hook(enter),
            optimizers.register_optimizer_step_pre_hook(before),
            optimizers.register_optimizer_step_post_hook(after),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


# ------------------------------------------------------------------------------ what CUDA does else
def _attention(flash: bool) -> Callable:
    """`scaled_dot_product_attention` with the kernel that CUDA picks, by its memory.

    Flash needs 16 bits, no mask and heads up to 256; memory-efficient takes the rest, except
    grouped heads; those fall back to plain matrices (aten/.../transformers/cuda/sdp_utils.cpp).
    The kernels' shape functions and gradient formulas are part of every build of torch.
    """

    def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **options):
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
            if attn_mask is not None and attn_mask.is_floating_point():
                attn_mask = attn_mask.to(dtype)
        half = q.dtype in (torch.float16, torch.bfloat16)
        if flash and half and attn_mask is None and q.shape[-1] <= 256:
            kernel = aten._scaled_dot_product_flash_attention
            return kernel(q, k, v, dropout_p, is_causal, scale=scale)[0]
        if options.get("enable_gqa") and q.shape[-3] != k.shape[-3]:
            plain = aten._scaled_dot_product_attention_math
            return plain(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True)[0]
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                zeros = torch.zeros_like(attn_mask, dtype=q.dtype)
                attn_mask = zeros.masked_fill_(~attn_mask, -math.inf)
            attn_mask = attn_mask.expand(*q.shape[:3], k.shape[2])
        kernel = aten._scaled_dot_product_efficient_attention
        return kernel(q, k, v, attn_mask, True, dropout_p, is_causal, scale=scale)[0]

    return attention


# Operations that CUDA's autocast runs in float32 and the CPU's does not (torch.amp documentation,
# "CUDA Ops that can autocast to float32"). Both keep a cache of the weights in 16 bits.
FLOAT32 = (
    "softmax.int log_softmax.int layer_norm rms_norm group_norm pow.Tensor_Scalar "
    "pow.Tensor_Tensor exp log rsqrt reciprocal softplus cumsum sum sum.dim_IntList"
)


def _in_float32(op) -> Callable:
    off = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    half = (torch.float16, torch.bfloat16)

    def run(*args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(off):
            if kwargs.get("dtype") is None:
                args = [a.float() if getattr(a, "dtype", None) in half else a for a in args]
            return op(*args, **kwargs)

    return run


@contextmanager
def cuda_choices(trace: Trace, flash: bool) -> Iterator[None]:
    """Make fake CPU tensors take CUDA's way: attention, autocast, optimizers, host copies."""
    library = torch.library.Library("aten", "IMPL")
    for name in FLOAT32.split():
        packet, _, overload = name.partition(".")
        op = getattr(getattr(aten, packet), overload or "default")
        library.impl(name, _in_float32(op), "AutocastCPU")
    saved = torch.autograd.graph

    def to_host(tensor):
        copy = torch.empty_like(tensor)
        trace.see(copy, HOST)
        return copy

    def save_on_cpu(self, *_, **__):  # what comes back from the host is a new tensor on the GPU
        saved.saved_tensors_hooks.__init__(self, to_host, torch.empty_like)

    # Optimizers update all parameters at once (foreach) by default on CUDA, never on a CPU.
    optimizers._foreach_supported_types.append(FakeTensor)
    try:
        with (
            patch.object(F, "scaled_dot_product_attention", _attention(flash)),
            patch.object(optimizers, "_get_foreach_kernels_supported_devices", lambda: ["cpu"]),
            patch.object(saved.save_on_cpu, "__init__", save_on_cpu),
            patch.object(trainer, "clear_device_cache", trace.empty_cache),
            patch.object(torch.cuda, "empty_cache", trace.empty_cache),
            patch.object(torch.accelerator, "empty_cache", trace.empty_cache),
        ):
            yield
    finally:
        optimizers._foreach_supported_types.remove(FakeTensor)
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


@contextmanager
def _bitsandbytes(cuda: bool) -> Iterator[None]:
    """Quantized layers on fake tensors. Their kernels run as the Python that defines them, so
    that a weight expanded for a product is seen (bitsandbytes/backends/default/ops.py)."""
    if "bitsandbytes" not in sys.modules:
        yield
        return
    import bitsandbytes
    from bitsandbytes.autograd import _functions
    from bitsandbytes.backends.default import ops

    library, tables = torch.ops.bitsandbytes, bitsandbytes.functional

    def multiply_8bit(A, B, rows, columns, bias=None, dtype=None):  # backends/cuda/ops.py
        product = library.int8_linear_matmul.default(A, B)
        return library.int8_mm_dequant.default(product, rows, columns, bias=bias).to(dtype)

    with ExitStack() as stack:

        def put(owner, name, value):
            stack.enter_context(patch.object(owner, name, value))

        for kind in (bitsandbytes.nn.Params4bit, bitsandbytes.nn.Int8Params):
            put(kind, "__new__", _quantized(kind))
        put(library.gemm_4bit, "default", ops._gemm_4bit_default_impl)
        # The table of 256 values, which each optimizer makes anew, one value after another.
        put(tables, "create_dynamic_map", lambda *_, **__: torch.empty(256))
        stack.enter_context(patch.dict(tables.name2qmap, clear=True))
        if cuda:
            put(library.int8_scaled_mm, "default", multiply_8bit)
            put(_functions, "MatMul8bitFp", _functions.MatMul8bitLt)
        yield


class Allocator:
    """torch's CUDACachingAllocator with default settings (c10/cuda/CUDACachingAllocator.cpp).

    Sizes are rounded up to 512 bytes and cut from segments of 2 MiB (up to 1 MiB) or 20 MiB, from
    10 MiB on from segments of their own, rounded to 2 MiB: best fit, split, merge. A segment goes
    back to the driver only by `empty_cache`, and only if no block of it is in use.
    """

    def __init__(self):
        self.blocks: dict[int, tuple[int, bool, bool]] = {}  # address: (size, small, is_free)
        self.ends: dict[int, int] = {}  # where a block ends: its address
        self.free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # (size, address)
        self.where: dict[int, int] = {}  # a tensor's number: its address
        self.reserved = self.peak = self.top = 0

    def step(self, i: int, size: int) -> None:
        """One entry of `Prediction.log`."""
        if size > 0:
            self.malloc(i, size)
        elif size < 0:
            self.release(i)
        else:
            self.empty_cache()

    def malloc(self, i: int, size: int) -> None:
        size = max(512, -(-size // 512) * 512)
        small = size <= MiB
        pool = self.free[small]
        k = bisect.bisect_left(pool, (size, 0))
        if k < len(pool):
            address = pool[k][1]
            block = self.take(address)
        else:
            own = -(-size // (2 * MiB)) * 2 * MiB
            block = 2 * MiB if small else own if size >= 10 * MiB else 20 * MiB
            # The gap keeps blocks of two segments from being neighbours.
            address, self.top = self.top, self.top + block + 2 * MiB
            self.reserved += block
            self.peak = max(self.peak, self.reserved)
        if block - size >= (512 if small else MiB + 1):
            self.put(address + size, block - size, small, True)
            block = size
        self.put(address, block, small, False)
        self.where[i] = address

    def release(self, i: int) -> None:
        address = self.where.pop(i)
        small, size = self.blocks[address][1], self.take(address)
        for near in (address + size, self.ends.get(address)):
            if near in self.blocks and self.blocks[near][2]:
                size += self.take(near)
                address = min(address, near)
        self.put(address, size, small, True)

    def empty_cache(self) -> None:
        for size, address in [*self.free[True], *self.free[False]]:
            if address not in self.ends and address + size not in self.blocks:  # a whole segment
                self.reserved -= self.take(address)

    def put(self, address: int, size: int, small: bool, is_free: bool) -> None:
        self.blocks[address] = size, small, is_free
        self.ends[address + size] = address
        if is_free:
            bisect.insort(self.free[small], (size, address))

    def take(self, address: int) -> int:
        size, small, is_free = self.blocks.pop(address)
        del self.ends[address + size]
        if is_free:
            self.free[small].remove((size, address))
        return size


# --------------------------------------------------------------------------------------- predict
REFUSED = {  # settings by how their names begin
    "torch_compile": "compiled code plans its own memory",
    "use_liger_kernel": "Triton kernels cannot run on fake tensors",
    "deepspeed": "its kernels cannot run on fake tensors",
    "fsdp": "one process is predicted, not several",
}
REFUSED_OPTIMIZERS = dict.fromkeys(("adamw_torch_8bit", "adamw_torch_4bit"), "it is compiled")
REFUSED_OPTIMIZERS["grokadamw"] = "it keeps states on the host, out of sight"
# What has no bearing on the peak of a step, or would read real data, is replaced.
TWO_STEPS = dict(use_cpu=True, max_steps=2, save_strategy="no", eval_strategy="no")
TWO_STEPS |= dict(load_best_model_at_end=False, eval_on_start=False, auto_find_batch_size=False)
TWO_STEPS |= dict(dataloader_num_workers=0, dataloader_prefetch_factor=None)
TWO_STEPS |= dict(dataloader_persistent_workers=False, dataloader_pin_memory=False)
TWO_STEPS |= dict(dataloader_multiprocessing_context=None)


class _Samples(torch.utils.data.IterableDataset):
    def __init__(self, workload: Workload):
        self.workload = workload

    def __iter__(self):
        while True:
            yield self.workload.sample()


def predict(
    workload: Workload | Callable,
    name: str | None = None,
    *,
    gpu: str = "here",
    optimizer: Callable | None = None,
    **settings,
) -> Prediction:
    """Predict the peak memory of `train(workload, ...)` with the same keywords, without running it.

    `gpu` is a card of `data/gpus.csv`, "cpu", or "here". Instead of a workload any function will do
    that builds its model, takes two optimizer steps on the CPU and returns nothing. fp16 is
    predicted as bf16 (the same bytes), tf32 as fp32. ValueError for an unknown or refused setting.
    """
    card = _card(gpu)
    is_workload = isinstance(workload, Workload)
    if not is_workload and (settings or optimizer):
        raise ValueError("a function of your own takes no settings: put them inside of it")
    arguments, note = _fake_arguments(settings, optimizer, card) if is_workload else ({}, "")

    def run():
        if not is_workload:
            return workload()
        run = workload.trainer(optimizer, False, _Samples(workload), **arguments)
        run.train()
        return run  # its tensors live on until the log is closed

    began, trace = time.perf_counter(), Trace(cuda=card is not None)
    flash = card is not None and supports("flash_attention", card)
    choices = cuda_choices(trace, flash) if card else nullcontext()
    forget_libraries()
    try:
        with (
            warnings.catch_warnings(action="ignore"),  # of libraries that look for tensors' data
            patch.object(torch.nn.Module, "_apply", _apply),
            # Position ids without values look like several sequences packed in one, with a mask.
            patch.object(masking_utils, "find_packed_sequence_indices", lambda position_ids: None),
            _bitsandbytes(card is not None),
            FakeTensorMode(),
            trace,
            trace.watch(),
            choices,
        ):
            kept = run()
            events, kinds = trace.so_far()  # what dies after this line is not part of the run
    except (AssertionError, RuntimeError) as error:
        if "convert all Tensors to FakeTensors" in str(error):
            raise ValueError(
                "the function uses a tensor or model made outside of it: build them inside"
            ) from error
        raise
    finally:
        forget_libraries()
    title = workload.title if is_workload else getattr(workload, "__name__", "function")
    prediction = Prediction(
        name=name or title,
        workload=title,
        device=card.name if card else "cpu",
        settings=settings | ({"optimizer": optimizer} if optimizer else {}),
        context=card.context if card else None,
        capacity=card.memory if card else None,
        note=note,
        **_replay(events, kinds, trace.size, card),
    )
    del kept
    prediction.seconds = time.perf_counter() - began
    return prediction


def _card(name: str) -> GPU | None:
    if name == "here":
        return this_gpu() if device().type == "cuda" else None
    return None if name == "cpu" else hardware.gpu(name)


def _fake_arguments(settings: dict, optimizer, card: GPU | None) -> tuple[dict, str]:
    """The settings for the run on fake tensors, and a note where they stand for something else."""
    check_settings(settings, optimizer, on_cpu=card is None)
    for key, value in settings.items():
        why = next((why for name, why in REFUSED.items() if value and key.startswith(name)), "")
        if key == "optim" and OptimizerNames(value).value in REFUSED_OPTIMIZERS:
            why = REFUSED_OPTIMIZERS[OptimizerNames(value).value]
        if why:
            raise ValueError(f"{key} cannot be predicted: {why}; measure it with train")
    arguments, note = dict(settings), ""
    if card is not None:
        if arguments.get("bf16") and not supports("bf16", card):
            capability = ".".join(map(str, card.capability))
            note = f"bf16 is emulated on compute capability {capability}: right, but slow"
        arguments["bf16"] = bool(arguments.pop("fp16", False) or arguments.get("bf16"))
        arguments.pop("tf32", None)
    # Two micro-batches reach the peak of any number: gradients stand while activations grow.
    accumulation = min(2, arguments.get("gradient_accumulation_steps", 1))
    return arguments | TWO_STEPS | {"gradient_accumulation_steps": accumulation}, note


def _workspace(card: GPU) -> int:
    """cuBLAS takes one workspace a thread, forward and backward: 8 MiB and a bit, 32 on Hopper and
    later (aten/src/ATen/cuda/CublasHandlePool.cpp)."""
    return 2 * (32 * MiB if card.capability >= (9, 0) else 8519680)


def _replay(events: list, kinds: list[str], sizes: list[int], card: GPU | None) -> dict:
    """The peaks, the log and the timeline of what a trace saw."""
    start = events.index("forward") if "forward" in events else 0
    dead = {~e for e in events[:start] if e in range(-len(kinds), 0)}  # building is not the run
    log, phases, unit = [], [], 512 if card else 1
    if card:
        log.append((len(kinds), _workspace(card)))
        kinds.append("temporaries")
    for at, event in enumerate(events):
        if event == EMPTY_CACHE:
            log.append((-1, 0))
        elif isinstance(event, str):
            phases.append((len(log) + 1, event))
        else:
            i, sign = (event, 1) if event >= 0 else (~event, -1)
            if sizes[i] and kinds[i] != HOST and (at >= start or i not in dead):
                log.append((i, sign * sizes[i]))
    column = {category: k for k, category in enumerate(CATEGORIES)}
    change, allocator = np.zeros((len(log) + 1, len(CATEGORIES)), dtype=np.int64), Allocator()
    for at, (i, size) in enumerate(log, start=1):
        if size:
            change[at, column[kinds[i]]] = math.copysign(-(-abs(size) // unit) * unit, size)
        if card:
            allocator.step(i, size)
    bytes_now = change.cumsum(axis=0)
    top = int(bytes_now.sum(axis=1).argmax())
    ends = [k for k, (_, name) in enumerate(phases) if name == "between steps"]
    first, last = (ends[-2] + 1, ends[-1]) if len(ends) > 1 else (0, len(phases) - 1)
    begin = phases[first][0] if phases else 0
    return {
        "peak_allocated": int(bytes_now[top].sum()),
        "by_category": dict(zip(CATEGORIES, bytes_now[top].tolist(), strict=True)),
        "peak_by_category": dict(zip(CATEGORIES, bytes_now.max(axis=0).tolist(), strict=True)),
        "peak_reserved": allocator.peak if card else None,
        "log": log,
        "timeline": bytes_now[begin:].copy(),
        "phases": [(at - begin, name) for at, name in phases[first:last]],
    }
