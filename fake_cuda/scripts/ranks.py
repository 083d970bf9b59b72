"""One process, alone or the first of several: its process groups, DistributedDataParallel, and what
starts processes.

Of several, each with a card of its own, rank 0 is run.
"""

import copy
import os
from collections.abc import Iterator
from urllib.parse import parse_qs, urlparse

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d
from torch.utils._pytree import tree_map

from ..shards import of_dtensor
from .answers import Anything
from .group import NAME, Rank
from .host import Where
from .moves import Moves, as_device, is_card
from .words import MORE_RANKS, SEVERAL, Stop

NCCL = "What NCCL itself takes on the card is not counted."


PROCESS = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
PROCESS |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", GROUP_RANK="0")


def told(count: int) -> dict[str, str]:
    """What torchrun tells the first of so many processes on one machine; nothing to one alone."""
    world = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(count))
    return PROCESS | world if count > 1 else {}


def ranks(run, where: Where, moves: Moves) -> Iterator[tuple]:
    """(owner, name, value) of what is replaced for a script that is one process, or rank 0."""
    if not dist.is_available():
        return
    cards = run.asked["ranks"]

    def group(store, rank: int, size: int, timeout) -> Rank:
        return Rank(rank, size, where)

    dist.Backend.register_backend(NAME, group, devices=["cpu", "cuda"])
    yield from _groups(run, cards, moves)
    yield from _objects()
    yield dist, "Reducer", _reducer(where)
    yield from _data_parallel(moves)
    yield from _second_card()
    for owner in (torch.cuda, torch.accelerator):
        yield owner, "device_count", lambda: cards
    yield torch.multiprocessing, "start_processes", _starts(cards)
    yield torch.multiprocessing, "spawn", _starts(cards)


# -------------------------------------------------------------------------------- process groups


def _groups(run, cards: int, moves: Moves) -> Iterator[tuple]:
    """The functions that make process groups, and those that say what they are."""
    begin, anew = c10d.init_process_group, c10d.new_group
    asked = {}  # a group -> the backend that the script asked for

    def init_process_group(
        backend=None, init_method=None, timeout=None, world_size=-1, rank=-1, store=None, **options
    ):
        count = _world(init_method, world_size, rank, store)
        _only(count, cards)
        is_card(options.get("device_id"))
        begin(NAME, rank=0, world_size=count, store=dist.HashStore())
        for owner, name, function in (*of_dtensor(moves.where), *_buffers_move(moves)):
            setattr(owner, name, function)
        asked[c10d.GroupMember.WORLD] = backend or "undefined"
        if "nccl" in str(backend or "nccl"):
            run.note(NCCL)

    def new_group(ranks=None, timeout=None, backend=None, *_, **options):
        group = anew(ranks, timeout, NAME, group_desc=options.get("group_desc"))
        asked[group] = backend or asked[c10d.GroupMember.WORLD]
        return group

    def get_backend(group=None):
        group = group or c10d._get_default_group()
        return dist.Backend(asked[group]) if group in asked else c10d.Backend(NAME)

    found = dict(init_process_group=init_process_group, new_group=new_group)
    found |= dict(get_backend=get_backend, is_nccl_available=lambda: True)
    found |= dict(barrier=lambda *_, **__: None, monitored_barrier=lambda *_, **__: None)
    for name, function in found.items():
        for owner in (dist, c10d, device_mesh):  # a mesh may be what makes the first group
            if hasattr(owner, name):
                yield owner, name, function


def _world(init_method, world_size: int, rank: int, store) -> int:
    """How many processes there are, as rendezvous.py in torch.distributed reads it."""
    url = urlparse(init_method or "env://")
    query = {key: values[-1] for key, values in parse_qs(url.query).items()}
    if world_size > 0:
        return world_size
    if "world_size" in query:
        return int(query["world_size"])
    if store is None and url.scheme == "env":
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            if name not in os.environ and not (name == "RANK" and rank >= 0):
                raise ValueError(
                    "Error initializing torch.distributed using env:// rendezvous: "
                    f"environment variable {name} expected, but not set"
                )
    return int(os.environ.get("WORLD_SIZE", 1))


def _only(count: int, cards: int) -> None:
    if count > cards:
        raise Stop(SEVERAL if cards == 1 else MORE_RANKS.format(count, cards))


def _objects() -> Iterator[tuple]:
    """Python objects: torch would send them as bytes, of which it asks for values."""

    def all_gather_object(object_list, obj, group=None):
        object_list[:] = [copy.deepcopy(obj) for _ in object_list]

    def gather_object(obj, object_gather_list=None, *_, **__):
        object_gather_list[:] = [copy.deepcopy(obj) for _ in object_gather_list]

    def scatter_object_list(scatter_object_output_list, scatter_object_input_list=None, *_, **__):
        scatter_object_output_list[0] = copy.deepcopy(scatter_object_input_list[0])

    found = dict(all_gather_object=all_gather_object, gather_object=gather_object)
    found |= dict(scatter_object_list=scatter_object_list)
    found |= dict(broadcast_object_list=lambda *_, **__: None)
    for name, function in found.items():
        yield dist, name, function
        yield c10d, name, function


def _buffers_move(moves: Moves) -> Iterator[tuple]:
    """fully_shard and FSDP give buffers the data of others on the card (_move_states_to_device in
    _fsdp_init.py of torch/distributed/fsdp/_fully_shard, and in _init_utils.py above it), which
    real ones cannot take: they go there before it asks."""
    from torch.distributed.fsdp import _init_utils  # both take a second
    from torch.distributed.fsdp._fully_shard import _fsdp_init

    managed, move = _fsdp_init._get_managed_states, _init_utils._move_module_to_device

    def upload(modules) -> None:
        for module in modules:
            for name, buffer in module._buffers.items():
                module._buffers[name] = moves.upload(buffer)

    def moved(modules, *args, **options):
        upload(modules)
        return managed(modules, *args, **options)

    def move_module(module, ignored, ignored_buffers, device):
        if device is not None:
            upload(module.modules())
        return move(module, ignored, ignored_buffers, device)

    yield _fsdp_init, "_get_managed_states", moved
    yield _init_utils, "_move_module_to_device", move_module


# -------------------------------------------------------------------------------- data parallel


def _reducer(where: Where) -> type:
    """The Reducer of DistributedDataParallel, whose buckets are on the card.

    Besides them it makes integers on the host, which it reads: they stay real (reducer.cpp in
    torch/csrc/distributed/c10d: initialize_buckets, sync_bucket_indices).
    """
    real = dist.Reducer

    def on_card(method):
        def called(self, *args, **options):
            trace = where.trace
            first, where.buckets = len(trace.size), True
            try:
                out = method(self, *args, **options)
            finally:
                where.buckets = False
            for number in range(first, len(trace.size)):
                trace.kind[number] = trace.kind[number] or "gradients"
            return out

        return called

    class Reducer(real):
        __init__ = on_card(real.__init__)
        _rebuild_buckets = on_card(real._rebuild_buckets)

    return Reducer


def _data_parallel(moves: Moves) -> Iterator[tuple]:
    """Both wrappers may be told cards by their numbers."""

    def checked(init):
        def begin(self, module, device_ids=None, *args, **options):
            for device in device_ids or ():
                is_card(as_device(device))
            init(self, module, device_ids, *args, **options)

        return begin

    def forward(self, *args, **options):
        """With one card its input goes there, and nothing is copied besides."""
        return self.module(*tree_map(moves.upload, args), **tree_map(moves.upload, options))

    for wrapper in (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel):
        yield wrapper, "__init__", checked(wrapper.__init__)
    yield torch.nn.DataParallel, "forward", forward


# ------------------------------------------------------------------------------------- the card


def _second_card() -> Iterator[tuple]:
    """To choose another card than the first is as wrong as to put a tensor on it."""

    def choose(device=None, *_, **__):
        is_card(as_device(device))

    class device(Anything):
        def __init__(self, device=None):
            super().__init__()
            choose(device)

    yield torch.cuda, "set_device", choose
    yield torch.cuda, "device", device
    for name in ("set_device_index", "set_device_idx"):
        if hasattr(torch.accelerator, name):
            yield torch.accelerator, name, choose


# ------------------------------------------------------------------------------------ processes


class Ended:
    """What `torch.multiprocessing.spawn` returns with join=False; its one process has ended."""

    processes = ()

    def join(self, *_, **__) -> bool:
        return True


def _starts(cards: int):
    """What starts processes: the first of them is run here."""

    def start(fn, args=(), nprocs=1, join=True, daemon=False, start_method="spawn", **_):
        _only(nprocs, cards)
        fn(0, *args)
        return None if join else Ended()

    return start
