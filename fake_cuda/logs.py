"""Real logs of CUDA's caching allocator, and what the model does with the same requests.

A log is what `torch.cuda.memory._dump_snapshot` keeps of a run, cut down to arrays (their format:
data/cuda_logs/README.md). It has every request, but only the state at its *end*; undone from there,
it gives the state at its beginning, in which the model starts.

    log = read_log("data/cuda_logs/NAME.npz")  # or the .pickle that _dump_snapshot wrote
    replayed = log.replay()
    replayed.segments == log.segments and replayed.reserved[-1] == log.reserved

The driver's part comes from the log: where a new segment lies, which decides between free blocks of
equal size. Left out are several streams (refused), running out of memory (an `oom` entry is passed
over; a segment that CUDA gave back goes back when it did), expandable segments, and the time from
`free_requested` to `free_completed`, in which a block waits for other streams.
"""

import bisect
import pickle
import zipfile
import zlib
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from .allocator import Allocator, MiB, Pool

ALLOC, FREE, SEGMENT_ALLOC, SEGMENT_FREE = 0, 2, 3, 4  # entries of other kinds change nothing
BROKEN = (OSError, EOFError, zipfile.BadZipFile, zlib.error, pickle.UnpicklingError)
BROKEN += (ValueError, TypeError, LookupError)  # other arrays, or entries that do not fit


class Placed(Allocator):
    """Starts with segments and blocks in use, and puts new segments where CUDA's driver did.

    A block is named by its address a in CUDA. If its segment begins at s, it lies at a + s here:
    the order is the same, and blocks of two segments never touch, as they do in CUDA's addresses.
    """

    def __init__(self, areas: dict[int, tuple[int, bool]], blocks: dict[int, int]):
        super().__init__()
        self.starts, self.offer, self.top = sorted(areas), None, 2**60
        ranges = [*blocks.items(), *((start, size) for start, (size, _) in areas.items())]
        edges = sorted({edge for start, size in ranges for edge in (start, start + size)})
        for address, after in pairwise(edges):
            size, small = areas[start := self.start_of(address)]
            if address < start + size:  # else it lies between two segments
                self.put(address + start, after - address, Pool(small), address not in blocks)
        self.where = {address: address + self.start_of(address) for address in blocks}
        self.reserved = self.peak = sum(size for size, _ in areas.values())

    def start_of(self, address: int) -> int:
        return self.starts[bisect.bisect_right(self.starts, address) - 1]

    def segment(self, size: int) -> int:
        offer, self.offer = self.offer, None
        return 2 * offer[0] if offer and offer[1] == size else super().segment(size)

    def give_back(self, address: int) -> None:
        self.starts.remove(address)
        size, _, is_free = self.blocks.get(2 * address, (0, False, False))
        if is_free and 2 * address + size not in self.blocks:  # nothing of it is in use
            self.reserved -= self.take(2 * address)


@dataclass
class Replay:
    """What the model made of a log. The arrays hold bytes after each entry."""

    segments: list[tuple[int, int]]  # that it took: (entry of the request, size)
    elsewhere: list[int]  # the entries whose block lies at another address than CUDA's
    allocated: np.ndarray = field(repr=False)
    reserved: np.ndarray = field(repr=False)
    allocator: Allocator = field(repr=False)  # as it is after the last entry


@dataclass
class Log:
    """A log of CUDA's allocator, and the state at its end. Sizes in bytes."""

    entries: list[tuple[int, int, int]] = field(repr=False)  # (action, address, size asked for)
    areas: dict[int, tuple[int, bool]] = field(repr=False)  # a segment's address: (size, is small)
    blocks: dict[int, int] = field(repr=False)  # address: size, of the blocks in use

    @property
    def segments(self) -> list[tuple[int, int]]:
        """What CUDA took from the driver: (entry of the request, size)."""
        # The segment's own entry stands just before the request's.
        taken = enumerate(self.entries, start=1)
        return [(k, size) for k, (action, _, size) in taken if action == SEGMENT_ALLOC]

    @property
    def allocated(self) -> int:
        """Bytes of blocks in use, as torch.cuda.memory_allocated() counts."""
        return sum(self.blocks.values())

    @property
    def reserved(self) -> int:
        return sum(size for size, _ in self.areas.values())

    def start(self) -> Placed:
        """The model in the state before the first entry: the end, undone entry by entry."""
        areas, blocks = dict(self.areas), dict(self.blocks)
        starts, order = sorted(areas), sorted(blocks)
        for action, address, size in reversed(self.entries):
            k = bisect.bisect_left(order, address)
            if action == ALLOC:
                del blocks[address], order[k]
            elif action == FREE:
                order.insert(k, address)
                blocks[address] = max(512, -(-size // 512) * 512)
                # This is what was asked for. A large block also keeps what is too small to split
                # off, and no free block is that small: so near a gap is the end of the block below.
                for block, above in pairwise([*order[max(k - 1, 0) : k + 2], 2**60]):
                    begin = starts[bisect.bisect_right(starts, block) - 1]
                    gap = min(above, begin + areas[begin][0]) - block - blocks[block]
                    blocks[block] += gap if gap <= MiB and not areas[begin][1] else 0
            elif action == SEGMENT_ALLOC:
                del areas[address], starts[bisect.bisect_left(starts, address)]
            elif action == SEGMENT_FREE:
                areas[address] = size, size == 2 * MiB
                bisect.insort(starts, address)
        return Placed(areas, blocks)

    def replay(self, stop: int | None = None) -> Replay:
        """Send the model the requests: all of them, or those before entry `stop`."""
        model, taken, elsewhere, now = self.start(), [], [], []
        for k, (action, address, size) in enumerate(self.entries[:stop]):
            before = model.reserved
            if action == ALLOC:
                model.malloc(address, size)
                if model.reserved > before:
                    taken.append((k, model.reserved - before))
                if model.where[address] != address + model.start_of(address):
                    elsewhere.append(k)
            elif action == FREE:
                model.release(address)
            elif action == SEGMENT_ALLOC:
                model.offer = address, size
                bisect.insort(model.starts, address)
            elif action == SEGMENT_FREE:
                model.give_back(address)
            now.append((model.allocated, model.reserved))
        return Replay(taken, elsewhere, *np.array(now, np.int64).reshape(-1, 2).T, model)


class Plain(pickle.Unpickler):
    """Lists, dicts, texts and numbers: a snapshot has no more, and other files may run code."""

    def find_class(self, module: str, name: str):
        raise pickle.UnpicklingError(f"a snapshot has no {module}.{name}")


def snapshot(path: Path) -> dict[str, list]:
    """The arrays of a log, from a file of `torch.cuda.memory._dump_snapshot`.

    Field names: torch/cuda/memory.py, `_snapshot` (private, so they may change). One card's.
    """
    kinds = {"alloc": ALLOC, "free_completed": FREE}
    kinds |= {"segment_alloc": SEGMENT_ALLOC, "segment_free": SEGMENT_FREE}
    with path.open("rb") as file:
        whole = Plain(file).load()
    ((card, trace),) = [(i, some) for i, some in enumerate(whole["device_traces"]) if some]
    found = {"segments": [], "blocks": [], "stream": [entry["stream"] for entry in trace]}
    found["grows"] = [entry["action"] in ("segment_map", "segment_unmap") for entry in trace]
    entries = [entry for entry in trace if entry["action"] in kinds]
    found["action"] = [kinds[entry["action"]] for entry in entries]
    found |= {name: [entry[name] for entry in entries] for name in ("addr", "size")}
    for segment in whole["segments"]:
        if segment.get("device", card) != card:
            continue
        at, small = segment["address"], segment["segment_type"] == "small"
        found["segments"].append((at, segment["total_size"], small))
        for block in segment["blocks"]:  # in the order of addresses, without gaps
            found["blocks"].append((at, block["size"], block["state"] != "inactive"))
            at += block["size"]
    return found


def read_log(path: str | Path) -> Log:
    """The log in a file: one of data/cuda_logs, or a snapshot of one's own (`.pickle`).

    Raises:
        FileNotFoundError, ValueError: a sentence, if there is no log that can be read.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there: the course's logs are in data/cuda_logs")
    try:
        if path.suffix == ".pickle":
            found = snapshot(path)
        else:
            with np.load(path) as arrays:
                found = {name: arrays[name].tolist() for name in arrays}
        entries = list(zip(found["action"], found["addr"], found["size"], strict=True))
        areas = {start: (size, bool(small)) for start, size, small in found["segments"]}
        log = Log(entries, areas, {start: size for start, size, used in found["blocks"] if used})
        if not any(found.get("grows", ())):
            log.start()  # fails if the entries do not lead to the end
    except BROKEN as error:
        raise ValueError(
            f"{path} is not a whole log of CUDA's allocator: fetch it again, or read in "
            "data/cuda_logs/README.md which arrays a log has"
        ) from error
    if any(found.get("grows", ())):
        raise ValueError(f"{path} has segments that grow: record it without expandable_segments")
    if len(streams := set(found.get("stream", ()))) > 1:
        raise ValueError(f"{path} has requests of {len(streams)} streams: the model knows one")
    return log
