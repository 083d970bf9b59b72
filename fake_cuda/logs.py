"""Real logs of CUDA's caching allocator, and what the model does with the same requests.

A log is what `torch.cuda.memory._dump_snapshot` keeps of a run, cut down to arrays (their format:
data/cuda_logs/README.md). It has every request, but only the state at its *end*; undone from there,
it gives the state at its beginning, in which the model starts.

    log = read_log("data/cuda_logs/NAME.npz")
    replayed = log.replay()
    replayed.segments == log.segments and replayed.reserved[-1] == log.reserved

The driver's part is taken from the log: where a new segment lies, which decides between free blocks
of equal size. Left out are several streams (refused), the moment without memory (an `oom` entry is
passed over; a segment that CUDA gave back goes back when it did), expandable segments, and the time
from `free_requested` to `free_completed`, in which a block waits for other streams.
"""

import bisect
import pickle
import zipfile
import zlib
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from .allocator import Allocator, MiB

ALLOC, FREE, SEGMENT_ALLOC, SEGMENT_FREE = 0, 2, 3, 4
BROKEN = (OSError, EOFError, zipfile.BadZipFile, zlib.error, pickle.UnpicklingError)
BROKEN += (ValueError, TypeError, KeyError, IndexError)  # other arrays, or entries that do not fit


class Placed(Allocator):
    """Starts with blocks in use, each named by CUDA's address, and puts segments where CUDA did.

    A block at CUDA's address a, in a segment that begins at s, lies at a + s: in the same order,
    but blocks of two segments are never neighbours, which they often are in the driver's addresses.
    """

    def __init__(self, segments: dict[int, tuple[int, bool]], blocks: dict[int, int]):
        super().__init__()
        self.starts, self.offer, self.top = sorted(segments), (0, 0), 2**60
        where = sorted(blocks)
        for start, (size, small) in segments.items():
            at, end = start, start + size
            inside = where[bisect.bisect_left(where, start) : bisect.bisect_left(where, end)]
            for block in [*inside, end]:
                if at < block:
                    self.put(at + start, block - at, small, True)
                if block < end:
                    at = block + blocks[block]
                    self.put(block + start, blocks[block], small, False)
                    self.where[block] = block + start
            self.reserved += size
        self.peak = self.reserved

    def place(self, address: int) -> int:
        """Where the model has CUDA's address."""
        return address + self.starts[bisect.bisect_right(self.starts, address) - 1]

    def segment(self, size: int) -> int:
        (address, offered), self.offer = self.offer, (0, 0)
        return 2 * address if size == offered else super().segment(size)

    def give_back(self, address: int) -> None:
        """A segment that CUDA gave back goes back, if nothing in it is in use here."""
        self.starts.remove(address)
        size, _, is_free = self.blocks.get(2 * address, (0, False, False))
        if is_free and 2 * address + size not in self.blocks:
            self.reserved -= self.take(2 * address)


@dataclass
class Replay:
    """What the model made of a log, in bytes; the arrays have one value for each entry."""

    segments: list[tuple[int, int]]  # that it took from the driver: (entry of the request, size)
    elsewhere: list[int]  # the entries whose block lies at another address than CUDA's
    allocated: np.ndarray = field(repr=False)
    reserved: np.ndarray = field(repr=False)
    allocator: Allocator = field(repr=False)  # as it is after the last entry


@dataclass
class Log:
    """A log of CUDA's allocator, with the state at its end. Sizes in bytes."""

    entries: list[tuple[int, int, int]] = field(repr=False)  # (action, address, size asked for)
    areas: dict[int, tuple[int, bool]] = field(repr=False)  # a segment's address: (size, is small)
    blocks: dict[int, int] = field(repr=False)  # address: size, of the blocks in use

    @property
    def segments(self) -> list[tuple[int, int]]:
        """What CUDA took from the driver: (entry of the request, size)."""
        # The segment's own entry comes just before the request's.
        taken = enumerate(self.entries, start=1)
        return [(k, size) for k, (action, _, size) in taken if action == SEGMENT_ALLOC]

    @property
    def allocated(self) -> int:
        """Bytes in blocks, as torch.cuda.memory_allocated() counts them."""
        return sum(self.blocks.values())

    @property
    def reserved(self) -> int:
        return sum(size for size, _ in self.areas.values())

    def start(self) -> tuple[dict[int, tuple[int, bool]], dict[int, int]]:
        """Segments and blocks before the first entry: those of the end, undone entry by entry."""
        areas, blocks = dict(self.areas), dict(self.blocks)
        starts, order = sorted(areas), sorted(blocks)
        for action, address, size in reversed(self.entries):
            k = bisect.bisect_left(order, address)
            if action == ALLOC:
                del blocks[address], order[k]
            elif action == FREE:
                order.insert(k, address)
                blocks[address] = max(512, -(-size // 512) * 512)
                # The log has the size asked for, and a large block also keeps what is too little to
                # split off. No free block is so small: such a gap is the end of the block below it.
                for near, above in pairwise([*order[max(k - 1, 0) : k + 2], 2**60]):
                    start = starts[bisect.bisect_right(starts, near) - 1]
                    length, small = areas[start]
                    gap = min(above, start + length) - near - blocks[near]
                    blocks[near] += gap if not small and gap <= MiB else 0
            elif action == SEGMENT_ALLOC:
                del areas[address], starts[bisect.bisect_left(starts, address)]
            elif action == SEGMENT_FREE:
                areas[address] = size, size == 2 * MiB
                bisect.insort(starts, address)
        return areas, blocks

    def replay(self, stop: int | None = None) -> Replay:
        """Send the requests to the model, all or those before entry `stop`."""
        model, taken, elsewhere, now = Placed(*self.start()), [], [], []
        allocated = sum(size for size, _, is_free in model.blocks.values() if not is_free)
        for k, (action, address, size) in enumerate(self.entries[:stop]):
            before = model.reserved
            if action == ALLOC:
                model.malloc(address, size)
                allocated += model.blocks[model.where[address]][0]
                if model.reserved > before:
                    taken.append((k, model.reserved - before))
                if model.where[address] != model.place(address):
                    elsewhere.append(k)
            elif action == FREE:
                allocated -= model.blocks[model.where[address]][0]
                model.release(address)
            elif action == SEGMENT_ALLOC:
                model.offer = address, size
                bisect.insort(model.starts, address)
            elif action == SEGMENT_FREE:
                model.give_back(address)
            now.append((allocated, model.reserved))
        curves = np.array(now, dtype=np.int64).reshape(-1, 2)
        return Replay(taken, elsewhere, *curves.T, model)


def read_log(path: str | Path) -> Log:
    """The log in an npz file. FileNotFoundError or ValueError, in a sentence, if there is none."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there: take a log of data/cuda_logs")
    try:
        with np.load(path) as arrays:
            streams = np.unique(arrays["stream"]) if "stream" in arrays else [0]
            names = ("action", "addr", "size", "segments", "blocks")
            action, address, size, segments, blocks = (arrays[name].tolist() for name in names)
        entries = list(zip(action, address, size, strict=True))
        areas = {start: (size, bool(small)) for start, size, small in segments}
        log = Log(entries, areas, {start: size for start, size, used in blocks if used})
        log.start()
    except BROKEN as error:
        raise ValueError(
            f"{path} is not a whole log of CUDA's allocator: fetch it again, or read in "
            "data/cuda_logs/README.md which arrays it needs"
        ) from error
    if len(streams) > 1:
        raise ValueError(f"{path} has requests of {len(streams)} streams, and the model knows one")
    return log
