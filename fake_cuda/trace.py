"""What every tensor of a run is for, and when it is born and dies."""

import functools
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from .cost import Card
from .operations import Work, in_backward
from .scratch import PRODUCTS, scratch, workspace
from .values import CHOICES, MASKED, compute, keep, known

aten, DEVICE = torch.ops.aten, torch.ops.prim.device.default
CATEGORIES = ("parameters", "gradients", "optimizer states", "activations", "temporaries")
RECURRENT = "Of recurrent layers cuDNN keeps more than is counted here, and takes other times."
HOST = "host"  # a storage in the CPU's memory: not one byte of the GPU's
BUILDING, EMPTY_CACHE = "building the model", "empty cache"


# Formulas of gradients write into fresh zeros, but into a copy of them where tensors are fake
# (areAnyTensorSubclassLike in torch/csrc/autograd/FunctionsManual.cpp).
INTO_ZEROS = {
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.index_put.default: aten.index_put_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.masked_scatter.default: aten.masked_scatter_.default,
}
ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)


def _holders(tensor) -> tuple[int, int]:
    """How many hold a tensor, and how many its storage."""
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@functools.cache
def _alone() -> tuple[int, int]:
    """The holders of a gradient that nobody but autograd's engine has, as a dispatch sees them."""
    seen = []

    class Adds(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is aten.add.Tensor:
                seen.append(_holders(args[0]))
            return func(*args, **(kwargs or {}))

    with torch.enable_grad(), Adds():
        x = torch.zeros(2, requires_grad=True) * 2
        (x * x.sigmoid()).sum().backward()
    return seen[0]


class Trace(TorchDispatchMode):
    """Logs the birth and death of every tensor storage, and what each is for."""

    def __init__(self, card: Card | None):  # None: a CPU
        super().__init__()
        self.cuda, self.card = card is not None, card
        self.threads: set[bool] = set()  # with a workspace of cuBLAS: the forward's, the backward's
        self.autocasts: list[bool] = []  # those around this moment, and whether they are on
        self.fp16 = False  # whether bf16 stands for it
        self.guessed = False  # whether the run asked for a value that nobody knows
        self.convolves = False  # whether a convolution was run
        self.on_host = False  # whether what is made now is of no concern to the card
        self.ids: dict[int, int] = {}  # a storage's address -> its number
        self.size: list[int] = []
        self.kind: list[str | None] = []
        self.born: list[int] = []  # the number of the phase in which a storage is born
        self.phases = [BUILDING]
        # i: storage i is born, ~i: it dies; text: a phase begins, or the cache is emptied.
        self.events: list[int | str] = []
        self.since = 0  # the event from which on the run counts: memory had run out before
        self.root: object = None  # the module that is called first; where its passes begin
        self.passes: list[int] = []  # numbers of operations
        self.batch: int | None = None  # the first dimension of what it was given last
        self.zeros: int | None = None  # the last operation's result, if that was zeros
        self.work = Work()
        _alone()  # which no mode may disturb

    def empty_cache(self, *_) -> None:
        self.events.append(EMPTY_CACHE)

    def phase(self, name: str) -> None:
        if self.phases[-1] != name:
            self.phases.append(name)
            self.events.append(name)

    def begin(self, module, given: tuple) -> None:
        """A module is called."""
        self.phase("forward")
        if self.root is None:
            self.root = weakref.ref(module)
        if self.root() in (module, None):
            self.root = weakref.ref(module)
            self.passes.append(len(self.work.operations))
            self.batch = None
        tensors = (t for t in given if isinstance(t, torch.Tensor) and t.dim())
        self.batch = self.batch or next((t.shape[0] for t in tensors), None)

    def see(self, tensor, kind: str | None = None) -> None:
        # Hooks are the whole process's: real tensors are of training in another thread.
        if not isinstance(tensor, FakeTensor) or tensor.fake_device.type == "meta":
            return
        device = tensor.fake_device  # a script is told another
        if device.type != "cpu":  # a build for CUDA makes fake tensors of it without a GPU
            raise RuntimeError(f"fake tensor on {device}")
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # a sparse tensor: its indices and values are seen
            return
        key = storage._cdata
        i = self.ids.get(key)
        if i is None:
            # Born in backward with gradients on: a checkpointed layer is being recomputed.
            recomputed = in_backward() and torch.is_grad_enabled()
            i = self.add(storage.nbytes(), "activations" if recomputed else None)
            self.ids[key] = i
            weakref.finalize(storage, self.died, i, key)
        if self.kind[i] != HOST:
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
        # Autocast frees its copies by their addresses: sorted, equal runs have equal logs.
        runs = groupby(self.events, lambda event: isinstance(event, int) and event < 0)
        events = [e for died, run in runs for e in (sorted(run, reverse=True) if died else run)]
        return events, kinds

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # autograd asks more often than all else together
        if func is aten._local_scalar_dense.default:
            self.work.wait(self)
            if (value := compute(func, args, kwargs)) is not None:
                return value
            # Values that follow from weights are guessed. False keeps padding masks in place.
            self.guessed |= self.phases[-1] != "optimizer step"
            if args[0].dtype == torch.bool:
                return False
            return 1.0 if args[0].is_floating_point() else 1
        whole = torch.is_inference_mode_enabled() and func.namespace == "aten"
        if whole and func._can_decompose():
            off = not (self.autocasts and self.autocasts[-1])  # a dispatch hides whether it is on
            key = torch._C.DispatchKey.AutocastCPU
            with self, torch._C._SetExcludeDispatchKeyGuard(key, off):  # else einsum stays whole
                return func.decompose(*args, **(kwargs or {}))
        if in_backward():
            self.phase("backward")
            if not torch.is_grad_enabled():
                func = self.in_place(func, args) or func
        self.convolves |= func is aten.convolution.default
        if func in MASKED:
            args = args[0], [n for index in args[1] for n in self.numbers(index)], *args[2:]
        true = compute(func, args, kwargs) if CHOICES & set(func.tags) else None
        if true is None:
            out = func(*args, **(kwargs or {}))
        else:  # as many elements as its argument's values say
            out = tree_map_only(torch.Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype), true)
        self.zeros = id(out) if func in ZEROS else None
        leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        keep(func, args, kwargs, leaves)
        for tensor in leaves:
            self.see(tensor, HOST if self.on_host else None)
        if self.cuda and not self.on_host:
            self.work.see(func, args, kwargs, leaves, self)
            self.inside(func, args)
        if self.cuda and not self.on_host and func is aten.bernoulli_.float:
            # The CPU's dropout keeps a mask in the input's type, CUDA's fused kernel a bool mask
            # (aten/src/ATen/native/cuda/Dropout.cu).
            self.size[self.ids[out.untyped_storage()._cdata]] = out.numel()
        return out

    def numbers(self, index) -> list:
        """A mask as an index: what kernels make of it (IndexingUtils.h: expandTensors)."""
        if index is None or index.dtype != torch.bool or known(index) is None and index.dim() > 1:
            return [index]
        places = self.__torch_dispatch__(aten.nonzero.default, (), (index,))
        return self.__torch_dispatch__(aten.unbind.int, (), (places, 1))

    def inside(self, func, args) -> None:
        """What a kernel allocates for itself."""
        thread = in_backward()
        if func in PRODUCTS and thread not in self.threads:
            self.threads.add(thread)
            self.add(workspace(self.card.capability), "temporaries")
        sizes = scratch(func, args, self.card)
        numbers = [self.add(size, "temporaries") for size in sizes]
        self.events += [~i for i in numbers]

    def add(self, size: int, kind: str | None) -> int:
        """A storage is born: its number."""
        i = len(self.size)
        self.size.append(size)
        self.born.append(len(self.phases) - 1)
        self.kind.append(kind)
        self.events.append(i)
        return i

    def in_place(self, func, args):
        """What the engine and formulas of gradients do in place with all but fake tensors."""
        caller = sys._getframe(2)
        while caller.f_globals["__name__"] in ("torch._compile", "torch._dynamo.eval_frame"):
            caller = caller.f_back  # around every dispatch to Python
        if caller.f_globals["__name__"] != "torch.autograd.graph":
            return None  # a backward written in Python
        if func is aten.add.Tensor:  # two gradients of one tensor (autograd/input_buffer.cpp)
            old = args[0]
            alone = old.dtype == torch.result_type(*args) and _holders(old) == _alone()
            return aten.add_.Tensor if alone else None
        return INTO_ZEROS.get(func) if id(args[0]) == self.zeros else None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Label parameters, gradients and optimizer states, and mark the phases of each step."""
        known = weakref.WeakSet()

        def enter(module, given):
            if not in_backward():
                self.begin(module, given)
            if isinstance(module, torch.nn.RNNBase):
                self.work.note(RECURRENT, self)
            if module not in known:
                known.update(module.modules())
                for tensor in (*module.parameters(), *module.buffers()):
                    self.see(tensor, "parameters")

        def before(optimizer, *_):
            if not in_backward():  # else an optimizer that works inside of backward
                self.phase("optimizer step")
            states(optimizer)  # made when it was, or loaded: new ones may take their place
            unscaled = 0
            for parameter in (p for g in optimizer.param_groups for p in g["params"]):
                self.see(parameter, "parameters")
                if parameter.grad is not None:
                    self.see(parameter.grad, "gradients")
                    unscaled += parameter.grad.nbytes
            if self.fp16 and not in_backward():
                self.work.unscale(unscaled, self)

        def states(optimizer):
            paged = getattr(optimizer, "is_paged", False)
            # bitsandbytes pages states of 100,000 values and more (optim/optimizer.py).
            least = 100_000 if hasattr(optimizer, "get_state_buffer") else 0
            leaves = [leaf for state in optimizer.state.values() for leaf in tree_leaves(state)]
            # GaLore and APOLLO keep their projections in objects of their own.
            leaves += [inner for leaf in leaves for inner in getattr(leaf, "__dict__", {}).values()]
            for tensor in leaves:
                away = paged and isinstance(tensor, torch.Tensor) and tensor.numel() >= least
                if away and self.cuda:
                    self.work.note("The travel of the optimizer's pages is not timed.", self)
                self.see(tensor, HOST if away and self.cuda else "optimizer states")

        def after(optimizer, *_):
            states(optimizer)
            if not in_backward():
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
