"""torch's caching allocator for CUDA, as a model of its rules."""

import bisect
from collections import defaultdict
from typing import NamedTuple

MiB = 2**20


class Pool(NamedTuple):
    """Which free blocks a request may take: small or large ones, of its own stream."""

    small: bool
    stream: int = 0


class Allocator:
    """torch's CUDACachingAllocator with default settings (c10/cuda/CUDACachingAllocator.cpp).

    Sizes are rounded up to 512 bytes and cut from segments of 2 MiB (up to 1 MiB) or 20 MiB, from
    10 MiB on from segments of their own, rounded to 2 MiB: best fit, split, merge. A segment goes
    back to the driver only by `empty_cache`, and only if no block of it is in use. Memory never
    runs out here; on a full card torch empties the cache by itself and tries again.

    A segment and its blocks are of the stream that asked for it, and no other stream finds them. A
    block that other streams use is not found by its own either, until they are done (`streams`).

    `allocated` is bytes in blocks, as torch counts: a large block keeps what is too small to split
    off, up to 1 MiB; one that waits for other streams does not count. `logs` holds all this but the
    streams to what CUDA did, address by address.
    """

    def __init__(self):
        self.blocks: dict[int, tuple[int, Pool, bool]] = {}  # address: (size, pool, is_free)
        self.ends: dict[int, int] = {}  # where a block ends: its address
        self.free: dict[Pool, list[tuple[int, int]]] = defaultdict(list)  # (size, address)
        self.where: dict[int, int] = {}  # a tensor's number: its address
        self.waiting: set[int] = set()  # freed tensors whose blocks other streams may still use
        self.allocated = self.reserved = self.peak = self.top = 0

    def step(self, i: int, size: int, stream: int = 0) -> None:
        """One entry of `Simulation.log`; the stream is that of a tensor's birth."""
        if size > 0:
            self.malloc(i, size, stream)
        elif size < 0:
            self.release(i)
        else:
            self.empty_cache()

    def malloc(self, i: int, size: int, stream: int = 0) -> None:
        size = max(512, -(-size // 512) * 512)
        small = size <= MiB
        pool = Pool(small, stream)
        found = self.free[pool]
        k = bisect.bisect_left(found, (size,))
        if k < len(found):
            address = found[k][1]
            block = self.take(address)
        else:
            own = -(-size // (2 * MiB)) * 2 * MiB
            block = 2 * MiB if small else own if size >= 10 * MiB else 20 * MiB
            address = self.segment(block)
            self.reserved += block
            self.peak = max(self.peak, self.reserved)
        if block - size >= (512 if small else MiB + 1):
            self.put(address + size, block - size, pool, True)
            block = size
        self.put(address, block, pool, False)
        self.where[i] = address

    def segment(self, size: int) -> int:
        """The address of a new segment, which is the driver's choice: here, above all others."""
        # The gap keeps blocks of two segments from being neighbours.
        address, self.top = self.top, self.top + size + 2 * MiB
        return address

    def wait(self, i: int) -> None:
        """A tensor is freed whose block other streams use; when they are done, `release` it."""
        self.waiting.add(i)
        self.allocated -= self.blocks[self.where[i]][0]

    def release(self, i: int) -> None:
        address = self.where.pop(i)
        pool, size = self.blocks[address][1], self.take(address)
        if i in self.waiting:  # which did not count any more
            self.waiting.remove(i)
            self.allocated += size
        for near in (address + size, self.ends.get(address)):
            if near in self.blocks and self.blocks[near][2]:
                size += self.take(near)
                address = min(address, near)
        self.put(address, size, pool, True)

    def empty_cache(self) -> None:
        for i in list(self.waiting):  # torch waits for all streams first
            self.release(i)
        for size, address in [block for blocks in self.free.values() for block in blocks]:
            if address not in self.ends and address + size not in self.blocks:  # a whole segment
                self.reserved -= self.take(address)

    def put(self, address: int, size: int, pool: Pool, is_free: bool) -> None:
        self.blocks[address] = size, pool, is_free
        self.ends[address + size] = address
        if is_free:
            bisect.insort(self.free[pool], (size, address))
        else:
            self.allocated += size

    def take(self, address: int) -> int:
        size, pool, is_free = self.blocks.pop(address)
        del self.ends[address + size]
        if is_free:
            self.free[pool].remove((size, address))
        else:
            self.allocated -= size
        return size
