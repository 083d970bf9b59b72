"""What others measured on real cards, and how the recorded predictions meet it."""

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from evidence import peaks as recorder
from evidence import picture, runs, traces
from evidence.runs import Job
from planner import report
from planner.__main__ import main


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    return report.judged()


@pytest.mark.parametrize("paths", recorder.TABLES)
def test_every_measurement_stands_in_the_table_of_predictions(paths):
    measured, both = map(pd.read_csv, paths)
    pd.testing.assert_frame_equal(both[recorder.COLUMNS], measured, check_dtype=False)
    without = both[(both["role"] != "excluded") & both["predicted"].isna()]
    assert without.empty, f"make evidence: {without['run'].tolist()}"


def test_every_run_that_is_predicted_is_measured():
    measured = {name for path, _ in recorder.TABLES for name in pd.read_csv(path)["set"]}
    assert set(runs.of_peaks()) <= measured


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


def predicted(name: str, **amounts: int) -> dict:
    """The run "one" of a set as the recorder has it when it is predicted."""
    job = Job("source", "evidence.sources.liger_operations", name, "one", bytes_too=True)
    return {job: traces.Predicted(amounts, None)}


def test_a_set_is_recorded_beside_its_measurement(tmp_path):
    measured, path = tmp_path / "peaks.csv", tmp_path / "real_cards.csv"
    pd.concat(
        [
            row(set="a", run="one", measured=100),
            row(set="a", run="two", role="excluded"),
            row(set="b", run="one", quantity="reserved", measured=50),
        ]
    ).to_csv(measured, index=False)
    recorder.write(predicted("a", allocated=90) | predicted("b", reserved=60), measured, path)
    recorder.write(predicted("b", reserved=55), measured, path)  # the row of the other set stays
    table = pd.read_csv(path)
    assert table["predicted"].tolist()[::2] == [90, 55] and pd.isna(table["predicted"][1])
    assert table["code_hash"][0] == table["code_hash"][2] and pd.isna(table["code_hash"][1])
    assert report.judged(table)["error"].round(2).tolist() == [-0.1, 0.1]
    with pytest.raises(ValueError, match="no prediction of b / one / reserved"):
        recorder.write(predicted("b", allocated=55), measured, path)
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
    figure = picture.draw(rows)
    sets = [line for line in figure.axes[0].lines if line.get_marker() in picture.MARKERS]
    assert sum(len(line.get_xdata()) for line in sets) == len(rows)
    plt.close(figure)


def test_a_table_without_a_column_is_one_sentence(rows):
    with pytest.raises(ValueError, match="lacks the column card"):
        report.judged(rows.drop(columns=["card"]))
