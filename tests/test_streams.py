"""Several streams on one card: whose blocks are found by whom, and when."""

import textwrap

import pytest
import torch

from fake_cuda import Allocator, MiB, simulate
from fake_cuda.card import Card
from fake_cuda.scripts import Script
from fake_cuda.streams import STREAM, Reusable, Streams
from test_answers import TRAINED

A100 = Card("A100", (8, 0), 108, 1555e9, {"fp32": 19.5e12, "bf16": 312e12})


# --------------------------------------------------------------------------------------- allocator
def test_a_free_block_is_found_by_its_own_stream_alone():
    allocator = Allocator()
    allocator.malloc(0, 30 * MiB, stream=1)
    allocator.release(0)
    allocator.malloc(1, 30 * MiB, stream=0)
    assert allocator.reserved == 60 * MiB
    allocator.malloc(2, 30 * MiB, stream=1)
    assert allocator.reserved == 60 * MiB


def test_small_blocks_of_two_streams_do_not_share_a_segment():
    allocator = Allocator()
    allocator.malloc(0, 512, stream=0)
    allocator.malloc(1, 512, stream=1)
    assert allocator.reserved == 4 * MiB


def test_a_block_that_waits_does_not_count_and_is_not_found():
    allocator = Allocator()
    allocator.malloc(0, 30 * MiB)
    allocator.wait(0)
    assert allocator.allocated == 0
    allocator.malloc(1, 30 * MiB)
    assert (allocator.allocated, allocator.reserved) == (30 * MiB, 60 * MiB)
    allocator.release(0)
    assert allocator.allocated == 30 * MiB
    allocator.malloc(2, 30 * MiB)
    assert allocator.reserved == 60 * MiB


def test_a_block_that_waits_merges_with_no_neighbour():
    allocator = Allocator()
    for i in range(3):
        allocator.malloc(i, 6 * MiB)  # of one segment of 20 MiB
    allocator.wait(1)
    allocator.release(0)
    allocator.release(2)
    allocator.malloc(3, 12 * MiB)
    assert allocator.reserved == 32 * MiB


def test_to_empty_the_cache_ends_all_waiting():
    allocator = Allocator()
    allocator.malloc(0, 30 * MiB, stream=1)
    allocator.wait(0)
    allocator.empty_cache()
    assert (allocator.allocated, allocator.reserved) == (0, 0)


# --------------------------------------------------------------------------------------- the order
def dead(*used_on: int) -> Streams:
    """Storage 0 is made on stream 5 and used on others, and it dies after place 1 and an operation,
    of which no time is known."""
    streams = Streams([], operations := [])
    streams.new()
    streams.enter(5)
    streams.born()
    streams.leave()
    for stream in used_on:
        streams.use(0, stream)
    streams.mark()
    operations.append("an operation")
    streams.free(0)
    return streams


def test_a_storage_is_reusable_once_the_host_has_waited_for_something_later():
    streams = dead(0)
    streams.host_waits(1)
    assert streams.events == [~0]  # that came before its end
    streams.host_waits(streams.mark())
    assert streams.events == [~0, Reusable(0)] and not streams.waiting


def test_the_host_may_wait_for_all():
    streams = dead(0, 7)
    streams.host_waits()
    assert streams.events == [~0, Reusable(0)]


def test_the_stream_of_a_storage_need_not_be_waited_for():
    streams = dead(5)
    assert streams.events == [~0] and not streams.late


def test_a_view_that_torch_tells_no_node_of_is_none_of_its_business():
    """As FSDP's are, in a checkpointed layer; torch ends what asks for such a view's node."""
    base, weight = torch.ones(3), torch.ones(3, requires_grad=True)
    with torch.no_grad():
        view = base[:2]
    base.mul_(weight)
    with pytest.raises(RuntimeError, match="created in no_grad mode"):
        _ = view.grad_fn
    Streams([]).remember((view, base))
    assert STREAM in base.grad_fn.metadata


def test_streams_come_from_pools_of_32():
    streams = Streams([])
    numbers = [streams.new() for _ in range(33)]
    assert len(set(numbers)) == 32 and numbers[0] == numbers[32] and 0 not in numbers
    assert streams.new(priority=-1) not in numbers


# ----------------------------------------------------------------------------------------- scripts
ON_TWO_STREAMS = """
import torch
cuda, MiB = torch.cuda, 2**20
def made():
    return torch.empty(30 * MiB, dtype=torch.uint8, device="cuda")
side = cuda.Stream()
assert cuda.current_stream() == cuda.default_stream() != side
with cuda.stream(side):
    assert cuda.current_stream() == side and side.stream_id
    x = made()
    with cuda.stream(None):
        assert cuda.current_stream() == side
del x
x = made()
assert cuda.memory_reserved() == 60 * MiB
with side:
    y = made()
assert cuda.memory_reserved() == 60 * MiB
y.record_stream(cuda.current_stream())
del y
assert cuda.memory_allocated() == 30 * MiB
cuda.set_stream(side)
y = made()
assert cuda.memory_reserved() == 90 * MiB  # the host has not waited for the default stream
cuda.synchronize()
z = made()
assert cuda.memory_reserved() == 90 * MiB
cuda.set_stream(cuda.default_stream())
del x, y, z
# A backward pass works on the streams of its forward pass.
x = torch.zeros(4, device="cuda", requires_grad=True)
with side:
    y = x * 2
streams = []
y.grad_fn.register_hook(lambda *_: streams.append(cuda.current_stream()))
z = y * 2
z.grad_fn.register_hook(lambda *_: streams.append(cuda.current_stream()))
z.sum().backward()
assert streams == [cuda.default_stream(), side], streams
del x, y, z
"""
SHARDED = """
import os, sys, torch, torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import Linear
dist.init_process_group("nccl")
layers = torch.nn.Sequential(*(Linear(2048, 2048) for _ in range(8)))
limit = sys.argv[1] == "limited"
model = FSDP(layers, auto_wrap_policy=ModuleWrapPolicy({Linear}), device_id=0,
             limit_all_gathers=limit)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(3):
    model(torch.randn(16, 2048, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def simulated(tmp_path, text: str, *arguments: str, ranks: int = 1):
    (tmp_path / "train.py").write_text(textwrap.dedent(text))
    script = Script(str(tmp_path / "train.py"), [*arguments], ranks=ranks, seconds=120)
    return simulate(script, card=A100)


def test_a_script_may_work_on_two_streams(tmp_path):
    simulated(tmp_path, ON_TWO_STREAMS + textwrap.dedent(TRAINED))


def test_fsdp_gathers_on_a_stream_of_its_own_and_lets_the_host_wait(tmp_path):
    """Each layer is 16 MiB, whole. Where the host does not wait, none of them is free again before
    the step ends: eight are gathered forward, and seven backward, where the last one still is."""
    limited, free = (
        simulated(tmp_path, SHARDED, limit, ranks=2) for limit in ("limited", "unlimited")
    )
    assert free.peak_allocated == limited.peak_allocated
    segment = 18 * MiB  # 16 MiB and the bias
    assert (free.peak_reserved - limited.peak_reserved) / segment > 8
