"""Runs as data: the summary, tables with their error rows, recording and loading."""

import datetime
import types
from dataclasses import replace

import pandas as pd
import pytest
import torch

from helpers import Prediction, Run, compare, load, prediction, record, runs, training

GIB = 2**30


def make_run(**changes):
    run = Run(
        name="baseline",
        workload="tiny BERT, 128 tokens",
        device="cpu",
        settings={"per_device_train_batch_size": 4},
        seconds=2.0,
        steps=10,
        samples=40,
        tokens=5120,
        peak_allocated=2 * GIB,
        losses=[5.5, 3.0, 2.25],
    )
    return replace(run, **changes)


def make_prediction(**changes):
    shares = dict(zip(runs.CATEGORIES, [GIB, 0, 0, GIB // 2, GIB // 2], strict=True))
    made = Prediction(
        name="baseline",
        workload="tiny BERT, 128 tokens",
        device="cpu",
        settings={"per_device_train_batch_size": 4},
        peak_allocated=2 * GIB,
        by_category=shares,
        peak_by_category=shares,
        took=0.5,
    )
    return replace(made, **changes)


# ------------------------------------------------------------------------------------------ summary
def test_the_summary_has_three_lines():
    assert str(make_run()).splitlines() == [
        "Time: 2.00 s (10 steps)",
        "Samples/second: 20.00",
        "CPU memory: 2.00 GiB allocated",
    ]


def test_the_summary_of_a_card_names_all_sizes():
    run = make_run(device="T4", peak_reserved=3 * GIB, used=4 * GIB)
    last = str(run).splitlines()[-1]
    assert last == "GPU memory: 2.00 GiB allocated, 3.00 GiB reserved, 4.00 GiB used"


def test_a_device_without_counters_says_so():
    text = str(make_run(device="mps", peak_allocated=None, note="random weights"))
    assert text.splitlines()[2:] == ["GPU memory: not reported here", "random weights"]


# ------------------------------------------------------------------------------------------ compare
def test_a_prediction_and_its_run_get_an_error_row():
    table = compare(make_prediction(), make_run(peak_allocated=int(2.5 * GIB)))
    assert list(table.index) == ["baseline", "baseline", "error"]
    assert list(table["kind"]) == ["predicted", "measured", "error"]
    assert list(table["allocated"]) == ["2.00 GiB", "2.50 GiB", "-20.00 %"]
    assert table["time (s)"].tolist() == ["", "2.00", ""]
    assert table["samples/s"].tolist() == ["", "20.00", ""]
    assert table["loss"].tolist() == ["", "5.500 → 2.250", ""]


@pytest.mark.parametrize(
    "changes",
    [
        {"settings": {"per_device_train_batch_size": 8}},
        {"device": "T4"},
        {"workload": "tiny Llama, 128 tokens"},
        {"changes": ("lora",)},
    ],
    ids=str,
)
def test_no_error_row_for_what_is_not_the_same(changes):
    assert "error" not in compare(make_prediction(**changes), make_run()).index


def test_how_long_a_run_lasts_is_no_part_of_the_prediction():
    settings = make_run().settings | {"max_steps": 3}
    assert "error" in compare(make_prediction(), make_run(settings=settings)).index


def test_each_run_finds_its_own_prediction():
    four, eight = ({"per_device_train_batch_size": n} for n in (4, 8))
    table = compare(
        make_prediction(settings=four, peak_allocated=1 * GIB),
        make_prediction(settings=eight, peak_allocated=3 * GIB),
        make_run(settings=eight, peak_allocated=2 * GIB),
        make_run(settings=four, peak_allocated=2 * GIB),
        make_run(settings=four, peak_allocated=2 * GIB),  # its prediction is taken
    )
    assert table.loc["error", "allocated"].tolist() == ["+50.00 %", "-50.00 %"]
    assert list(table["kind"])[-3:] == ["measured", "error", "measured"]


def test_a_prediction_after_its_run_is_not_matched():
    assert "error" not in compare(make_run(), make_prediction()).index


def test_used_is_only_judged_where_the_context_is_known():
    sizes = dict(device="V100", peak_reserved=3 * GIB)
    run = make_run(used=4 * GIB, **sizes)
    judged = compare(make_prediction(context=GIB, **sizes), run).loc["error"]
    assert judged["used"] == "+0.00 %"
    open_ = compare(make_prediction(context=None, **sizes), run).loc["error"]
    assert open_["used"] == "" and open_["reserved"] == "+0.00 %"


def test_a_card_has_a_column_that_says_whether_it_fits():
    sizes = dict(device="T4", peak_reserved=3 * GIB, context=0)
    fits, not_ = (make_prediction(capacity=n * GIB, **sizes) for n in (4, 2))
    assert compare(fits, not_)["fits"].tolist() == ["yes", "no"]
    assert compare(fits, make_run())["fits"].tolist() == ["yes", ""]
    assert "fits" not in compare(make_prediction(), make_run())


def test_a_prediction_and_a_run_are_worth_reading_by_themselves():
    found = make_prediction(device="T4", peak_reserved=3 * GIB, capacity=4 * GIB)
    assert repr(found).splitlines()[-1] == "With the context it fits the card's 4.00 GiB."
    assert "<td>yes</td>" in found._repr_html_()
    assert repr(make_run()) == str(make_run())


def test_predictions_alone_show_their_categories():
    table = compare(make_prediction(), make_prediction(name="other"))
    for category in runs.CATEGORIES:
        assert category in table
    assert table["activations"].tolist() == ["0.500 GiB", "0.500 GiB"]
    assert "time (s)" not in table
    assert "activations" not in compare(make_prediction(), make_run())


def test_columns_that_nobody_fills_are_left_out():
    table = compare(make_run(losses=[]))
    assert not {"reserved", "used", "loss"} & set(table.columns)
    assert not table.isna().any().any()


def test_a_run_on_a_card_is_judged_by_the_prediction_for_here(monkeypatch):
    # Both must call the card by one name, or the table shows no error.
    for module in (training, prediction):
        monkeypatch.setattr(module, "device", lambda: torch.device("cuda"))
    found = types.SimpleNamespace(name="Tesla T4", total_memory=15 * GIB, major=7, minor=5)
    found.multi_processor_count = 40
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: found)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla T4")
    predicted = make_prediction(device=prediction._card("here").name)
    assert "error" in compare(predicted, make_run(device=training._device_name())).index


# ---------------------------------------------------------------------------------- record and load
@pytest.fixture
def course(tmp_path, monkeypatch):
    """An empty course folder, with the working folder below it as in a notebook."""
    (tmp_path / "data" / "measurements").mkdir(parents=True)
    (tmp_path / "data" / "gpus.csv").write_text("name\n")
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    return tmp_path


def test_what_is_recorded_can_be_read(course):
    settings = {"bf16": True, "optimizer": make_run}
    path = record("01", make_prediction(context=7), make_run(settings=settings, used=GIB))
    assert path == course / "build" / "runs" / "01.csv"
    table = pd.read_csv(path)
    assert table["lesson"].astype(str).tolist() == ["1", "1"]  # a CSV has no text "01"
    assert table["kind"].tolist() == ["predicted", "measured"]
    assert table["peak_allocated"].tolist() == [2 * GIB, 2 * GIB]
    assert table["settings"].tolist() == [
        "per_device_train_batch_size=4",
        "bf16=True; optimizer=make_run",
    ]
    assert table["activations"].tolist()[0] == GIB // 2 and table["activations"].isna()[1]
    assert (table["first_loss"][1], table["last_loss"][1]) == (5.5, 2.25)
    assert table["torch"].notna().all() and table["transformers"].notna().all()
    assert datetime.datetime.fromisoformat(table["date"][0])
    assert (table["context"][0], table["used"][1], table["seconds"][1]) == (7, GIB, 2)
    assert (table["samples_per_second"][1], table["tokens_per_second"][1]) == (20, 2560)
    assert table["name"][1] == "baseline" and table["device"][1] == "cpu"
    assert table["workload"][1] == "tiny BERT, 128 tokens" and "peak_reserved" in table


def test_recording_appends(course):
    record("01", make_run())
    path = record("01", make_run(name="second"), make_run(name="third"))
    assert pd.read_csv(path)["name"].tolist() == ["baseline", "second", "third"]
    assert record("02", make_run()) != path


def test_nothing_is_not_recorded(course):
    with pytest.raises(ValueError, match="nothing to record"):
        record("01")
    assert not (course / "build").exists()


def test_a_folder_that_cannot_be_written_ends_no_lesson(course, capsys):
    (course / "build").mkdir()
    (course / "build" / "runs").write_text("")  # a file where the folder should be, even for root
    assert record("01", make_run()) is None
    assert capsys.readouterr().out.startswith("Not recorded: build/runs")


def test_an_empty_table_is_begun_anew(course):
    path = record("01", make_run())
    path.write_text("")  # a full disk, say
    assert pd.read_csv(record("01", make_run()))["name"].tolist() == ["baseline"]


def test_rows_of_an_older_course_are_kept(course):
    folder = course / "build" / "runs"
    folder.mkdir(parents=True)
    for generation in ("first", "second"):  # twice on one day: neither may be lost
        (folder / "01.csv").write_text(f"old,columns\n{generation},1\n")
        assert pd.read_csv(record("01", make_run()))["name"].tolist() == ["baseline"]
    kept = [p.read_text() for p in folder.glob("*.csv") if p.name != "01.csv"]
    assert sorted(text.split()[1] for text in kept) == ["first,1", "second,1"]


def test_recorded_rows_are_loaded_from_both_folders(course):
    pd.DataFrame({"a": [1]}).to_csv(course / "data" / "predictions.csv", index=False)
    pd.DataFrame({"b": [2]}).to_csv(course / "data" / "measurements" / "published.csv", index=False)
    assert load("predictions")["a"].tolist() == [1]
    assert load("published")["b"].tolist() == [2]
    pd.DataFrame({"b": [3]}).to_csv(course / "data" / "published.csv", index=False)
    assert load("published")["b"].tolist() == [3]  # with predictions beside


def test_an_unknown_table_names_those_there_are(course):
    (course / "data" / "measurements" / "published.csv").write_text("a\n1\n")
    with pytest.raises(FileNotFoundError, match="choose from gpus, published"):
        load("zzz")
    with pytest.raises(FileNotFoundError, match="did you mean 'published'"):
        load("publishd")


def test_the_published_rows_are_there():
    table = load("published")
    assert len(table) >= 9 and table["source"].notna().all()
