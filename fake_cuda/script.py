"""A training script that nobody changed, on a card that nobody has.

What the script puts on the card is fake. What it reads, draws and counts on the CPU is real and
keeps its values, except for parameters and large uninitialised tensors: a model may be larger than
this machine. Questions about the card are answered as on it. It stops after a few updates, which an
optimizer takes or the script itself, by writing weights after a backward pass.

    script = Script("train.py", ["--batch", "8"])
    simulate(script, (8, 0)).peak_allocated, script.printed
"""

import inspect
import io
import itertools
import logging
import math
import os
import sys
import traceback
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import numpy as np
import safetensors.torch
import torch
import transformers
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from .allocator import Allocator
from .operations import in_backward
from .sandbox import sandbox
from .simulation import MISTAKES, NO_VALUES
from .trace import EMPTY_CACHE, HOST, FakeTensor, Trace

CUDA, CPU, DEVICE = torch.device("cuda", 0), torch.device("cpu"), FakeTensor.device.fget
UPDATES = 2  # with the second, gradients and states stand as in all that follow
SMALL = 2**12  # values: uninitialised tensors up to this size are real, they may be drawn into
SHOWN = 2**24  # values that come back from the card, all 1, where there are no more than these
COMPILED = "torch.compile was run as eager code: compiled code plans its own memory and time."
ONE_UPDATE = "It took one update only: from the second on, an optimizer's states stand all along."
BY_HAND = "No optimizer took a step: weights written after a backward pass are its updates."
SEVERAL = "asks for several processes, and one is predicted: run it with one"
NEVER = "never updates a model: no weight was written, no optimizer took a step"
PASSES = 1000
SAVE_FILE = safetensors.torch.save_file  # whose tensors are read where they lie
EMPTY_FILE = (lambda tensors, filename, metadata=None: open(filename, "wb").close()).__code__
COUNTERS = dict(memory_allocated="allocated", max_memory_allocated="most")
COUNTERS |= dict(memory_reserved="reserved", max_memory_reserved="peak")
QUIET = dict(HF_DEACTIVATE_ASYNC_LOAD="1", WANDB_MODE="disabled", TQDM_DISABLE="1")
OFFLINE = "ConnectionError|ConnectError|LocalEntryNotFound|OfflineModeIsEnabled|URLError|gaierror"
OFFLINE += "|HfHubHTTPError|MaxRetryError|connect to 'https|Face Hub|urlopen"


class Stop(BaseException):
    """The script has taken its updates; or, with a text, may not go on."""


class Anything(nullcontext):
    """A stream, an event, a choice of device: whatever is asked of it is done already."""

    def __init__(self, *_, **__):
        super().__init__(self)

    def is_capturing(self) -> bool:
        return False

    def __getattr__(self, name: str):
        return lambda *_, **__: 1.0


def _is_card(value) -> bool:
    return isinstance(value, str | torch.device) and str(value).split(":")[0] == "cuda"


def _number(value):
    """A device may be a number, which without a card is none."""
    return CUDA if type(value) is int else value


class Memory(Allocator):
    """torch's counters: the allocator's model, fed with what happened so far."""

    def __init__(self, trace: Trace):
        super().__init__()
        self.trace, self.seen, self.most = trace, 0, 0

    def now(self, anew: bool = False) -> "Memory":
        """`anew`: from here on peaks are those to come."""
        for event in self.trace.events[self.seen :]:
            if event == EMPTY_CACHE:
                self.empty_cache()
            elif isinstance(event, int) and ~event in self.where:
                self.release(~event)
            elif isinstance(event, int) and event >= 0 and self.trace.kind[event] != HOST:
                self.malloc(event, self.trace.size[event])
                self.most = max(self.most, self.allocated)
        self.seen = len(self.trace.events)
        if anew:
            self.most, self.peak = self.allocated, self.reserved
        return self


class Where(TorchDispatchMode):
    """Keeps apart what is on the host, real or not, and what is on the card, which is fake."""

    def __init__(self, trace: Trace, taken: Counter):
        super().__init__()
        self.trace, self.taken, self.by_hand = trace, taken, 0  # steps of optimizers; without one
        self.asked: bool | None = None  # whether what is made now goes to the card, where one said
        self.around: tuple = ()  # arguments of the function that makes it: their place counts too
        self.busy = False  # with an operation: torch itself may ask for devices, not the script

    def on_card(self, *values) -> bool:
        """Whether one of these tensors is on the card."""
        for tensor in tree_leaves(values):
            if isinstance(tensor, FakeTensor) and tensor.fake_device.type != "meta":
                if tensor.layout != torch.strided:
                    return True
                number = self.trace.ids.get(tensor.untyped_storage()._cdata)
                if number is None or self.trace.kind[number] != HOST:
                    return True
        return False

    @contextmanager
    def to(self, card: bool | None, around: tuple = ()) -> Iterator[None]:
        before = self.asked, self.around
        self.asked, self.around = card, around
        try:
            yield
        finally:
            self.asked, self.around = before

    def like(self, tensor, card: bool):
        """A fake tensor of the same shape, on the card or on the host."""
        with self.to(card), torch.no_grad():
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, card, trace = kwargs or {}, self.asked, self.trace
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        fakes = [t for t in tensors if isinstance(t, FakeTensor)]
        if card is None:
            card = self.on_card(fakes if tensors else self.around)
        if not (fakes or card or self.asked is False or _is_weight(func, args, **kwargs)):
            with _disable_current_modes():
                return func(*args, **kwargs)
        written = args[0] if args and func._schema.is_mutable else None
        if fakes and isinstance(written, torch.Tensor) and not isinstance(written, FakeTensor):
            return written  # values of the card are not known
        if trace.phases[-1] == "backward" and not (self.taken or in_backward()):
            leaves = [t for t in tree_leaves(written) if isinstance(t, FakeTensor)]
            ids = [trace.ids.get(t.untyped_storage()._cdata) for t in leaves]
            if any(i is not None and trace.kind[i] == "parameters" for i in ids):
                if self.by_hand == UPDATES:
                    raise Stop
                self.by_hand += 1  # a step without an optimizer
                trace.phase("between steps")
        before, trace.on_host, self.busy = trace.on_host, not card, True
        try:
            return func(*args, **kwargs)
        finally:
            trace.on_host, self.busy = before, False

    def device(self, tensor) -> torch.device:
        """What a fake tensor says to a script, and what to torch."""
        asked_by_script = torch._C._len_torch_function_stack() and not self.busy
        return CUDA if asked_by_script and self.on_card(tensor) else DEVICE(tensor)


def _is_weight(func, args, dtype=None, device=None, **_) -> bool:
    """Whether it makes a large tensor without values, as layers do to fill it: nobody reads it."""
    if func.overloadpacket.__name__ not in ("empty", "empty_strided") or str(device) == "meta":
        return False
    return (dtype or torch.get_default_dtype()).is_floating_point and math.prod(args[0]) > SMALL


def _ones(tensor):
    """Values stand in for those that nobody computed, as for `.item()`."""
    with _disable_current_modes():
        return torch.full(tensor.shape, int(tensor.dtype != torch.bool), dtype=tensor.dtype)


class Moves(TorchFunctionMode):
    """Reads "cuda" wherever a script says it, and says so where a tensor is asked."""

    def __init__(self, where: Where):
        super().__init__()
        self.where = where

    def upload(self, tensor):
        trace = self.where.trace
        if not isinstance(tensor, torch.Tensor) or tensor.is_meta or self.where.on_card(tensor):
            return tensor
        if isinstance(tensor, torch.nn.Parameter):  # an optimizer may have it already: it stays
            del trace.ids[tensor.untyped_storage()._cdata]
            trace.see(tensor, "parameters")
            return tensor
        if isinstance(tensor, FakeTensor) and tensor.requires_grad and torch.is_grad_enabled():
            with self.where.to(True):
                return tensor.clone()
        out = self.where.like(tensor, True).requires_grad_(tensor.requires_grad)
        trace.work.copy(out, trace)
        return out

    def download(self, tensor):
        if not self.where.on_card(tensor):
            return tensor
        self.where.trace.work.copy(tensor, self.where.trace)
        graph = tensor.requires_grad and torch.is_grad_enabled()
        if not graph and tensor.numel() <= SHOWN:
            return _ones(tensor)
        with self.where.to(False):
            return tensor.clone() if graph else torch.empty_like(tensor)

    def move(self, func, tensor, args, kwargs):
        """`tensor.to(...)`, `.cuda()` or `.cpu()`."""
        device, waits, change = torch.device(func.__name__.replace("to", "cpu")), True, {}
        if func.__name__ == "to":
            if args and isinstance(args[0], torch.Tensor):
                args = (CUDA if self.where.on_card(args[0]) else CPU, args[0].dtype, *args[1:])
            asked = {k: _number(v) for k, v in kwargs.items() if k != "copy"}
            device, dtype, soon, form = torch._C._nn._parse_to(*map(_number, args), **asked)
            if device is None or device.type == "meta":
                return func(tensor, *args, **kwargs)
            waits, change = not soon, dict(dtype=dtype, memory_format=form)
            change = {k: v for k, v in change.items() if v is not None}
        moved = self.upload if _is_card(device) else self.download
        if not change:
            return moved(tensor)
        if _is_card(device) and waits:  # then the host converts
            return moved(func(tensor, **change))
        return func(moved(tensor), **change)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, kwargs, where = getattr(func, "__name__", ""), dict(kwargs or {}), self.where
        first, fake = args[0] if args else None, bool(args) and isinstance(args[0], FakeTensor)
        if name == "_parse_to" or func is torch.device:  # where to go, in words
            return func(*map(_number, args[:1]), *args[1:], **kwargs)
        if name in ("__get__", "__set__"):
            name = func.__self__.__name__
            if name in ("is_cuda", "is_cpu") and where.on_card(first):
                return name == "is_cuda"
            if name == "grad" and len(args) == 1 and (gradient := func(first)) is not None:
                where.trace.see(gradient, "gradients")
            if name == "data" and fake and len(args) == 2 and not isinstance(args[1], FakeTensor):
                args = (first, where.like(args[1], where.on_card(first)))
            return func(*args, **kwargs)
        if isinstance(first, torch.Tensor) and name in ("to", "cuda", "cpu"):
            return self.move(func, first, args[1:], kwargs)
        if fake and name in ("numpy", "tolist", "__array__", "__format__"):
            where.trace.work.wait(where.trace)
            return func(_ones(first), *args[1:], **kwargs)
        if "device" in kwargs:
            kwargs["device"] = _number(kwargs["device"])
        card = any(map(_is_card, (*args, *kwargs.values())))
        if card:
            args = tuple(CPU if _is_card(a) else a for a in args)
            kwargs = {k: CPU if _is_card(v) else v for k, v in kwargs.items()}
        away = not card and str(kwargs.get("device")) == "cpu" and where.on_card(args)
        asked = True if card else False if away else where.asked
        with where.to(asked, () if away else (args, kwargs)):
            out = func(*args, **kwargs)
        return tree_map(self.upload, out) if card else out


class Script:
    """A run for `simulate`: a script and its arguments, on a card with so many bytes of memory.

    Afterwards `note` says what was run otherwise than the script asks, and `printed` ends with the
    last lines that it printed.
    """

    def __init__(self, path: str, arguments: Sequence[str] = (), memory: int = 80 * 2**30):
        self.path, self.arguments = Path(path), [str(a) for a in arguments]
        self.memory, self.card, self.taken = memory, "a card", Counter()
        self.note, self.output, self.__name__ = "", io.StringIO(), self.path.name
        if not self.path.is_file():
            raise ValueError(f"{path} is not a file")

    printed = property(lambda self: self.output.getvalue()[-4000:])

    @contextmanager
    def inside(self, trace: Trace) -> Iterator[None]:
        """What `simulate` puts around the run."""
        folder, modules = str(self.path.resolve().parent), set(sys.modules)
        self.taken.clear()
        self.where = where = Where(trace, self.taken)
        with ExitStack() as stack:
            enter = stack.enter_context
            stack.callback(_forget, folder, modules)
            stack.callback(setattr, SAVE_FILE, "__code__", SAVE_FILE.__code__)
            SAVE_FILE.__code__ = EMPTY_FILE  # libraries have this function by another name
            stack.callback(logging.disable, logging.root.manager.disable)
            logging.disable()
            enter(patch.dict(os.environ, QUIET))
            enter(patch.object(sys, "stdin", io.StringIO()))
            enter(patch.object(sys, "argv", [str(self.path), *self.arguments]))
            enter(patch.object(sys, "path", [folder, *sys.path]))
            enter(patch.object(logging.root, "handlers", []))
            enter(sandbox())
            enter(redirect_stdout(self.output))
            enter(redirect_stderr(self.output))
            enter(where)
            moves = enter(Moves(where))
            _forget()
            for owner, name, value in (*self.of_the_card(where), *self.otherwise(where, moves)):
                enter(patch.object(owner, name, value))
            yield

    def of_the_card(self, where: Where) -> Iterator[tuple]:
        """What torch.cuda and torch.accelerator answer; functions not named here do nothing."""
        cuda, trace, total, memory = torch.cuda, where.trace, self.memory, Memory(where.trace)
        capability = trace.card.capability

        def free(*_):
            return total - memory.now().reserved, total

        facts = dict(name=self.card, major=capability[0], minor=capability[1], is_integrated=False)
        facts |= dict(total_memory=total, multi_processor_count=trace.card.sms, warp_size=32)
        told = dict(is_available=True, device_count=1, current_device=0, current_device_index=0)
        told |= dict(get_device_name=self.card, get_device_capability=capability)
        told |= dict(get_device_properties=types.SimpleNamespace(**facts), mem_get_info=free)
        told |= dict(current_accelerator=lambda *_, **__: CUDA, get_memory_info=free)
        told |= dict(current_stream=Anything, default_stream=Anything, stream=Anything)
        told |= dict(is_bf16_supported=lambda emulated=True: emulated or capability >= (8, 0))
        told |= dict(memory_stats=Counter(), synchronize=cuda.synchronize)
        told |= dict(reset_peak_memory_stats=lambda *_, **__: memory.now(anew=True) and None)
        for name, counter in COUNTERS.items():
            told[name] = lambda *_, counter=counter, **__: getattr(memory.now(), counter)
        for owner in (cuda, cuda.memory, cuda.nvtx, torch.accelerator):
            for name, function in list(vars(owner).items()):
                own = inspect.isfunction(function) and function.__module__.startswith("torch.")
                if own and name != "range":
                    value = told.get(name.replace("cached", "reserved"))
                    silent = lambda *_, value=value, **__: value  # noqa: E731
                    yield owner, name, value if callable(value) else silent
        yield from ((cuda, name, Anything) for name in ("Stream", "Event", "device", "device_of"))

    def otherwise(self, where: Where, moves: Moves) -> Iterator[tuple]:
        """What is done otherwise than by torch, left out, or not allowed."""
        parameter, passes = torch.nn.Parameter.__new__, itertools.count()
        load, save = torch.load, torch.save

        def refuse(*_, **__):
            raise Stop(SEVERAL)

        def compiled(what=None, *_, **__):
            self.note = COMPILED
            return what if what is not None else (lambda function: function)

        def new(cls, data=None, requires_grad=True):
            if type(data) in (torch.Tensor, torch.nn.Parameter) and not data.is_meta:
                data = where.like(data, False)
            return parameter(cls, data, requires_grad)

        def loaded(*args, map_location=None, **options):
            with _disable_current_modes():  # else torch leaves the values out
                found = load(*args, map_location="cpu", **options)
            return tree_map(moves.upload, found) if _is_card(map_location) else found

        def saved(what, file, *_, **__):
            """What is known is written; models and their states have no values."""
            kinds = int | float | str | bytes | None | np.ndarray | torch.Tensor
            found = tree_leaves(what)
            known = all(isinstance(t, kinds) and not isinstance(t, FakeTensor) for t in found)
            named = isinstance(file, str | os.PathLike)
            with open(file, "wb") if named else nullcontext(file) as f, _disable_current_modes():
                if known:
                    save(what, f)

        def backward(tensor, gradient=None, retain_graph=None, create_graph=False, inputs=None):
            if not self.taken and next(passes) >= PASSES:
                raise Stop(f"{NEVER} in {PASSES:,} backward passes")
            torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)

        yield torch, "compile", compiled
        yield torch.nn.Module, "compile", lambda module, *_, **__: compiled(module) and None
        yield torch.jit, "script", compiled
        yield torch, "load", loaded
        yield torch, "save", saved
        yield torch.Tensor, "backward", backward  # whose functions in Python ask for devices, too
        yield FakeTensor, "device", property(where.device)
        yield torch.nn.Parameter, "__new__", new
        yield torch.nn.DataParallel, "forward", lambda own, *a, **k: own.module(*a, **k)
        for kind in (transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase):
            yield kind, "save_pretrained", lambda *_, **__: None  # which are not written in Python
        yield torch.distributed, "init_process_group", refuse
        yield torch.multiprocessing, "start_processes", refuse
        yield torch.multiprocessing, "spawn", refuse

    def __call__(self):
        """Run it until each of its optimizers has taken two steps; its variables are returned."""

        trace, ends = self.where.trace, []

        def evaluated(op, since: int) -> bool:
            return op.phase >= since and (op.kind, op.issued) == ("product", "no gradients")

        def count(optimizer, *_):
            self.taken[me := id(optimizer)] += 1
            if trace.phases[-1] == "between steps":
                ends.append((me, len(trace.phases) - 1, len(trace.events) - 1))
            done, since = min(self.taken.values()), next((k for o, k, _ in ends if o == me), 0)
            # One that an evaluation precedes is not like the others: then the next one tells.
            late = done == UPDATES and any(evaluated(op, since) for op in trace.work.operations)
            if done >= UPDATES and not late:
                raise Stop

        main = types.ModuleType("__main__")
        main.__dict__.update(__file__=str(self.path), __builtins__=__builtins__)
        hook = register_optimizer_step_post_hook(count)
        try:
            with patch.dict(sys.modules, {"__main__": main}):
                exec(compile(self.path.read_bytes(), str(self.path), "exec"), main.__dict__)
        except (Exception, SystemExit, Stop) as error:
            if not (self.taken or self.where.by_hand) or not isinstance(error, SystemExit | Stop):
                raise ValueError(f"{self.path} {self.why(error)}") from error
        finally:
            hook.remove()
        for one, phase, event in ends:  # of several, as in a GAN, the last one ends a step
            if one != ends[-1][0]:
                trace.phases[phase] = trace.events[event] = "optimizer step"
        updates = min(self.taken.values(), default=self.where.by_hand)
        if not updates:
            raise ValueError(f"{self.path} {NEVER}")
        if set(trace.kind) <= {HOST}:
            raise ValueError(f"{self.path} puts nothing on the card: it trains on the CPU")
        if not self.taken:
            self.note = f"{self.note} {BY_HAND}".strip()
        if updates < UPDATES:
            self.note = f"{self.note} {ONE_UPDATE}".strip()
        return main

    def why(self, error: BaseException) -> str:
        """A few words about a script that ended early."""
        chain, said = [error], " ".join(str(error).split())[:300]
        while cause := chain[-1].__cause__ or chain[-1].__context__:
            chain.append(cause)
        words = " ".join(f"{type(one).__mro__} {one}" for one in chain)
        if isinstance(error, Stop):
            return said
        if said in ("'RANK'", "'LOCAL_RANK'", "'WORLD_SIZE'") or "_share_fd_" in words:
            return SEVERAL
        if isinstance(error, SystemExit):
            last = [f"status {error.code}", *self.printed.strip().splitlines()][-1][:300]
            return f"ended before it took an update: {said if error.code == said else last}"
        if any(text in words for text in OFFLINE.split("|")):
            return f"needs a hub or another address, and none can be reached: {said}"
        if isinstance(error, ModuleNotFoundError):
            here = any(Path(f"{error.name}{end}").exists() for end in ("", ".py"))
            advice = ": set PYTHONPATH=. to find it in this folder" if here else ""
            return f"needs the module {error.name}, which is not installed{advice}"
        if "DataDependentOutput" in words or "DynamicOutputShape" in words:
            return f"cannot be predicted: {NO_VALUES}"
        for text, mistake in MISTAKES.items():
            if text in words:
                return f"uses {mistake}"
        own = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(self.path)]
        line = f" in line {own[-1].lineno}" if own else ""
        return f"fails by itself{line}: {type(error).__name__}: {said}"


def _forget(folder: str = "", modules: set[str] = frozenset()) -> None:
    """What libraries remember of the machine; modules beside a script, or that it wrote."""
    libraries = (transformers.utils.import_utils, transformers.utils.generic)
    for function in (f for library in libraries for f in vars(library).values()):
        if hasattr(function, "cache_clear"):
            function.cache_clear()
    for name in set(sys.modules) - modules if folder else ():
        file = getattr(sys.modules[name], "__file__", None)
        if file and (file.startswith(folder + os.sep) or not os.path.exists(file)):
            del sys.modules[name]
