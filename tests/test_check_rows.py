"""`make check-rows`: rows that somebody contributes."""

import csv

import pytest

from tools import check_rows
from tools.shared.rows import COLUMNS

ROW = dict.fromkeys(COLUMNS, "") | {
    "section": "matrix",
    "run": "gpt2 batch 1 fp32",
    "card": "NVIDIA A100-SXM4-80GB",
    "driver": "580.82",
    "torch": "2.13.0+cu130",
    "transformers": "5.23.0",
    "date": "2026-11-22T10:00:00",
    "outcome": "measured",
    "settings": "per_device_train_batch_size=1",
    "seconds": "1.5",
    "peak_allocated": str(2**31),
    "predicted_allocated": str(2**31),
    "error_allocated": "0.0",
    "error_reserved": "0.01",
    "error_samples_per_second": "0.2",
}


def written(path, rows, columns=COLUMNS):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_good_rows_are_taken_and_their_errors_shown(tmp_path, capsys):
    skipped = ROW | {"run": "b", "outcome": "skipped: peft is missing", "peak_allocated": ""}
    path = written(tmp_path / "card.csv", [ROW, skipped])
    assert check_rows.main([str(path)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("card.csv: can be taken") and "Errors of the predictions" in text


FAULTS = {
    "an unknown card": ({"card": "NVIDIA Imaginary 9000"}, "is not in data/gpus"),
    "a CPU": ({"card": "cpu"}, "rows of a CPU are not taken"),
    "no version": ({"torch": ""}, "row 2: torch is empty"),
    "an outcome of one's own": ({"outcome": "good"}, "none of the kit's"),
    "a peak below nothing": (
        {"peak_allocated": "-5"},
        "peak_allocated is '-5', which is no positive number",
    ),
    "a time in words": ({"seconds": "fast"}, "which is no positive number"),
    "measured, without a peak": ({"peak_allocated": ""}, "is empty, though measured"),
    "no date": ({"date": "yesterday"}, "date is 'yesterday', which is no day"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_is_told_with_its_line(case, tmp_path, capsys):
    change, told = FAULTS[case]
    assert check_rows.main([str(written(tmp_path / "card.csv", [ROW | change]))]) == 1
    text = capsys.readouterr().out
    assert told in text and "row 2" in text


def test_a_row_twice_a_row_cut_short_and_another_table(tmp_path, capsys):
    twice = written(tmp_path / "twice.csv", [ROW, ROW])
    cut = written(tmp_path / "cut.csv", [ROW])
    cut.write_text(cut.read_text() + "matrix,gpt2\n")
    other = written(tmp_path / "other.csv", [ROW], COLUMNS[:-1])
    paths = (twice, cut, other, tmp_path / "none.csv")
    assert check_rows.main([str(path) for path in paths]) == 1
    text = capsys.readouterr().out
    for told in (
        "row 3: section, run, torch",
        "row 3 has 2 cells",
        "send the file as it is",
        "read",
    ):
        assert told in text


def test_no_file_is_named(capsys):
    assert check_rows.main([]) == 2
    assert "make check-rows ROWS=" in capsys.readouterr().err
