"""A CUDA card that is not there: torch answers as on one, and its tensors stay on the CPU.

    with pretended("T4"): ...          # helpers.device() is cuda, helpers.describe() a Tesla T4

What is real: the values, which the CPU computes; which tensor is on the card and which is not
(`.to("cuda")` and `device="cuda"` put it there, results follow their inputs, `.device` says so, and
an operation on tensors of both places fails as on a card, as does `.numpy()`); allocated bytes and
their peak; what the caching allocator holds for them, by the model in `fake_cuda`; a limit, and the
error of running out of memory; which flags, dtypes and features the libraries choose for the card.

What is not: time; CUDA's own kernels, their memory and their rounding (the CPU's run, which need
other scratch space); pinned memory, streams and graphs; compiled code, which is the CPU's and whose
tensors are counted only once they come out of it.
"""

import functools
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import pynvml
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fake_cuda import Allocator
from fake_cuda.scratch import workspace as workspace_bytes

GIB = 2**30
CONTEXT = 400 * 2**20
DRIVER_NAMES = {"T4": "Tesla T4", "H100": "NVIDIA H100 80GB HBM3"}
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
in_backward = torch._C._current_graph_task_id  # -1 outside of a backward pass
aten = torch.ops.aten
# Products of cuBLAS, which takes a workspace for the forward thread and one for the backward one.
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
# Operations that may read tensors of both places.
ACROSS = {aten.copy_.default, aten._to_copy.default, aten.index.Tensor, aten.index_put_.default}
ACROSS |= {aten.set_.source_Storage, aten._index_put_impl_.default, aten.index_put.default}


def is_cuda(place) -> bool:
    if isinstance(place, torch.device):
        return place.type == "cuda"
    return isinstance(place, str) and place.split(":")[0] == "cuda"


def is_cpu(place) -> bool:
    return place == CPU if isinstance(place, torch.device) else place == "cpu"


def on_the_cpu(value):
    return CPU if isinstance(value, torch.device | str) and is_cuda(value) else value


def tensors_in(values) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


class Card:
    """The memory of the card: which storages are on it, and what its allocator holds for them."""

    def __init__(self, name: str, free: float):
        from helpers import gpu

        self.facts = gpu(name)
        self.name = DRIVER_NAMES.get(name, name)
        self.total, self.taken = self.facts.memory, self.facts.memory - int(free * GIB)
        self.limit = 1.0
        self.places: dict[int, bool] = {}  # a storage's address: on the card, or known to be off it
        self.sizes: dict[int, int] = {}
        self.count = self.now = self.peak = self.peak_reserved = self.retries = 0
        self.where: dict[int, int] = {}  # a storage's address: its number in the allocator
        self.allocator = Allocator()
        self.calls: list[str] = []  # what was asked of the card: "empty_cache", ...
        self.inside_a_kernel = False
        self.workspaces: dict[bool, torch.Tensor] = {}  # of cuBLAS, until cleared

    # ------------------------------------------------------------------------------------ tensors
    def holds(self, tensor: torch.Tensor) -> bool | None:
        """Whether a tensor is on the card; None for one that nobody placed."""
        try:
            return self.places.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # sparse tensors and others without a storage
            return None

    def place(self, tensor: torch.Tensor, on_card: bool) -> None:
        if isinstance(tensor, FakeTensor) or tensor.device.type != "cpu":
            return
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return
        key = storage._cdata
        if key not in self.places:
            weakref.finalize(storage, self.died, key).atexit = False
        if on_card and key not in self.sizes:
            self.malloc(key, -(-storage.nbytes() // 512) * 512)
        elif not on_card and key in self.sizes:
            self.release(key)
        self.places[key] = on_card

    def malloc(self, key: int, size: int) -> None:
        room = min(self.limit * self.total, self.total - self.taken)
        for again in (False, True):
            self.count += 1
            if size:
                self.allocator.malloc(self.count, size)
            if self.allocator.reserved <= room:
                break
            self.allocator.release(self.count)
            self.allocator.empty_cache()
            if again:
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory. Tried to allocate {size / 2**20:.2f} MiB. GPU 0 has a "
                    f"total capacity of {self.total / GIB:.2f} GiB (a pretended card)"
                )
            self.retries += 1
        self.sizes[key], self.where[key] = size, self.count
        self.now += size
        self.peak = max(self.peak, self.now)
        self.peak_reserved = max(self.peak_reserved, self.allocator.reserved)

    def release(self, key: int) -> None:
        size, number = self.sizes.pop(key), self.where.pop(key)
        self.now -= size
        if size:
            self.allocator.release(number)

    def died(self, key: int) -> None:
        self.places.pop(key, None)
        if key in self.sizes:
            self.release(key)

    @contextmanager
    def kernel(self) -> Iterator[None]:
        """What happens inside of one kernel: its tensors are not seen."""
        before, self.inside_a_kernel = self.inside_a_kernel, True
        try:
            yield
        finally:
            self.inside_a_kernel = before

    # ------------------------------------------------------------------- what torch is asked for
    def empty_cache(self, *_) -> None:
        self.calls.append("empty_cache")
        self.allocator.empty_cache()

    def clear_workspaces(self) -> None:
        self.workspaces.clear()

    def reset_peak(self, *_) -> None:
        self.peak, self.peak_reserved = self.now, self.allocator.reserved

    def stats(self, *_, **__) -> dict[str, int]:
        counts = {"num_alloc_retries": self.retries, "num_ooms": 0}
        pairs = dict(allocated=(self.now, self.peak), active=(self.now, self.peak))
        pairs["reserved"] = (self.allocator.reserved, self.peak_reserved)
        for name, (current, peak) in pairs.items():
            counts |= {f"{name}_bytes.all.current": current, f"{name}_bytes.all.peak": peak}
        blocks = self.allocator.blocks.items()
        split = [
            size
            for at, (size, _, free) in blocks
            if free and (at in self.allocator.ends or at + size in self.allocator.blocks)
        ]
        return counts | {"inactive_split_bytes.all.current": sum(split)}

    def info(self, *_) -> tuple[int, int]:
        return self.total - self.taken - self.allocator.reserved, self.total

    def fraction(self, fraction: float, *_) -> None:
        if not isinstance(fraction, float):
            raise TypeError("Invalid type for fraction argument, must be `float`")
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        self.limit = fraction


class Attention(torch.autograd.Function):
    """Attention in one kernel: nothing of the size of its matrix is kept, nor seen in between."""

    @staticmethod
    def forward(ctx, card, options, q, k, v, mask):
        ctx.card, ctx.options, ctx.state = card, options, torch.get_rng_state()
        with card.kernel():
            out = F.scaled_dot_product_attention(q, k, v, mask, **options)
            rows = torch.empty(q.shape[:-1], dtype=torch.float32)
        for tensor in (out, rows):  # the kernel keeps one number a row
            card.place(tensor, True)
        ctx.save_for_backward(q, k, v, mask, out, rows)
        return out

    @staticmethod
    def backward(ctx, gradient):
        given, card = ctx.saved_tensors[:4], ctx.card
        with card.kernel(), torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.set_rng_state(ctx.state)
            inputs = [
                None if t is None else t.detach().requires_grad_(t.is_floating_point())
                for t in given
            ]
            out = F.scaled_dot_product_attention(*inputs, **ctx.options)
            wanted = [i for i, needed in enumerate(ctx.needs_input_grad[2:]) if needed]
            found = torch.autograd.grad(out, [inputs[i] for i in wanted], gradient)
        gradients = [None] * 4
        for i, one in zip(wanted, found, strict=True):
            card.place(one, True)
            gradients[i] = one
        return None, None, *gradients


def attention(
    card: Card,
    q,
    k,
    v,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
):
    """Attention by the kernel that the card would take: one, or plain matrices."""
    if torch.is_autocast_enabled():
        dtype = torch.get_autocast_dtype("cuda")
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
    flash = card.facts.capability >= (8, 0)
    asked = torch.backends.cuda
    grouped = enable_gqa and q.shape[-3] != k.shape[-3]
    half = q.dtype in (torch.float16, torch.bfloat16)
    by_flash = flash and half and attn_mask is None and asked.flash_sdp_enabled()
    efficient = asked.mem_efficient_sdp_enabled() and not grouped
    efficient = efficient and (flash or q.dtype != torch.bfloat16)
    if q.dim() != 4 or q.dtype == torch.float64 or not (by_flash or efficient):
        if not asked.math_sdp_enabled():
            raise RuntimeError("No available kernel. Aborting execution.")
        options = {"scale": scale, "enable_gqa": enable_gqa}
        plain = aten._scaled_dot_product_attention_math
        if is_causal:  # its own mask would be made beside the card
            shape = q.shape[-2], k.shape[-2]
            attn_mask, is_causal = torch.ones(shape, dtype=torch.bool, device=CPU).tril(), False
            card.place(attn_mask, True)
        return plain(q, k, v, attn_mask, dropout_p, is_causal, **options)[0]
    options = dict(dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    return Attention.apply(card, options, q, k, v, attn_mask)


class Follow(TorchDispatchMode):
    """Results of tensors on the card are on the card."""

    def __init__(self, card: Card):
        super().__init__()
        self.card = card

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not Pretend.on or self.card.inside_a_kernel:
            return out
        with torch._C.DisableTorchFunction():
            here, off = False, []
            for tensor in tensors_in((args, kwargs or {})):
                held = self.card.holds(tensor)
                here = here or held is True
                if held is not True and tensor.dim():
                    off.append((tensor, held))
            backward = in_backward() != -1
            if here and func in PRODUCTS and backward not in self.card.workspaces:
                workspace = torch.empty(
                    workspace_bytes(self.card.facts.capability), dtype=torch.uint8
                )
                self.card.workspaces[backward] = workspace
                self.card.place(workspace, True)
            if here and off and func not in ACROSS and not backward:
                if any(held is False for _, held in off):
                    raise RuntimeError(
                        "Expected all tensors to be on the same device, but found at least two "
                        f"devices, cuda:0 and cpu! (when checking arguments of {func})"
                    )
            for tensor in tensors_in(out if isinstance(out, list | tuple) else (out,)):
                # What compiled code makes in a backward pass joins the first tensor of the card.
                if here or (self.card.holds(tensor) is None and not backward):
                    self.card.place(tensor, here)
            if here and func not in ACROSS:
                for tensor, held in off:
                    if held is None:
                        self.card.place(tensor, True)
            if here and func is aten.bernoulli_.float:  # CUDA's dropout keeps a mask of bools
                key = out.untyped_storage()._cdata
                self.card.release(key)
                self.card.malloc(key, -(-out.numel() // 512) * 512)
        return out


class Pretend(TorchFunctionMode):
    """Where Python says cuda, C++ hears cpu; where it asks for a tensor's device, it hears cuda."""

    on = True  # off inside of a prediction, whose tensors are fake and nowhere

    def __init__(self, card: Card):
        super().__init__()
        self.card = card

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not Pretend.on or func in (torch.device, torch._C._nn._parse_to):
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention and args and self.card.holds(args[0]):
            return attention(self.card, *args, **kwargs)
        if func in QUESTIONS:
            held = not isinstance(args[0], FakeTensor) and self.card.holds(args[0])
            return QUESTIONS[func] if held else func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if first is not None and name in ("numpy", "__array__") and self.card.holds(first):
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the "
                "tensor to host memory first."
            )
        if name in ("histc", "one_hot") and first is not None and self.card.holds(first):
            return self.counted(func, first, *args[1:], **kwargs)
        wanted = self.asked(name, first, args, kwargs)
        if wanted is False and first is not None and self.card.holds(first):
            with self.card.kernel():  # the copy was never on the card
                return self.sent(name, func, args, kwargs, first, wanted)
        return self.sent(name, func, args, kwargs, first, wanted)

    def counted(self, func, values, *args, **kwargs):
        """Whole numbers counted: a CPU has no such histogram, and makes one_hot's zeros unseen."""
        with self.card.kernel():
            given = values.float() if func is torch.histc else values
            out = func(given, *args, **kwargs).to(values.dtype)
        self.card.place(out, True)
        return out

    def sent(self, name: str, func, args, kwargs, first, wanted: bool | None):
        """The result of a call, put where it is wanted."""
        if name in ("cuda", "cpu") and first is not None:
            out = first
        else:
            args = tuple(on_the_cpu(value) for value in args)
            kwargs = {key: on_the_cpu(value) for key, value in kwargs.items()}
            kwargs.pop("pin_memory", None)
            out = func(*args, **kwargs)
        if wanted is None:
            return out
        moves = first is not None and name in ("to", "cuda", "cpu", "type")
        for tensor in tensors_in(out if isinstance(out, list | tuple) else (out,)):
            if moves and bool(self.card.holds(first)) == wanted:
                continue  # it stands where it should, or was copied there
            if moves and self.card.holds(tensor) is self.card.holds(first) and same(tensor, first):
                tensor = out = tensor.clone(memory_format=torch.preserve_format)
            self.card.place(tensor, wanted)
        return out

    def asked(self, name: str, first, args, kwargs) -> bool | None:
        """Where the call puts its result: on the card, off it, or it does not say."""
        if name in ("cuda", "cpu") and first is not None:
            return name == "cuda"
        if name == "to" and len(args) > 1 and isinstance(args[1], torch.Tensor):
            return bool(self.card.holds(args[1]))
        for value in (*args[:3], kwargs.get("device")):
            if isinstance(value, torch.device | str):
                if is_cuda(value):
                    return True
                if is_cpu(value):
                    return False
        if name in ("tensor", "from_numpy", "as_tensor") and name != "to":
            source = args[0] if args else kwargs.get("data")
            return bool(isinstance(source, torch.Tensor) and self.card.holds(source))
        return None


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


QUESTIONS = {
    torch.Tensor.device.__get__: CUDA,
    torch.Tensor.is_cuda.__get__: True,
    torch.Tensor.is_cpu.__get__: False,
    torch.Tensor.get_device: 0,
}


class Stream:
    """A queue of work that is done at once."""

    def __init__(self, *_, **__):
        self.device, self.cuda_stream = CUDA, 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event=None):
        event = event or Event()
        event.record()
        return event

    def synchronize(self, *_):
        pass

    wait_event = wait_stream = synchronize


class Event:
    """A mark in that queue."""

    def __init__(self, *_, **__):
        self.at = 0.0

    def record(self, *_):
        self.at = time.perf_counter()

    def elapsed_time(self, other) -> float:
        return 1000 * (other.at - self.at)

    def synchronize(self, *_):
        pass

    wait = synchronize


def _patches(card: Card) -> Iterator[tuple]:
    """(owner, name, what answers there) of all that asks the driver or the allocator."""
    capability, nothing = card.facts.capability, lambda *_, **__: None
    properties = SimpleNamespace(
        name=card.name,
        major=capability[0],
        minor=capability[1],
        total_memory=card.total,
        multi_processor_count=card.facts.facts["sms"],
        L2_cache_size=4 * 2**20,
        shared_memory_per_block_optin=65536,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=1024,
        warp_size=32,
        gcnArchName="",
    )
    seed = torch.zeros(16, dtype=torch.uint8)
    cuda, accelerator = torch.cuda, torch.accelerator
    both = dict(
        is_available=lambda: True,
        device_count=lambda: 1,
        synchronize=nothing,
        empty_cache=card.empty_cache,
        reset_peak_memory_stats=card.reset_peak,
        current_stream=lambda *_: Stream(),
    )
    for name, answer in both.items():
        yield cuda, name, answer
        yield accelerator, name, answer
    for module in (cuda, cuda.memory, accelerator, accelerator.memory):
        yield module, "memory_stats", card.stats
    for name, answer in dict(Stream=Stream, Event=Event, stream=lambda stream: stream).items():
        yield cuda, name, answer
    yield cuda, "default_stream", lambda *_: Stream()
    yield torch.Tensor, "record_stream", nothing
    yield accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")
    yield accelerator, "current_device_index", lambda: 0
    yield accelerator, "set_device_index", nothing
    answers = dict(
        current_device=lambda: 0,
        get_device_properties=lambda _=None: properties,
        get_device_name=lambda _=None: card.name,
        get_device_capability=lambda _=None: capability,
        mem_get_info=card.info,
        device_memory_used=lambda _=None: card.allocator.reserved + CONTEXT,
        is_initialized=lambda: True,
        init=nothing,
        _lazy_init=nothing,
        set_device=nothing,
        manual_seed=nothing,
        manual_seed_all=nothing,
        get_rng_state=lambda *_: seed,
        set_rng_state=nothing,
        get_rng_state_all=lambda: [seed],
        set_rng_state_all=nothing,
        is_bf16_supported=lambda including_emulation=True: (
            including_emulation or capability >= (8, 0)
        ),
        is_current_stream_capturing=lambda: False,
        set_per_process_memory_fraction=card.fraction,
    )
    for name, answer in answers.items():
        yield cuda, name, answer
    yield cuda.random, "get_rng_state_all", answers["get_rng_state_all"]
    yield cuda.random, "set_rng_state_all", nothing
    yield cuda.memory, "_record_memory_history", nothing
    yield cuda.memory, "_dump_snapshot", nothing
    yield torch._C, "_cuda_clearCublasWorkspaces", card.clear_workspaces
    yield torch.version, "cuda", "13.0"
    yield pynvml, "nvmlInit", nothing
    yield pynvml, "nvmlDeviceGetCount", lambda: 1
    yield pynvml, "nvmlSystemGetDriverVersion", lambda: "580.65.06"
    yield torch.Tensor, "pin_memory", lambda tensor, *_: tensor

    import bitsandbytes.functional as pages  # whose managed memory is the host's, and CUDA's to ask

    def paged(*shape, dtype=torch.float32, **_):
        page = torch.empty(shape, dtype=dtype)
        page.is_paged = True
        return page

    yield pages, "get_paged", paged
    yield pages, "fill", lambda page, value, **_: page.fill_(value)
    yield pages, "prefetch_tensor", nothing

    begin = torch.utils.data.DataLoader.__init__

    def loader(self, *args, **options):
        begin(self, *args, **options | {"pin_memory": False})

    yield torch.utils.data.DataLoader, "__init__", loader

    start = torch.autocast.__init__

    def autocast(self, device_type, dtype=None, *args, **options):
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.float16
        start(self, device_type, dtype, *args, **options)

    yield torch.autocast, "__init__", autocast
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        ask = getattr(torch, name)
        yield torch, name, functools.partial(_of_cpu, ask)

    # A backward pass runs hooks, and with them recomputed layers, without any such mode.
    def pretending(hook):
        @functools.wraps(hook)
        def run(*args):
            if torch._C._len_torch_function_stack() or not Pretend.on:
                return hook(*args)
            with Pretend(card):
                return hook(*args)

        return run

    hooks = torch.autograd.graph.saved_tensors_hooks
    keep = hooks.__init__
    yield hooks, "__init__", lambda self, *two: keep(self, *map(pretending, two))
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        register = getattr(torch.Tensor, name)
        yield torch.Tensor, name, functools.partialmethod(_registered, register, pretending)

    import fake_cuda
    from fake_cuda import simulation
    from helpers import prediction

    simulate = simulation.simulate

    def nowhere(*args, **options):
        before, Pretend.on = Pretend.on, False
        try:
            return simulate(*args, **options)
        finally:
            Pretend.on = before

    for module in (simulation, prediction, fake_cuda):
        yield module, "simulate", nowhere

    from torch._dynamo import eval_frame

    compiled = eval_frame._TorchDynamoContext.__call__

    def call(self, fn):
        made = compiled(self, fn)
        if isinstance(fn, torch.nn.Module) or isinstance(fn, type):
            return made

        @functools.wraps(made)
        def outside(*args, **options):
            with torch._C.DisableTorchFunction():
                here = any(card.holds(t) for t in tensors_in((args, options)))
            with _no_modes():
                out = made(*args, **options)
            for tensor in tensors_in(out if isinstance(out, list | tuple) else (out,)):
                card.place(tensor, here)
            return out

        return outside

    yield eval_frame._TorchDynamoContext, "__call__", call


def _fresh(answer):
    """A function of its own for each name: the compiler keeps a table by function."""
    return lambda *args, **options: answer(*args, **options)


def _registered(tensor, register, pretending, hook):
    return register(tensor, pretending(hook))


def _of_cpu(ask, kind="cuda"):
    return ask("cpu" if kind == "cuda" else kind)


@contextmanager
def _no_modes() -> Iterator[None]:
    """Compiled code is traced without the modes that pretend."""
    modes = []
    while torch._C._len_torch_function_stack():
        modes.append(_pop_mode())
    try:
        with _disable_current_modes():
            yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


def _forget() -> None:
    """What libraries have found out about the machine, and would not ask again."""
    import accelerate.utils.imports
    import transformers.utils.import_utils

    for module in (accelerate.utils.imports, transformers.utils.import_utils):
        for found in list(vars(module).values()):
            if hasattr(found, "cache_clear"):
                found.cache_clear()


@contextmanager
def pretended(name: str, free: float = 6.0) -> Iterator[Card]:
    """This machine with a card of that name, of which `free` GiB are free, in this thread."""
    import bitsandbytes  # noqa: F401  which would look for CUDA's libraries

    card = Card(name, free)
    with ExitStack() as stack:
        for owner, attribute, answer in _patches(card):
            if isinstance(owner, ModuleType) and callable(answer) and not isinstance(answer, type):
                answer = _fresh(answer)
            stack.enter_context(patch.object(owner, attribute, answer, create=owner is torch._C))
        _forget()
        stack.callback(_forget)
        stack.enter_context(Follow(card))
        stack.enter_context(Pretend(card))
        yield card
