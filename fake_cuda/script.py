"""A training script that nobody changed, on a card that nobody has.

What the script puts on the card is fake. What it reads, draws and counts on the CPU is real and
keeps its values, except for parameters and large uninitialised tensors: a model may be larger than
this machine. Questions about the card are answered as on it. It stops after a few updates.

    Script("train.py", ["--batch", "8"])  # a run for `simulate`, or for `predict` of the course
    simulate_script("train.py", ["--batch", "8"], (8, 0)).peak_allocated
"""

import contextlib
import io
import logging
import math
import os
import sys
import traceback
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
import transformers
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from . import cost
from .sandbox import sandbox
from .simulation import MISTAKES, NO_VALUES, Simulation, simulate
from .trace import HOST, FakeTensor, Trace

CUDA, DEVICE = torch.device("cuda", 0), FakeTensor.device.fget
COMPILED = "torch.compile was run as eager code: compiled code plans its own memory and time."
SMALL = 2**12  # values: uninitialised tensors up to this size are real, they may be drawn into
SHOWN = 2**24  # values that come back from the card, all 1, where there are no more than these
SEVERAL = "asks for several processes, and one is predicted: run it with one"
OFFLINE = "ConnectionError ConnectError LocalEntryNotFoundError OfflineModeIsEnabled URLError"
OFFLINE = {*OFFLINE.split(), "gaierror", "HfHubHTTPError", "MaxRetryError"}
NOTHING = """init set_device manual_seed manual_seed_all seed seed_all set_rng_state
reset_peak_memory_stats set_rng_state_all ipc_collect set_per_process_memory_fraction
reset_max_memory_allocated
reset_max_memory_cached reset_accumulated_memory_stats set_stream _lazy_init set_sync_debug_mode"""


class Enough(BaseException):
    """The script has taken its updates."""


class Anything:
    """A stream, an event, a choice of device: whatever is asked of it is done already."""

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def __getattr__(self, name: str):
        return lambda *_, **__: self

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def elapsed_time(self, _) -> float:
        return 1.0


def _is_card(value) -> bool:
    if isinstance(value, str):
        return value == "cuda" or value.startswith("cuda:")
    return isinstance(value, torch.device) and value.type == "cuda"


class Where(TorchDispatchMode):
    """Keeps apart what is on the host, real or not, and what is on the card, which is fake."""

    def __init__(self, trace: Trace):
        super().__init__()
        self.trace = trace
        self.asked: bool | None = None  # whether what is made now goes to the card, where one said
        self.busy = False  # with an operation: torch itself may ask for devices, not the script
        self.around: tuple = ()  # arguments of the function that makes it: their place counts too

    def on_card(self, tensor) -> bool:
        if not isinstance(tensor, FakeTensor) or tensor.fake_device.type == "meta":
            return False
        try:
            number = self.trace.ids.get(tensor.untyped_storage()._cdata)
        except NotImplementedError:  # a sparse tensor
            return True
        return number is None or self.trace.kind[number] != HOST

    def any_on_card(self, *values) -> bool:
        return any(self.on_card(t) for t in tree_leaves(values) if isinstance(t, FakeTensor))

    @contextmanager
    def to(self, card: bool) -> Iterator[None]:
        before, self.asked = self.asked, card
        try:
            yield
        finally:
            self.asked = before

    def like(self, tensor, card: bool):
        """A fake tensor of the same shape, on the card or on the host."""
        with self.to(card), torch.no_grad():
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)

    @staticmethod
    def is_weight(func, args, kwargs) -> bool:
        """Whether it makes a large tensor without values, as layers do: nobody reads those."""
        name, kind = func.overloadpacket.__name__, kwargs.get("dtype") or torch.get_default_dtype()
        if name not in ("empty", "empty_strided") or str(kwargs.get("device")) == "meta":
            return False
        return kind.is_floating_point and math.prod(args[0]) > SMALL

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        fakes = [t for t in tensors if isinstance(t, FakeTensor)]
        card = self.asked
        if card is None:
            card = self.any_on_card(fakes) if tensors else self.any_on_card(self.around)
        if not (fakes or card or self.asked is False or self.is_weight(func, args, kwargs)):
            with _disable_current_modes():
                return func(*args, **kwargs)
        written = func._schema.is_mutable and args and isinstance(args[0], torch.Tensor)
        if written and fakes and not isinstance(args[0], FakeTensor):
            return args[0]  # values of the card are not known
        before, self.trace.on_host, self.busy = self.trace.on_host, not card, True
        try:
            return func(*args, **kwargs)
        finally:
            self.trace.on_host, self.busy = before, False

    def device(self, tensor) -> torch.device:
        """What a fake tensor says to a script, and what to torch."""
        asked_by_script = torch._C._len_torch_function_stack() and not self.busy
        return CUDA if asked_by_script and self.on_card(tensor) else DEVICE(tensor)


class Moves(TorchFunctionMode):
    """Reads "cuda" wherever a script says it, and says so where a tensor is asked."""

    def __init__(self, where: Where):
        super().__init__()
        self.where = where

    def upload(self, tensor):
        if not isinstance(tensor, torch.Tensor) or self.where.on_card(tensor) or tensor.is_meta:
            return tensor
        if isinstance(tensor, torch.nn.Parameter):  # an optimizer may have it already: it stays
            del self.where.trace.ids[tensor.untyped_storage()._cdata]
            self.where.trace.see(tensor, "parameters")
            return tensor
        if isinstance(tensor, FakeTensor) and tensor.requires_grad and torch.is_grad_enabled():
            with self.where.to(True):
                return tensor.clone()
        out = self.where.like(tensor, True).requires_grad_(tensor.requires_grad)
        self.where.trace.work.copy(out, self.where.trace)
        return out

    def download(self, tensor):
        if not self.where.on_card(tensor):
            return tensor
        trace, graph = self.where.trace, tensor.requires_grad and torch.is_grad_enabled()
        trace.work.copy(tensor, trace)
        if graph or tensor.numel() > SHOWN:
            with self.where.to(False):
                return tensor.clone() if graph else torch.empty_like(tensor)
        return self.ones(tensor)

    @staticmethod
    def ones(tensor):
        """Values stand in for those that nobody computed, as for `.item()`."""
        with _disable_current_modes():
            one = 0 if tensor.dtype == torch.bool else 1
            return torch.full(tensor.shape, one, dtype=tensor.dtype)

    def move(self, func, tensor, args, kwargs):
        name, args = func.__name__, list(args)
        if name == "cuda":
            return self.upload(tensor)
        if name == "cpu":
            return self.download(tensor)
        other = kwargs.get("other", args[0] if args else None)
        device = kwargs.pop("device", other)
        if args and device is args[0] and isinstance(device, str | torch.device | int | None):
            args.pop(0)
        if isinstance(device, torch.Tensor):  # its place and type
            args, kwargs, device = [device.dtype], {}, CUDA if self.where.on_card(device) else "cpu"
        if device is None or isinstance(device, torch.dtype):
            return func(tensor, *args, **kwargs)
        if str(device).startswith("meta"):
            return func(tensor, device, *args, **kwargs)
        card = _is_card(device) or isinstance(device, int)
        moved = self.upload if card else self.download
        plain = {k: v for k, v in kwargs.items() if k != "non_blocking" and v is not None}
        args = [a for a in args if isinstance(a, torch.dtype)]
        waits = card and not kwargs.get("non_blocking")  # then the host converts
        if not (args or plain):
            return moved(tensor)
        return moved(func(tensor, *args, **plain)) if waits else func(moved(tensor), *args, **plain)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, kwargs, where = getattr(func, "__name__", ""), dict(kwargs or {}), self.where
        first = args[0] if args else None
        if name == "_parse_to" or func is torch.device:  # where to go, in words
            return func(*args, **kwargs)
        if name == "__get__":
            name = func.__self__.__name__
            if name in ("is_cuda", "is_cpu") and where.on_card(first):
                return name == "is_cuda"
            return func(*args, **kwargs)
        if isinstance(first, torch.Tensor):
            if name in ("to", "cuda", "cpu"):
                return self.move(func, first, args[1:], kwargs)
            if name == "__set__" and func.__self__.__name__ == "data":
                if isinstance(first, FakeTensor) and not isinstance(args[1], FakeTensor):
                    args = (first, where.like(args[1], where.on_card(first)))
            if isinstance(first, FakeTensor):
                if name in ("numpy", "tolist", "__array__"):
                    where.trace.work.wait(where.trace)
                    return func(self.ones(first), *args[1:], **kwargs)
                if name == "__format__":
                    return format(first.item(), args[1]) if not first.dim() else str(first)
                if name in ("record_stream", "pin_memory"):
                    return first
                if name == "get_device":
                    return 0 if where.on_card(first) else -1
        device = kwargs.get("device")
        card = any(map(_is_card, (*args, *kwargs.values()))) or type(device) is int
        if card:
            args = tuple("cpu" if _is_card(a) else a for a in args)
            kwargs = {k: "cpu" if _is_card(v) else v for k, v in kwargs.items()}
            kwargs |= {"device": "cpu"} if type(device) is int else {}
        away = not card and device is not None and str(device) == "cpu" and where.any_on_card(args)
        around, where.around = where.around, () if away else (args, kwargs)
        try:
            with where.to(True if card else False if away else where.asked):
                out = func(*args, **kwargs)
            return tree_map(self.upload, out) if card else out
        finally:
            where.around = around


class Script:
    """A run for `simulate`: a script and its arguments, on a card with so many bytes of memory.

    Afterwards `note` says what was run otherwise than the script asks, and `printed` ends with the
    last lines that it printed.
    """

    def __init__(self, path: str, arguments: Sequence[str] = (), memory: int = 80 * 2**30):
        self.path, self.arguments = Path(path), [str(a) for a in arguments]
        self.memory, self.updates, self.taken = memory, 2, Counter()
        self.card, self.note, self.printed, self.output = "a card", "", "", io.StringIO()
        self.__name__ = self.path.name
        if not self.path.is_file():
            raise ValueError(f"{path} is not a file")

    @contextmanager
    def inside(self, trace: Trace) -> Iterator[None]:
        """What `simulate` puts around the run."""
        where, printed = Where(trace), self.output
        known, before = set(sys.modules), logging.root.manager.disable
        folder = str(self.path.resolve().parent)
        quiet = dict(HF_DEACTIVATE_ASYNC_LOAD="1", WANDB_MODE="disabled", TQDM_DISABLE="1")
        with ExitStack() as stack:
            stack.callback(_forget, known, folder)
            stack.callback(logging.disable, before)
            logging.disable(logging.CRITICAL)
            stack.enter_context(patch.dict(os.environ, quiet))
            stack.enter_context(patch.object(sys, "argv", [str(self.path), *self.arguments]))
            stack.enter_context(patch.object(sys, "path", [folder, *sys.path]))
            stack.enter_context(sandbox())
            stack.enter_context(contextlib.redirect_stdout(printed))
            stack.enter_context(contextlib.redirect_stderr(printed))
            stack.callback(lambda: setattr(self, "printed", printed.getvalue()[-4000:]))
            stack.enter_context(where)
            moves = stack.enter_context(Moves(where))
            _forget((), "")
            for owner, name, value in self.answers(trace, where, moves):
                stack.enter_context(patch.object(owner, name, value, create=True))
            yield

    def answers(self, trace: Trace, where: Where, moves: Moves) -> list[tuple]:
        """What is answered as on the card, left out, or not allowed: (owner, name, answer)."""
        cuda, capability, memory = torch.cuda, trace.card.capability, self.memory
        parameter, load = torch.nn.Parameter.__new__, torch.load

        def say(value):
            return lambda *_, **__: value

        def allocated(*_, **__):
            live = trace.ids.values()
            return sum(trace.size[i] for i in live if trace.kind[i] != HOST)

        def refuse(*_, **__):
            raise ValueError(f"{self.path} {SEVERAL}")

        def spawn(fn, args=(), nprocs=1, *_, **__):
            return fn(0, *args) if nprocs == 1 else refuse()

        def compiled(what=None, *_, **__):
            self.note = COMPILED
            return what if what is not None else (lambda function: function)

        def new(cls, data=None, requires_grad=True):
            if type(data) in (torch.Tensor, torch.nn.Parameter) and not data.is_meta:
                if not isinstance(data, FakeTensor):
                    data = where.like(data, False)
            return parameter(cls, data, requires_grad)

        def loaded(*args, map_location=None, **options):
            found = load(*args, map_location="cpu", **options)
            return tree_map(moves.upload, found) if _is_card(map_location) else found

        def save(_, file, *__, **___):
            if isinstance(file, str | os.PathLike):
                open(file, "wb").close()

        def backward(tensor, gradient=None, retain_graph=None, create_graph=False, inputs=None):
            torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)

        facts = dict(name=self.card, major=capability[0], minor=capability[1], is_integrated=False)
        facts |= dict(total_memory=memory, multi_processor_count=trace.card.sms, warp_size=32)
        free = lambda *_: (memory - allocated(), memory)  # noqa: E731
        answers = {name: say(None) for name in NOTHING.split()}
        answers |= dict(is_available=say(True), device_count=say(1), current_device=say(0))
        answers |= dict(is_current_stream_capturing=say(False), is_initialized=say(True))
        answers |= dict(get_device_name=say(self.card), get_device_capability=say(capability))
        answers |= dict(get_device_properties=say(types.SimpleNamespace(**facts)))
        answers |= dict(is_bf16_supported=lambda emulated=True: emulated or capability >= (8, 0))
        answers |= dict(mem_get_info=free, memory_stats=say({}), memory_summary=say(""))
        answers |= dict(current_stream=Anything, default_stream=Anything, stream=Anything)
        answers |= dict.fromkeys(("Stream", "Event", "device", "device_of"), Anything)
        answers |= dict(get_rng_state=lambda *_: torch.get_rng_state(), memory_snapshot=say([]))
        answers |= dict(get_rng_state_all=lambda: [torch.get_rng_state()], utilization=say(0))
        sizes = ("memory_allocated", "memory_reserved", "memory_cached")
        answers |= {most + n: allocated for n in sizes for most in ("", "max_")}
        found = [(cuda, name, value) for name, value in answers.items()]
        found += [(cuda.nvtx, name, say(0)) for name in ("range_push", "range_pop", "mark")]
        found += [(cuda.memory, n, say(None)) for n in ("_record_memory_history", "_dump_snapshot")]
        general = dict(is_available=say(True), current_accelerator=say(CUDA), device_count=say(1))
        general |= dict(synchronize=cuda.synchronize, current_device_index=say(0))
        general |= dict(current_stream=Anything, Stream=Anything, Event=Anything)
        general |= {most + n: allocated for n in sizes[:2] for most in ("", "max_")}
        found += [(torch.accelerator, name, value) for name, value in general.items()]
        several = torch.nn.DataParallel, torch.distributed, torch.multiprocessing
        return [
            *found,
            (torch, "compile", compiled),
            (torch.nn.Module, "compile", lambda module, *_, **__: compiled(module) and None),
            (torch.jit, "script", compiled),
            (torch, "load", loaded),
            (torch, "save", save),
            (torch.Tensor, "backward", backward),
            (FakeTensor, "device", property(where.device)),
            (torch.nn.Parameter, "__new__", new),
            (transformers.PreTrainedModel, "save_pretrained", say(None)),
            (several[0], "forward", lambda m, *a, **k: m.module(*tree_map(moves.upload, a), **k)),
            (several[1], "init_process_group", refuse),
            (several[2], "spawn", spawn),
            (several[2], "start_processes", refuse),
        ]

    def __call__(self):
        """Run it until each of its optimizers has taken two steps; its variables are returned."""
        self.taken.clear()

        def count(optimizer, *_):
            self.taken[id(optimizer)] += 1
            if min(self.taken.values()) >= self.updates:
                raise Enough

        main = types.ModuleType("__main__")
        main.__dict__.update(__file__=str(self.path), __builtins__=__builtins__)
        hook = register_optimizer_step_post_hook(count)
        try:
            with patch.dict(sys.modules, {"__main__": main}):
                exec(compile(self.path.read_bytes(), str(self.path), "exec"), main.__dict__)
        except Enough:
            pass
        except (Exception, SystemExit) as error:
            if any(text in str(error) for text in (NO_VALUES, SEVERAL, *MISTAKES)):
                raise
            if "DependentOutput" in type(error).__name__ or "DynamicOutput" in type(error).__name__:
                raise
            if not (isinstance(error, SystemExit) and self.taken):
                raise ValueError(self.why(error)) from error
        finally:
            hook.remove()
        if not self.taken:
            raise ValueError(f"{self.path} never updates a model: no optimizer took a step")
        return main

    def why(self, error: BaseException) -> str:
        """One sentence about a script that ended early."""
        chain, cause = [], error
        while cause is not None:
            chain.append(cause)
            cause = cause.__cause__ or cause.__context__
        said = " ".join(str(error).split())[:300]
        if isinstance(error, SystemExit):
            last = self.output.getvalue().strip().splitlines()[-1:] or [f"status {error.code}"]
            said = said if isinstance(error.code, str) else last[0][:300]
            return f"{self.path} ended before it took an update: {said}"
        names = {kind.__name__ for one in chain for kind in type(one).__mro__}
        words = " ".join(map(str, chain)).lower()
        if names & OFFLINE or "huggingface.co" in words or "hugging face hub" in words:
            return f"{self.path} needs a hub or another address, and none can be reached: {said}"
        if isinstance(error, KeyError) and error.args[0] in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            return f"{self.path} {SEVERAL}"
        if isinstance(error, ModuleNotFoundError):
            return f"{self.path} needs the module {error.name}, which is not installed"
        own = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(self.path)]
        line = f" in line {own[-1].lineno}" if own else ""
        return f"{self.path} fails by itself{line}: {type(error).__name__}: {said}"


def _forget(modules, folder: str) -> None:
    """What libraries remember of the machine, and the modules that lie beside a script."""
    libraries = (transformers.utils.import_utils, transformers.utils.generic)
    for function in (f for library in libraries for f in vars(library).values()):
        if hasattr(function, "cache_clear"):
            function.cache_clear()
    for name in set(sys.modules) - set(modules) if folder else ():
        if str(getattr(sys.modules[name], "__file__", "")).startswith(folder + os.sep):
            del sys.modules[name]


def simulate_script(
    path: str,
    arguments: Sequence[str] = (),
    card: cost.Card | tuple[int, int] = (8, 0),
    memory: int = 80 * 2**30,
    **speed,
) -> Simulation:
    """Memory and time of a training script on a card; ValueError says why it cannot be told."""
    script = Script(path, arguments, memory)
    if isinstance(card, cost.Card):
        script.card = card.name
        return simulate(script, card=card, **speed)
    return simulate(script, card, **speed)
