"""What real cards took: single operations predicted again, and a prediction for each judged row."""

import csv
import importlib
import pkgutil
from pathlib import Path

import pytest

import evidence.sources
from evidence.cards import Reading, readings_after_emptying, readings_before_emptying
from evidence.sources import liger_operations
from fake_cuda import MiB, Simulation

MEASURED = Path(__file__).parents[1] / "data" / "measurements"
MODULES = [name for _, name, _ in pkgutil.iter_modules(evidence.sources.__path__)]
RUNS = dict(liger_operations.runs())
FIRST = [f"{name} {values[0]}" for name, (*_, values) in liger_operations.OPERATIONS.items()]


def wanted(table: str) -> list[dict[str, str]]:
    """The rows that are predicted."""
    with (MEASURED / f"{table}.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["role"] != "excluded"]


@pytest.fixture(scope="module")
def measured() -> dict[tuple[str, str], int]:
    return {(row["set"], row["run"]): int(row["measured"]) for row in wanted("peaks")}


@pytest.mark.parametrize(("table", "found"), [("peaks", "PEAKS"), ("speeds", "STEPS")])
def test_every_row_that_is_predicted_has_its_run_in_one_module(table, found):
    modules = [importlib.import_module(f"evidence.sources.{name}") for name in MODULES]
    sets = [item for module in modules for item in getattr(module, found, {}).items()]
    assert len(sets) == len(dict(sets)) and all(
        hasattr(module, "PEAKS") or hasattr(module, "STEPS") for module in modules
    )
    runs, absent = [], set()  # sets of releases of a package that do not lie here
    for name, yields in sets:
        try:
            runs += [(name, run) for run, _ in yields()]
        except ImportError:
            absent.add(name)
    assert len(runs) == len(set(runs)) and absent <= {"liger-kernels"}
    rows = wanted(table) + (wanted("several_cards") if table == "peaks" else [])
    rows = {(row["set"], row["run"]) for row in rows if row["set"] not in absent}
    assert rows <= set(runs)
    known = {name for name, _ in rows}
    assert {name for name, _ in runs} <= known
    if table == "peaks":
        assert {run for run in runs if run[0] not in ("peft-texts", "peft-images")} <= rows


def test_what_stands_when_a_cache_is_emptied():
    """By hand: a block of 4 MiB, then one of 24 MiB in a segment of its own, the first freed."""
    log = [(0, 4 * MiB), (-1, 0), (1, 24 * MiB), (0, -4 * MiB), (-1, 0)]
    found = Simulation(0, {}, {}, log=log)
    small = 20 * MiB  # the segment of a block of 1 to 10 MiB
    before = [Reading(4 * MiB, small, small), Reading(24 * MiB, small + 24 * MiB, small + 24 * MiB)]
    after = [before[0], Reading(24 * MiB, 24 * MiB, small + 24 * MiB)]
    assert readings_before_emptying(found) == before
    assert readings_after_emptying(found) == after


@pytest.mark.parametrize("run", FIRST)
def test_an_operation_takes_what_a_card_took(run, measured):
    took = measured["liger", run]
    assert RUNS[run]()["allocated"] == pytest.approx(took, rel=0.0015, abs=2048)
