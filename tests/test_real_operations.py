"""What real cards took: single operations predicted again, and a prediction for each judged row."""

import csv
from pathlib import Path

import pytest

from real_cards import (
    bert_large,
    book_gpt2,
    liger_operations,
    litgpt_finetuning,
    torchao_offloading,
    torchtune_packed,
    vit_large,
)

PEAKS = Path(__file__).parents[1] / "data" / "measurements" / "peaks.csv"
MODULES = (liger_operations, litgpt_finetuning, torchao_offloading, torchtune_packed)
MODULES += (bert_large, book_gpt2, vit_large)
RUNS = dict(liger_operations.runs())
FIRST = [f"{name} {values[0]}" for name, (*_, values) in liger_operations.OPERATIONS.items()]


@pytest.fixture(scope="module")
def measured() -> dict[tuple[str, str], int]:
    with PEAKS.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["role"] == "judged"]
    return {(row["set"], row["run"]): int(row["measured"]) for row in rows}


@pytest.mark.parametrize("module", MODULES)
def test_every_judged_row_is_predicted_and_no_other(module, measured):
    for name, runs in module.SETS.items():
        assert {run for run, _ in runs()} == {run for kind, run in measured if kind == name}


@pytest.mark.parametrize("run", FIRST)
def test_an_operation_takes_what_a_card_took(run, measured):
    took = measured["liger", run]
    assert RUNS[run]()["allocated"] == pytest.approx(took, rel=0.0015, abs=2048)
