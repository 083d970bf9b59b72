"""What every tensor of a run is for, and when it is born and dies."""

import weakref
from itertools import groupby

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from .card import Card
from .engine import ZEROS, alone, in_place
from .here import Here
from .launches import Count, Counts
from .operations import EQUAL_SHARES, Work, in_backward
from .refusals import GPU, READS_KERNEL, NotSimulated
from .scratch import asks_cublas, scratch, workspace
from .shards import parts, wraps
from .streams import Reusable, Streams
from .values import CHOICES, MASKED, compute, keep, known, run
from .versions import Versions, chosen

aten, DEVICE = torch.ops.aten, torch.ops.prim.device.default
CATEGORIES = ("parameters", "gradients", "optimizer states", "activations", "temporaries")
HOST = "host"  # a storage in the CPU's memory: not one byte of the GPU's
BUILDING, EMPTY_CACHE = "building the model", "empty cache"


class Trace(TorchDispatchMode):
    """Logs the birth and death of every tensor storage, and what each is for."""

    def __init__(
        self,
        card: Card | None,  # None: a CPU
        versions: Versions | None = None,
        here: Here | None = None,
    ):
        super().__init__()
        self.cuda, self.card = card is not None, card
        self.versions, self.here = versions or chosen(), here or Here()
        # With a workspace of cuBLAS: whether it is the backward's thread, and which stream.
        self.threads: set[tuple[bool, int]] = set()
        self.autocasts: list[bool] = []  # those around this moment, and whether they are on
        self.fp16 = False  # whether bf16 stands for it
        self.refused: Exception | None = None  # what the run did since the last operation
        self.guessed = False  # whether the run asked for a value that nobody knows
        self.convolves = False  # whether a convolution was run
        self.on_host = False  # whether what is made now is of no concern to the card
        self.ids: dict[int, int] = {}  # a storage's address -> its number
        self.size: list[int] = []
        self.kind: list[str | None] = []
        self.born: list[int] = []  # the number of the phase in which a storage is born
        self.phases = [BUILDING]
        # i: storage i is born, ~i: it dies; text: a phase begins, or the cache is emptied.
        self.events: list[int | str | Reusable] = []
        self.since = 0  # the event from which on the run counts: memory had run out before
        self.root: object = None  # the module that is called first; where its passes begin
        self.passes: list[int] = []  # numbers of operations
        self.batch: int | None = None  # the first dimension of what it was given last
        self.zeros: int | None = None  # the last operation's result, if that was zeros
        self.counts = Counts()
        self.work = Work()
        self.streams = Streams(self.events, self.work.operations, card)
        alone()  # which no mode may disturb

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No guard of torch's stands around each dispatch: `compiled` keeps compilers out."""
        return False

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
        if wraps(type(tensor)):
            for one in parts(tensor):
                self.see(one, kind)
        # Hooks are the whole process's: real tensors are of training in another thread.
        if not isinstance(tensor, FakeTensor) or tensor.fake_device.type == "meta":
            return
        device = tensor.fake_device  # a script is told another
        if device.type != "cpu":  # a build for CUDA makes fake tensors of it without a GPU
            raise NotSimulated.uses(GPU) from RuntimeError(f"a fake tensor lies on {device}")
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
            weakref.finalize(storage, self.died, key)
        if self.kind[i] != HOST:
            self.kind[i] = kind or self.kind[i]

    def died(self, key: int) -> None:
        self.counts.died(key)
        i = self.ids.pop(key, None)
        if i is None:  # it had a number on the host before, and has died by that of the card
            return
        self.streams.free(i)
        if self.kind[i] is None:  # what outlives its forward pass is an activation
            left = self.born[i] < len(self.phases) - 1
            kept = left and self.phases[self.born[i]] == "forward"
            self.kind[i] = "activations" if kept else "temporaries"

    def resized(self, storage: torch.UntypedStorage) -> None:
        """FSDP gives the memory of gathered weights back and takes it anew, in one storage."""
        i = self.ids.get(storage._cdata)
        if i is not None and self.size[i] != storage.nbytes():
            self.streams.free(i)
            self.kind[i] = self.kind[i] or "temporaries"
            self.ids[storage._cdata] = self.add(storage.nbytes(), self.kind[i])

    def so_far(self) -> tuple[list[int | str | Reusable], list[str]]:
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
        if func is DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device  # autograd asks more often than all else together
        if any(map(wraps, types)):
            return NotImplemented
        if self.refused:
            raise self.refused
        if func is aten._local_scalar_dense.default:
            return self.number(func, args, kwargs)
        whole = torch.is_inference_mode_enabled() and func.namespace == "aten"
        if whole and func._can_decompose():
            off = not (self.autocasts and self.autocasts[-1])  # a dispatch hides whether it is on
            key = torch._C.DispatchKey.AutocastCPU
            with self, torch._C._SetExcludeDispatchKeyGuard(key, off):  # else einsum stays whole
                return func.decompose(*args, **(kwargs or {}))
        if in_backward():
            self.phase("backward")
            if not torch.is_grad_enabled():
                func = in_place(func, args, self.zeros) or func
        self.convolves |= func is aten.convolution.default
        if func in MASKED:
            args = args[0], [n for index in args[1] for n in self.numbers(index)], *args[2:]
        true = compute(func, args, kwargs) if CHOICES & set(func.tags) else None
        if true is None:
            out = run(func, args, kwargs)
        else:  # as many elements as its argument's values say
            out = tree_map_only(torch.Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype), true)
        self.done(func, args, kwargs, out)
        return out

    def launched(
        self, kernel: str, pointers: list, programs: int | None, value: int | None
    ) -> None:
        """A Triton kernel of so many `programs` was launched: `pointers` are the tensors that it
        was given, `value` is what its wrapper is told of its counts, where that is known."""
        self.work.launch(kernel, sum(pointer.moved for pointer in pointers), programs, self)
        self.counts.wrote(pointers, Count(kernel, value))

    def number(self, func, args, kwargs):
        """What the run is told of a tensor's value."""
        if count := self.counts.of(args[0]):
            if count.value is None:
                raise NotSimulated.uses(READS_KERNEL.format(count.kernel))
            self.work.note(EQUAL_SHARES, self)
            return count.value
        self.work.wait(self)
        if (value := compute(func, args, kwargs)) is not None:
            return value
        # Values that follow from weights are guessed. False keeps padding masks in place.
        self.guessed |= self.phases[-1] != "optimizer step"
        if args[0].dtype == torch.bool:
            return False
        return 1.0 if args[0].is_floating_point() else 1

    def listed(self, tensor):
        """`tensor.tolist()`: the card is waited for once, since its values come in one copy
        (torch/csrc/utils/tensor_list.cpp); a fake tensor would ask for each by itself."""
        values = known(tensor)
        if values is not None:
            self.work.wait(self)
            return values.tolist()
        guess = self.number(aten._local_scalar_dense.default, (tensor,), {})
        with _disable_current_modes():
            return torch.full(tensor.shape, guess).tolist()

    def done(self, func, args, kwargs, out) -> None:
        """An operation was run: what it returned, and what it asked of the card."""
        self.zeros = id(out) if func in ZEROS else None
        single = isinstance(out, torch.Tensor)  # as most operations return
        leaves = [t for t in ([out] if single else tree_leaves(out)) if isinstance(t, torch.Tensor)]
        keep(func, args, kwargs, leaves)
        for tensor in leaves:
            self.see(tensor, HOST if self.on_host else None)
        self.counts.follow(args, leaves)
        if not self.cuda or self.on_host:
            return
        self.work.see(func, args, kwargs, leaves, self)
        self.inside(func, args)
        if func is aten.bernoulli_.float:
            # The CPU's dropout keeps a mask in the input's type, CUDA's fused kernel a bool mask
            # (aten/src/ATen/native/cuda/Dropout.cu).
            self.size[self.ids[out.untyped_storage()._cdata]] = out.numel()

    def numbers(self, index) -> list:
        """A mask as an index: what kernels make of it (IndexingUtils.h: expandTensors)."""
        if index is None or index.dtype != torch.bool or known(index) is None and index.dim() > 1:
            return [index]
        places = self.__torch_dispatch__(aten.nonzero.default, (), (index,))
        return self.__torch_dispatch__(aten.unbind.int, (), (places, 1))

    def inside(self, func, args) -> None:
        """What a kernel allocates for itself."""
        sizes = scratch(func, args, self.card)
        if asks_cublas(func, args, self.card):
            thread, kept = (in_backward(), self.streams.now), self.versions.workspace_is_kept
            size = workspace(self.card.capability, self.versions)
            if not kept:
                sizes = [*sizes, size]
            elif thread not in self.threads:
                self.threads.add(thread)
                self.add(size, "temporaries")
        numbers = [self.add(size, "temporaries") for size in sizes]
        self.events += [~i for i in numbers]

    def add(self, size: int, kind: str | None) -> int:
        """A storage is born: its number."""
        i = len(self.size)
        self.size.append(size)
        self.born.append(len(self.phases) - 1)
        self.kind.append(kind)
        self.streams.born()
        self.events.append(i)
        return i
