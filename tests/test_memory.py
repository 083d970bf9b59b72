"""`measure` against tensors of known sizes, on a CPU and on a mocked accelerator."""

import importlib
import os
import subprocess
import sys
import threading

import pynvml
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import helpers
from helpers import free, gib, measure, memory

MiB = 2**20


def tensor(mebibytes):
    return torch.empty(mebibytes * MiB, dtype=torch.uint8)


# ----------------------------------------------------------------------------------------- on a CPU
def test_the_peak_is_exact():
    with measure() as usage:
        a = tensor(10)
        del a
        b = tensor(5)
        assert usage.peak_allocated is None  # known when the block has ended
    assert usage.device == "cpu"
    assert usage.peak_allocated == usage.start + 10 * MiB
    assert (usage.peak_reserved, usage.used) == (None, None)
    del b


def test_what_lives_together_adds_up():
    with measure() as usage:
        kept = [tensor(3), tensor(4)]
        kept[0].add_(1)  # in place: no bytes
        kept += [tensor(2)]
    assert usage.peak_allocated == usage.start + 9 * MiB


def test_the_start_is_part_of_the_peak():
    before = memory.live_bytes()
    held = tensor(7)
    with measure() as usage:
        tensor(1)
    assert usage.start == before + 7 * MiB
    assert usage.peak_allocated == usage.start + MiB
    del held


def test_what_was_there_before_and_is_freed_inside_still_counts():
    held = tensor(8)
    with measure() as usage:
        del held
        again = tensor(6)
    assert usage.peak_allocated == usage.start + 6 * MiB
    del again


def test_it_counts_too_where_torch_remembers_another_block_at_its_address():
    with measure():
        logged = [torch.empty(2**14) for _ in range(64)]
    addresses = {block.data_ptr() for block in logged}
    del logged  # not seen by a profiler, so that torch still has their sizes
    held = [torch.empty(2**14)]
    while held[-1].data_ptr() not in addresses and len(held) < 2**14:
        held.append(torch.empty(2**14))
    assert held[-1].data_ptr() in addresses
    with measure() as usage:
        del held
        again = tensor(6)
    assert usage.peak_allocated == usage.start + 6 * MiB
    del again


def test_what_another_thread_frees_ends_where_its_address_is_given_again():
    addresses: list[int] = []
    with measure() as usage:
        while len(addresses) == len({*addresses}) < 2**12:
            held = [tensor(1)]
            addresses.append(held[0].data_ptr())
            other = threading.Thread(target=held.clear)
            other.start()
            other.join()
    assert len({*addresses}) == len(addresses) - 1
    assert usage.peak_allocated == usage.start + len({*addresses}) * MiB


def test_views_count_once():
    before = memory.live_bytes()
    whole = tensor(4)
    views = [whole[:MiB], whole.view(torch.float32), whole.reshape(2, -1)]
    assert memory.live_bytes() == before + 4 * MiB
    with measure() as usage:
        views += [whole[MiB:], whole.flip(0)]  # the last one is a copy
    assert usage.peak_allocated == usage.start + 4 * MiB
    del views


def test_live_bytes_counts_real_cpu_tensors_alone():
    before = memory.live_bytes()
    others = [torch.empty(MiB, device="meta"), torch.eye(4).to_sparse()]
    with FakeTensorMode():
        others.append(torch.empty(MiB))
    assert memory.live_bytes() == before
    parameter = torch.nn.Parameter(torch.empty(MiB))
    parameter.grad = torch.empty(MiB)
    assert memory.live_bytes() == before + 8 * MiB
    del others


def test_one_measurement_at_a_time():
    with measure(), pytest.raises(ValueError, match="is being measured or profiled already"):
        with measure():
            pass


def test_an_exception_inside_goes_through():
    with pytest.raises(KeyError, match="planted"), measure():
        raise KeyError("planted")
    with measure() as usage:  # the profiler is free for the next block
        tensor(2)
    assert usage.peak_allocated == usage.start + 2 * MiB


# -------------------------------------------------------------------------- on a mocked accelerator
@pytest.fixture
def card(monkeypatch):
    """torch.accelerator's counters as a card would keep them: a list of the calls in order."""
    calls = []

    def counter(name, value):
        def call():
            calls.append(name)
            return value

        monkeypatch.setattr(torch.accelerator, name, call, raising=False)

    counter("memory_allocated", 100)
    counter("reset_peak_memory_stats", None)
    counter("synchronize", None)
    counter("max_memory_allocated", 700)
    counter("max_memory_reserved", 800)
    counter("empty_cache", None)
    monkeypatch.setattr(memory, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda: 900)
    return calls


def test_an_accelerator_gives_its_three_numbers(card):
    with measure() as usage:
        card.append("block")
    assert (usage.device, usage.start) == ("cuda", 100)
    assert (usage.peak_allocated, usage.peak_reserved, usage.used) == (700, 800, 900)
    at = card.index
    assert at("reset_peak_memory_stats") < at("block") < at("max_memory_allocated")
    assert at("block") < at("synchronize") < at("max_memory_allocated")


def test_an_accelerator_without_counters_has_no_numbers(card, monkeypatch):
    def missing():
        raise RuntimeError("this allocator keeps no statistics")

    for name in ("memory_allocated", "reset_peak_memory_stats", "max_memory_allocated"):
        monkeypatch.setattr(torch.accelerator, name, missing)
    monkeypatch.setattr(torch.accelerator, "max_memory_reserved", missing)
    monkeypatch.setattr(memory, "device", lambda: torch.device("mps"))
    with measure() as usage:
        pass
    assert (usage.peak_allocated, usage.peak_reserved, usage.used) == (None, None, None)


@pytest.mark.parametrize("error", [pynvml.NVMLError_NoPermission, RuntimeError])
def test_a_driver_that_does_not_tell_costs_one_number(card, monkeypatch, error):
    """In a container, or on a slice of a card (MIG)."""

    def refused():
        raise error("no")

    monkeypatch.setattr(torch.cuda, "device_memory_used", refused)
    with measure() as usage:
        pass
    assert (usage.peak_allocated, usage.used) == (700, None)


def test_free_empties_the_cache(card):
    free()
    assert card == ["empty_cache"]


@pytest.mark.gpu
def test_the_peak_on_a_real_card():
    with measure() as usage:
        a = torch.empty(10 * MiB, dtype=torch.uint8, device="cuda")
        del a
        b = torch.empty(5 * MiB, dtype=torch.uint8, device="cuda")
    assert usage.peak_allocated == usage.start + 10 * MiB
    assert usage.used > usage.peak_reserved >= usage.peak_allocated
    del b


# -------------------------------------------------------------------------------------------- texts
@pytest.mark.parametrize(
    "n, text",
    [
        (None, "-"),
        (0, "0 MiB"),
        (512, "0.500 KiB"),
        (2048, "2.00 KiB"),
        (-(2**19), "-0.500 MiB"),
        (2**20, "1.00 MiB"),
        (44 * 2**20, "44.0 MiB"),
        (100 * 2**20, "100 MiB"),
        (107_374_183, "0.100 GiB"),
        (2**30, "1.00 GiB"),
        (16 * 2**30, "16.00 GiB"),
        (1536 * 2**20, "1.50 GiB"),
        (2000 * 2**30, "2,000.00 GiB"),
        (2**29, "0.500 GiB"),
        (25_911_196, "24.7 MiB"),
        (2**30 - 1, "1.00 GiB"),
        (-(2**31), "-2.00 GiB"),
    ],
)
def test_sizes_as_text(n, text):
    assert gib(n) == text


@pytest.mark.parametrize("made_first", [False, True])
def test_imports_are_swept_once_and_what_stood_before_them_stays_seen(made_first):
    code = f"""
import gc, torch
mine = torch.ones(2**20) if {made_first} else None
import helpers
helpers.predict
print(gc.get_freeze_count() > 0)
helpers.memory.spare_what_is_loaded()
new = torch.ones(2**18)
print(gc.get_freeze_count() > 0, helpers.memory.live_bytes() >= 2**22 * {made_first} + 2**20)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", str(not made_first), "True"]


@pytest.mark.parametrize("call", ["train", "predict"])
def test_a_run_sweeps_the_libraries_no_more(call, monkeypatch):
    called = []
    module = importlib.import_module(
        "helpers.training" if call == "train" else "helpers.prediction"
    )
    monkeypatch.setattr(module, "spare_what_is_loaded", lambda: called.append(call))
    with pytest.raises(ValueError, match="no_such"):
        getattr(helpers, call)(helpers.language_modelling("tiny", length=8), no_such=1)
    assert called == [call]


def test_importing_helpers_loads_nothing_and_changes_nothing():
    code = """
import gc, os, sys, warnings
import matplotlib
style = lambda: [matplotlib.rcParams[k] for k in ("figure.figsize", "axes.prop_cycle")]
usual, filters, before = style(), list(warnings.filters), dict(os.environ)
import helpers
print(len({"torch", "transformers", "pandas", "matplotlib.pyplot"} & set(sys.modules)))
print(list(warnings.filters) == filters, dict(os.environ) == before)
names = [name for name in helpers.__all__ if name != "show"]
print(all(getattr(helpers, name) for name in names), "show" in dir(helpers))
changed = {"CUDA_VISIBLE_DEVICES", "KINETO_LOG_LEVEL"} & set(os.environ)
ours = [f for f in warnings.filters if f[1] and "gradient_checkpointing" in f[1].pattern]
print(changed == set(), ours == [], style() == usual, gc.get_freeze_count())
helpers.show
print(style() == usual)
"""
    clean = {
        k: v for k, v in os.environ.items() if k not in ("CUDA_VISIBLE_DEVICES", "KINETO_LOG_LEVEL")
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=clean
    )
    assert done.stdout.splitlines() == ["0", "True True", "True True", "True True True 0", "False"]


def test_the_profiler_is_silent_from_the_first_measurement_on():
    code = """
import torch, helpers
with helpers.measure() as usage:
    kept = torch.ones(1000)
print(usage.peak_allocated)
"""
    clean = {k: v for k, v in os.environ.items() if k != "KINETO_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=clean
    )
    assert int(done.stdout) >= 4000 and done.stderr == ""
