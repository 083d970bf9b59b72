"""torch's caching allocator for CUDA, as a model of its rules."""

import bisect

MiB = 2**20


class Allocator:
    """torch's CUDACachingAllocator with default settings (c10/cuda/CUDACachingAllocator.cpp).

    Sizes are rounded up to 512 bytes and cut from segments of 2 MiB (up to 1 MiB) or 20 MiB, from
    10 MiB on from segments of their own, rounded to 2 MiB: best fit, split, merge. A segment goes
    back to the driver only by `empty_cache`, and only if no block of it is in use. Memory never
    runs out here; on a full card torch empties the cache by itself and tries again.

    `allocated` is bytes in blocks, as torch counts: a large block keeps what is too small to split
    off, up to 1 MiB. `logs` holds all this to what CUDA did, address by address.
    """

    def __init__(self):
        self.blocks: dict[int, tuple[int, bool, bool]] = {}  # address: (size, small, is_free)
        self.ends: dict[int, int] = {}  # where a block ends: its address
        self.free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # (size, address)
        self.where: dict[int, int] = {}  # a tensor's number: its address
        self.allocated = self.reserved = self.peak = self.top = 0

    def step(self, i: int, size: int) -> None:
        """One entry of `Simulation.log`."""
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
        k = bisect.bisect_left(pool, (size,))
        if k < len(pool):
            address = pool[k][1]
            block = self.take(address)
        else:
            own = -(-size // (2 * MiB)) * 2 * MiB
            block = 2 * MiB if small else own if size >= 10 * MiB else 20 * MiB
            address = self.segment(block)
            self.reserved += block
            self.peak = max(self.peak, self.reserved)
        if block - size >= (512 if small else MiB + 1):
            self.put(address + size, block - size, small, True)
            block = size
        self.put(address, block, small, False)
        self.where[i] = address

    def segment(self, size: int) -> int:
        """The address of a new segment, which is the driver's choice: here, above all others."""
        # The gap keeps blocks of two segments from being neighbours.
        address, self.top = self.top, self.top + size + 2 * MiB
        return address

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
        else:
            self.allocated += size

    def take(self, address: int) -> int:
        size, small, is_free = self.blocks.pop(address)
        del self.ends[address + size]
        if is_free:
            self.free[small].remove((size, address))
        else:
            self.allocated -= size
        return size
