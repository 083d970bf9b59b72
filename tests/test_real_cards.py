"""What others measured on real cards, and how the recorded predictions meet it."""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from helpers import report
from helpers.__main__ import main

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools")]

import readme_picture  # noqa: E402  (after the path is set)
import record_real_cards as recorder  # noqa: E402


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    return report.judged()


def test_the_table_of_measurements_is_right():
    recorder.checked(pd.read_csv(recorder.MEASURED), "peaks.csv")


def test_every_measurement_stands_in_the_table_of_predictions():
    measured, both = pd.read_csv(recorder.MEASURED), pd.read_csv(recorder.PREDICTED)
    pd.testing.assert_frame_equal(both[recorder.COLUMNS], measured, check_dtype=False)
    without = both[(both["role"] != "excluded") & both["predicted"].isna()]
    assert without.empty, f"run tools/record_real_cards.py: {without['run'].tolist()}"


def test_every_run_that_is_predicted_is_measured():
    measured = pd.read_csv(recorder.MEASURED)
    assert set(recorder.sets()) <= set(measured["set"])


def test_predictions_meet_what_was_measured(rows):
    sizes = 100 * rows["error"].abs()
    assert len(rows) >= 120 and rows["set"].nunique() >= 5 and rows["card"].nunique() >= 5
    assert sizes.median() <= 1 and sizes.quantile(0.9) <= 3


def test_a_row_that_is_far_off_says_why(rows):
    far = rows[rows["error"].abs() > 0.05]
    silent = far[far["remark"].isna()]
    assert silent.empty, f"why, or unexplained? {silent[['set', 'run', 'error']].to_string()}"


def row(**changes) -> pd.DataFrame:
    fine = dict.fromkeys(recorder.COLUMNS, "x")
    fine |= {"card": "T4", "quantity": "allocated", "measured": 2**30, "role": "judged"}
    return pd.DataFrame([fine | changes])


@pytest.mark.parametrize(
    ("defect", "message"),
    [
        (row().drop(columns="role"), "lacks the column role"),
        (row(card="T5"), "'T5' is not a known GPU"),
        (row(role="good"), "row 2: the role is none of judged, calibrates, excluded"),
        (row(role="excluded", reason=None), "row 2: a row that does not judge needs a reason"),
        (row(measured="much"), "row 2: measured is not a positive number"),
        (row(measured=-1), "row 2: measured is not a positive number"),
        (pd.concat([row(), row()], ignore_index=True), "row 3: set, run and quantity stand"),
    ],
)
def test_a_planted_defect_in_the_measurements_is_caught(defect, message):
    with pytest.raises(ValueError, match="peaks.csv|GPU") as error:
        recorder.checked(defect, "peaks.csv")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_set_is_recorded_beside_its_measurement(tmp_path, monkeypatch):
    measured, path = tmp_path / "peaks.csv", tmp_path / "real_cards.csv"
    pd.concat(
        [
            row(set="a", run="one", measured=100),
            row(set="a", run="two", role="excluded"),
            row(set="b", run="one", quantity="reserved", measured=50),
        ]
    ).to_csv(measured, index=False)
    found = {"a": [("one", lambda: {"allocated": 90})], "b": [("one", lambda: {"reserved": 60})]}
    monkeypatch.setattr(recorder, "sets", lambda: {k: lambda k=k: found[k] for k in found})
    recorder.record(["a", "b"], measured, path)
    found["b"] = [("one", lambda: {"reserved": 55})]
    recorder.record(["b"], measured, path)  # the row of the other set stays
    table = pd.read_csv(path)
    assert table["predicted"].tolist()[::2] == [90, 55] and pd.isna(table["predicted"][1])
    assert report.judged(table)["error"].round(2).tolist() == [-0.1, 0.1]
    found["b"] = [("one", lambda: {"allocated": 55})]
    with pytest.raises(ValueError, match="no prediction of b / one / reserved"):
        recorder.record(["b"], measured, path)
    assert pd.read_csv(path).equals(table)  # nothing is lost by the error


def test_the_report_says_it(capsys, rows):
    assert main(["report"]) == 0
    said = capsys.readouterr().out
    assert (
        f"The {len(rows)} rows that judge" in said
        and "blind, as first predicted" in said
        and "data/real_cards.png" in said
    )
    assert all(name in said for name in rows["set"].unique())


def test_the_picture_has_a_dot_for_each_row(rows):
    figure = readme_picture.draw(rows)
    sets = [line for line in figure.axes[0].lines if line.get_marker() in readme_picture.MARKERS]
    assert sum(len(line.get_xdata()) for line in sets) == len(rows)
    plt.close(figure)


def test_a_table_without_a_column_is_one_sentence(rows):
    with pytest.raises(ValueError, match="lacks the column card"):
        report.judged(rows.drop(columns=["card"]))
