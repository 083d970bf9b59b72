"""Single operations, predicted, against what five real cards allocated for them."""

import csv
from pathlib import Path

import pytest

from real_cards import liger_operations

PEAKS = Path(__file__).parents[1] / "data" / "measurements" / "peaks.csv"
RUNS = dict(liger_operations.runs())
FIRST = [f"{name} {values[0]}" for name, (*_, values) in liger_operations.OPERATIONS.items()]


@pytest.fixture(scope="module")
def measured() -> dict[str, int]:
    with PEAKS.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["set"] == "liger"]
    return {row["run"]: int(row["measured"]) for row in rows if row["role"] == "judged"}


def test_every_judged_operation_is_predicted(measured):
    assert set(RUNS) == set(measured)


@pytest.mark.parametrize("run", FIRST)
def test_an_operation_takes_what_a_card_took(run, measured):
    assert RUNS[run]()["allocated"] == pytest.approx(measured[run], rel=0.0015, abs=2048)
