"""The allocator's model against 25 logs of CUDA's allocator, request by request.

data/cuda_logs/README.md says whose runs they are, and what they show.
"""

import pickle
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from torch.cuda._memory_viz import segsum

from fake_cuda import Allocator, MiB
from fake_cuda.allocator import Pool
from fake_cuda.logs import ALLOC, FREE, SEGMENT_ALLOC, SEGMENT_FREE, Log, Placed, read_log

FOLDER = Path(__file__).resolve().parents[1] / "data" / "cuda_logs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.npz"))
EMPTY_AT_FIRST = [name for name in NAMES if name.startswith("niuhuang")]
LATE = "wedsonlin_423m_512_training_bf16"  # the log that shows a block's rest only later


@cache
def log(name: str) -> Log:
    return read_log(FOLDER / f"{name}.npz")


def blocks(model: Placed) -> list[tuple[int, int, bool]]:
    """Address in the model, size, in use."""
    return sorted((a, size, not is_free) for a, (size, _, is_free) in model.blocks.items())


def test_the_logs_are_all_here_and_small():
    assert len(NAMES) == 25
    assert sum(path.stat().st_size for path in FOLDER.glob("*.npz")) < 400_000
    page = (FOLDER / "README.md").read_text()
    count = sum(action == ALLOC for name in NAMES for action, _, _ in log(name).entries)
    assert f"{count:,} blocks" in page
    owners = {name.rsplit("_", 3)[0] for name in NAMES}
    assert all(f"| `{owner}_*` |" in page for owner in owners)


@pytest.mark.parametrize("name", NAMES)
def test_the_model_repeats_cuda(name):
    real, model = log(name), log(name).replay()
    assert model.segments == real.segments  # for the same requests, in this order, of this size
    assert (model.allocated[-1], model.reserved[-1]) == (real.allocated, real.reserved)
    assert model.elsewhere == []  # each block lies where CUDA's lay
    with np.load(FOLDER / f"{name}.npz") as arrays:
        start_of = model.allocator.start_of
        end = [(a + start_of(a), size, used == 1) for a, size, used in arrays["blocks"].tolist()]
    assert blocks(model.allocator) == sorted(end)  # in use and free


@pytest.mark.parametrize("name", [name for name in NAMES if log(name).segments])
def test_where_the_driver_puts_segments_changes_nothing_that_is_predicted(name, monkeypatch):
    """A prediction has no addresses: its segments rise. Equal free blocks are taken in another
    order then, and that moves blocks, but no segment and no byte."""
    monkeypatch.setattr(Placed, "segment", Allocator.segment)
    real, model = log(name), log(name).replay()
    assert model.segments == real.segments
    assert (model.allocated[-1], model.reserved[-1]) == (real.allocated, real.reserved)


@pytest.mark.parametrize("name", NAMES)
def test_undone_from_its_end_a_log_gives_its_beginning(name):
    start = log(name).start()
    assert start.reserved + sum(size for _, size in log(name).segments) == log(name).reserved
    assert (start.reserved == start.allocated == 0) == (name in EMPTY_AT_FIRST)
    small = [size for size, _ in start.free[Pool(small=False)] if size <= MiB]
    assert small == []  # torch splits off no block that is so small


def test_a_block_keeps_what_is_too_small_to_split_off_and_the_log_does_not_show_it():
    """Two blocks of a segment die in the log. The rest of the lower one, 512 KiB, is a gap only
    while the upper one stands."""
    lower, upper, rest = 12 * MiB, 6 * MiB, MiB // 2
    place = lower + rest
    entries = [(FREE, place, upper), (FREE, 0, lower), (ALLOC, 0, 19 * MiB)]
    start = Log(entries, {0: (20 * MiB, False)}, {0: 20 * MiB}).start()
    assert blocks(start) == [
        (0, place, True),
        (place, upper, True),
        (place + upper, 20 * MiB - place - upper, False),
    ]
    assert start.allocated == place + upper


def test_the_log_whose_901_blocks_lay_elsewhere():
    """A block of 4 MiB kept 960 KiB. That shows when its neighbour is placed behind them, 179
    requests later; taken for free, they made the hole there too large to be the best fit."""
    start = log(LATE).start()
    kept = [
        (size - 4 * MiB, start.blocks[address + size][2])
        for address, (size, _, is_free) in start.blocks.items()
        if not is_free and 4 * MiB < size <= 5 * MiB and address + size in start.blocks
    ]
    assert (960 * 1024, True) in kept
    assert (20 * MiB) in [size for size, _ in start.free[Pool(small=False)]]


def test_a_replay_can_stop_on_the_way():
    name = EMPTY_AT_FIRST[0]
    whole, part = log(name).replay(), log(name).replay(stop=500)
    assert len(part.reserved) == 500
    assert (part.allocated == whole.allocated[:500]).all()
    assert part.allocator.allocated == part.allocated[-1]
    assert part.allocator.reserved == part.reserved[-1]
    free = sum(size for pool in part.allocator.free.values() for size, _ in pool)
    assert free == part.reserved[-1] - part.allocated[-1] > 0
    assert len(log(name).replay(stop=0).reserved) == 0


def test_a_segment_that_cuda_gave_back_goes_back_when_it_did():
    took = [(SEGMENT_ALLOC, 0, 30 * MiB), (ALLOC, 0, 30 * MiB), (FREE, 0, 30 * MiB)]
    again = [(SEGMENT_ALLOC, 0, 40 * MiB), (ALLOC, 0, 40 * MiB)]
    entries = [*took, (SEGMENT_FREE, 0, 30 * MiB), *again]
    found = Log(entries, {0: (40 * MiB, False)}, {0: 40 * MiB}).replay()
    assert (found.reserved // MiB).tolist() == [0, 30, 30, 0, 0, 40]
    assert found.segments == [(1, 30 * MiB), (5, 40 * MiB)] and found.elsewhere == []
    inside = Log(entries[2:], {0: (40 * MiB, False)}, {0: 40 * MiB})  # begins within the run
    assert inside.start().reserved == 30 * MiB
    assert inside.replay().segments == [(3, 40 * MiB)]


# ------------------------------------------------------------------------------------------- files
def arrays(name: str = EMPTY_AT_FIRST[0]) -> dict[str, np.ndarray]:
    with np.load(FOLDER / f"{name}.npz") as found:
        return dict(found)


def as_snapshot(name: str) -> dict:
    """A log as `_dump_snapshot` has it, field names as in torch/cuda/memory.py."""
    found, actions = arrays(name), {0: "alloc", 2: "free_completed"}
    actions |= {3: "segment_alloc", 4: "segment_free"}
    trace = []
    columns = (found[key].tolist() for key in ("action", "addr", "size"))
    for action, addr, size in zip(*columns, strict=True):
        if action in actions:
            entry = {"action": actions[action], "addr": addr, "size": size, "stream": 0}
            if action == 2:
                trace.append(entry | {"action": "free_requested"})
            trace.append(entry | {"frames": []})
    trace.append({"action": "oom", "device_free": 0, "size": 2, "stream": 0, "frames": []})
    segments, ends = [], found["blocks"][:, 0]
    for address, size, small in found["segments"].tolist():
        rows = found["blocks"][(address <= ends) & (ends < address + size)]
        names = "active_allocated", "inactive"
        inside = [{"size": n, "state": names[not used]} for _, n, used in sorted(rows.tolist())]
        kind = "small" if small else "large"
        facts = {"address": address, "total_size": size, "segment_type": kind, "blocks": inside}
        segments.append(facts | {"device": 1, "stream": 0})
    return {"segments": segments, "device_traces": [[], trace]}


@pytest.mark.parametrize("name", [EMPTY_AT_FIRST[0], LATE])
def test_a_snapshot_of_ones_own_is_read_like_a_log(name, tmp_path):
    whole = as_snapshot(name)
    assert "segments" in segsum(whole)  # torch's own reader finds the fields that it wants
    (tmp_path / "mine.pickle").write_bytes(pickle.dumps(whole))
    found = read_log(tmp_path / "mine.pickle")
    kept = [entry for entry in log(name).entries if entry[0] in (0, 2, 3, 4)]
    assert (found.entries, found.areas, found.blocks) == (kept, log(name).areas, log(name).blocks)
    assert found.replay().segments == found.segments


def test_a_snapshot_that_grows_or_wants_code_is_refused(tmp_path):
    path = tmp_path / "mine.pickle"
    whole = as_snapshot(EMPTY_AT_FIRST[0])
    whole["device_traces"][1][0] |= {"action": "segment_map"}
    path.write_bytes(pickle.dumps(whole))
    with pytest.raises(ValueError, match="without expandable_segments"):
        read_log(path)
    path.write_bytes(pickle.dumps({"device_traces": [[Path]]}))
    with pytest.raises(ValueError, match="not a whole log"):
        read_log(path)


def test_entries_that_change_nothing_are_passed_over(tmp_path):
    """A log as torch writes it: with `free_requested`, an `oom`, times and a stream."""
    whole = arrays()
    for key in ("action", "addr", "size"):
        whole[key] = np.repeat(whole[key], 2)
    whole["action"][0::2] = 1
    whole["action"][4] = 5
    whole["stream"] = whole["time_us"] = np.zeros_like(whole["size"])
    np.savez(tmp_path / "log.npz", **whole)
    found, real = read_log(tmp_path / "log.npz").replay(), log(EMPTY_AT_FIRST[0])
    assert [size for _, size in found.segments] == [size for _, size in real.segments]
    assert (found.allocated[-1], found.reserved[-1]) == (real.allocated, real.reserved)


def written(path: Path, what: str) -> None:
    good = arrays()
    if what == "cut short":
        np.savez_compressed(path, **good)
        path.write_bytes(path.read_bytes()[:2000])
    elif what == "a bit turned":
        np.savez_compressed(path, **good)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 255
        path.write_bytes(content)
    elif what == "text":
        path.write_text("not a log")
    elif what == "empty":
        path.touch()
    elif what == "other arrays":
        np.savez(path, losses=np.ones(3))
    elif what == "one array":
        with path.open("wb") as file:
            np.save(file, good["size"])
    elif what == "objects":
        np.savez(path, **good | {"segments": np.array([{}, None])})
    elif what == "lengths differ":
        np.savez(path, **good | {"size": good["size"][:-1]})
    elif what == "half of the entries":  # the end is not theirs
        half = len(good["size"]) // 2
        np.savez(path, **good | {key: good[key][:half] for key in ("action", "addr", "size")})


@pytest.mark.parametrize(
    "what",
    [
        "cut short",
        "a bit turned",
        "text",
        "empty",
        "other arrays",
        "one array",
        "objects",
        "lengths differ",
        "half of the entries",
    ],
)
def test_a_file_that_is_no_log_is_named(tmp_path, what):
    path = tmp_path / "log.npz"
    written(path, what)
    with pytest.raises(ValueError, match="log.npz is not a whole log of CUDA's allocator: fetch"):
        read_log(path)


def test_a_missing_log_is_named(tmp_path):
    for path in (tmp_path / "log.npz", tmp_path):
        with pytest.raises(FileNotFoundError, match="is not there: the course's logs are in"):
            read_log(path)


def test_several_streams_are_refused(tmp_path):
    streams = np.arange(len(arrays()["size"])) % 2
    np.savez(tmp_path / "log.npz", **arrays(), stream=streams)
    with pytest.raises(ValueError, match="has requests of 2 streams: the model knows one"):
        read_log(tmp_path / "log.npz")
