"""The second blind test keeps its first predictions once, and says of them what they show."""

import pandas as pd
import pytest

from evidence import second_blind, trust

ROWS = pd.DataFrame(
    {
        "set": ["a", "a", "b"],
        "run": ["one", "two", "one"],
        "card": ["T4", "T4", "L4"],
        "reason": ["second blind test: committed before", "second blind test", "second blind test"],
        "seconds": [1.0, 2.0, 4.0],
        "predicted": [0.88, 1.9, 2.0],
        "low": [0.8, 1.5, 1.0],
        "high": [1.2, 2.5, 3.0],
        "limited_by": ["host"] * 3,
        "told": [0.9, 1.9, 2.0],
        "roofline": [0.5, 0.5, 0.5],
        "predicted_with": ["torch 2.13.0"] * 3,
        "date": ["2026-11-27"] * 3,
    }
)


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setattr(second_blind, "SPEEDS", tmp_path / "speeds.csv")
    monkeypatch.setattr(second_blind, "FIRST", tmp_path / "first.csv")
    ROWS.assign(reason=[*ROWS["reason"][:2], "another"]).to_csv(second_blind.SPEEDS, index=False)
    return tmp_path


def test_first_predictions_are_kept_once(files):
    assert second_blind.rows() is None
    second_blind.write()
    assert list(second_blind.rows()["run"]) == ["one", "two"]  # not that of another reason
    with pytest.raises(ValueError, match="first predictions are made once"):
        second_blind.write()


def test_a_row_without_a_prediction_is_named(files):
    pd.read_csv(second_blind.SPEEDS).assign(predicted=float("nan")).to_csv(
        second_blind.SPEEDS, index=False
    )
    with pytest.raises(ValueError, match="python -m evidence a$"):
        second_blind.write()
    assert not second_blind.FIRST.exists()


def test_words_are_counted_by_hand():
    found = ROWS.assign(error=ROWS["predicted"] / ROWS["seconds"] - 1)
    said = second_blind.words(found, trust.percent)
    assert "3 passes and steps on 2 kinds of card" in said
    assert "leans 12 % to the fast side" in said and "67 % lay in their range" in said
    assert "of 1 pairs on one machine" in said and "100 % were put in order" in said


def test_the_kept_predictions_are_of_all_rows_of_the_test():
    if not second_blind.FIRST.exists():
        pytest.skip("nothing was predicted yet")
    rows = second_blind.tested(pd.read_csv(second_blind.SPEEDS))
    first = pd.read_csv(second_blind.FIRST)
    assert list(first["set"] + first["run"]) == list(rows["set"] + rows["run"])
    assert len(first) == 164 and (rows["role"] != "excluded").all()
