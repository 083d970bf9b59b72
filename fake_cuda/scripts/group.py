"""A process group of which one process is there: what its collectives leave in its tensors.

What other processes have is not known: on the card no values are, and on the host all are taken to
have what this one has.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed import distributed_c10d as c10d
from torch.utils._pytree import tree_leaves

from ..trace import FakeTensor
from .host import Where

NAME = "one_rank"  # of the backend that stands in for all others


def _done(result) -> dist.Work:
    future = torch.futures.Future()
    future.set_result(result)
    return _create_work_from_future(future)


def _pairs(outputs, inputs, rank: int) -> Iterator[tuple]:
    """(output, input) of each tensor that a collective writes. Where it takes a list, a tensor for
    each rank, this rank has its own; where it fills one, each entry is what this rank gave."""
    for output, given in zip(outputs, inputs, strict=False):
        if isinstance(output, torch.Tensor):
            yield output, given if isinstance(given, torch.Tensor) else given[rank]
        else:
            yield from ((one, given) for one in output)


def _write(output, given) -> None:
    """An output of as many values, or that many times as many or as few as there are ranks."""
    if output.numel() >= given.numel() > 0:
        into = output.detach().view(-1, *given.shape) if output.is_contiguous() else [output]
        for one in into:
            if one.data_ptr() != given.data_ptr():  # what is gathered may lie in its place already
                one.copy_(given)
    else:
        output.detach().copy_(given.reshape(-1)[: output.numel()].view(output.shape))


class Rank(dist.ProcessGroup):
    """A group of processes, of which this is one. What it has is what all have; nothing is sent.

    Its methods are those that torch.distributed and the Reducer call (Types.hpp, ProcessGroup.hpp
    in torch/csrc/distributed/c10d); some were renamed in torch 2.13.
    """

    def __init__(self, rank: int, size: int, where: Where):
        super().__init__(rank, size)
        self.where = where

    def getBackendName(self) -> str:
        return NAME

    group_name = property(lambda self: c10d._world.pg_names[self])
    pg_name = group_name

    def sends(self, kind: str, tensors) -> None:
        tensors = [one for one in tree_leaves(tensors) if self.where.on_card(one)]
        trace = self.where.trace
        trace.work.wire.send(kind, tensors, self.size(), len(trace.phases) - 1)

    def copied(self, outputs, inputs) -> dist.Work:
        with torch.no_grad():
            for output, given in _pairs(outputs, inputs, self.rank()):
                if self.size() == 1 or not isinstance(output, FakeTensor):
                    _write(output, given)
        return _done(tree_leaves(outputs))

    def allreduce(self, tensors, opts=None):
        self.sends("all_reduce", tensors)
        return _done(tensors)

    def broadcast(self, tensors, opts=None):
        self.sends("broadcast", tensors)
        return _done(tensors)

    allreduce_coalesced, reduce = allreduce, broadcast

    def allgather(self, outputs, inputs, opts=None):
        self.sends("all_gather", outputs)
        return self.copied(outputs, inputs)

    def allgather_into_tensor_coalesced(self, outputs, inputs, opts=None):
        return self.allgather(outputs, inputs)

    all_gather_single_coalesced = allgather_into_tensor_coalesced
    gather = allgather

    def _allgather_base(self, output, given, opts=None):
        return self.allgather([output], [given])

    all_gather_single = _allgather_base

    def reduce_scatter(self, outputs, inputs, opts=None):
        self.sends("reduce_scatter", inputs)
        return self.copied(outputs, inputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced = reduce_scatter
    scatter = reduce_scatter

    def alltoall(self, outputs, inputs, opts=None):
        self.sends("all_to_all", inputs)
        return self.copied(outputs, inputs)

    def _reduce_scatter_base(self, output, given, opts=None):
        return self.reduce_scatter([output], [given])

    reduce_scatter_single = _reduce_scatter_base

    def alltoall_base(self, output, given, output_sizes=None, input_sizes=None, opts=None):
        return self.alltoall([output], [given])

    all_to_all_single = alltoall_base

    def barrier(self, opts=None):
        return _done(None)

    def monitored_barrier(self, *_, **__):
        return None
