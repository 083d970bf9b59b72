"""How the evidence is made again: what is planned, kept, written, and by which code."""

import ast
import os
import subprocess
import sys

import pandas as pd
import pytest

from evidence import __main__ as command
from evidence import code, peaks, predictions, record, runs, tables, traces
from evidence.runs import Job

JOB = Job("source", "evidence.sources.liger_operations", "liger", "a run", bytes_too=True)


# ------------------------------------------------------------------------------- hashes of code
def test_a_hash_covers_what_a_row_went_through():
    behind = code.modules_behind("evidence.sources.fms")
    assert {"evidence.sources.fms", "evidence.techniques", "fake_cuda.cost"} <= behind
    assert {"helpers.prediction", "helpers.workloads"} <= behind
    assert not {"helpers.show", "helpers.training", "evidence.tables", "fake_cuda.files"} & behind
    assert not any(name.startswith("fake_cuda.scripts") for name in behind)
    assert "helpers.prediction" not in code.modules_behind("evidence.sources.liger_operations")
    assert "evidence.libraries.torch_2_1" in code.modules_behind(runs.VERSIONS)


def test_every_module_of_the_simulation_is_covered():
    behind = code.modules_behind("evidence.sources.liger_operations")
    files = (tables.ROOT / "fake_cuda").rglob("*.py")
    names = [".".join(path.relative_to(tables.ROOT).with_suffix("").parts) for path in files]
    left = {name.removesuffix(".__init__") for name in names} - behind
    left = {name for name in left if not name.startswith(code.NOT_RUN)}
    for word in ("torch_compile", "fully_shard"):  # which that source does not ask for
        left -= {f"fake_cuda.{name}" for name in code.ON_REQUEST[word].split()}
    # Names and words alone, readers of real cards' logs and of data/gpus.csv, what `estimate` is
    # made of, how modules are loaded, and by what rules the planner's ranks are told by few layers.
    others = ("logs", "cards", "estimates", "steps", "rebuilt", "loading", "units", "replicas")
    others = {f"fake_cuda.{name}" for name in others}
    assert left <= {"fake_cuda"} | others


def test_what_a_run_has_to_ask_for_counts_where_it_is_asked_for():
    plain = code.modules_behind("evidence.sources.fms")
    kernels = code.modules_behind("evidence.sources.liger_kernels")
    assert {"fake_cuda.launches", "fake_cuda.choices.liger"} <= kernels - plain
    assert "fake_cuda.compiled" not in kernels | plain
    assert "fake_cuda.compiled_plan" in code.modules_behind("evidence.sources.compiled_course")
    of_a_script = code.modules_behind("evidence.sources.fms_ranks")
    assert {"fake_cuda.scripts.group", "fake_cuda.scripts.ranks"} <= of_a_script - plain
    names = {name for names in code.ON_REQUEST.values() for name in names.split()}
    assert all(code._file(f"fake_cuda.{name}") for name in names)


def test_a_hash_changes_with_what_the_code_does_and_not_with_its_words():
    def meaning(text: str) -> str:
        return code.meaning(ast.parse(text))

    plain = meaning("def f(a):\n    return a + 1\n")
    assert plain == meaning('def f(a):\n    """One more."""\n    return (a + 1)  # one\n')
    assert plain != meaning("def f(a):\n    return a + 2\n")
    assert len(code.code_hash("evidence.pairs")) == code.DIGITS


def test_a_set_that_reads_sources_has_their_code_in_its_hash():
    assert runs.hash_of("evidence.pairs") != code.code_hash("evidence.pairs")


# ---------------------------------------------------------------------------------- what is due
def rows(**changes) -> pd.DataFrame:
    fine = {"set": "a", "run": "one", "quantity": "allocated", "measured": 1.0, "remark": "x"}
    return pd.DataFrame([fine | changes])


@pytest.mark.parametrize(
    ("change", "stands"),
    [
        ({}, True),
        ({"remark": "other words"}, True),
        ({"measured": 2}, False),
        ({"run": "two"}, False),
        ({"code_hash": "other"}, False),
        ({"code_hash": None}, False),  # made before there were hashes
        ({"predicted": None}, False),
    ],
)
def test_a_row_stands_if_the_code_and_what_was_measured_are_the_same(change, stands):
    recorded = rows(**{"predicted": 1, "code_hash": "now"} | change)
    key = ["set", "run", "quantity"]
    found = tables.unchanged(rows(), recorded, list(rows()), key, pd.Series(["now"]))
    assert found.tolist() == [stands]


def test_a_run_in_both_tables_is_one_job():
    jobs = list(runs.source_jobs(["fms"]))
    assert len(jobs) == len({job.run for job in jobs})
    assert all(job.bytes_too and job.seconds_too for job in jobs)


def test_each_row_of_a_lesson_is_the_prediction_of_its_own_job():
    """A run may stand there once for each card: rows and jobs are told apart by their order."""
    jobs = {(*job.key, job.nth): job for job in runs.lesson_jobs(["graphs", "freezing"])}
    rows = predictions.keyed(pd.read_csv(predictions.PREDICTED))
    known = {key for key in rows if key[0] in ("graphs", "freezing")}
    assert known == jobs.keys() and any(job.nth for job in jobs.values())


def test_a_prediction_takes_the_place_of_its_row(tmp_path):
    job, *others = runs.lesson_jobs(["graphs"])
    old = pd.read_csv(predictions.PREDICTED)
    facts = dict.fromkeys([*predictions.BYTES, *predictions.SPEED], 7)
    path = tmp_path / "predictions.csv"
    old.to_csv(path, index=False)
    predictions.write({job: facts}, path)
    new = pd.read_csv(path)
    moved = new.index[(new["peak_allocated"] == 7)]
    assert len(new) == len(old) and len(moved) == 1 and new["set"][moved[0]] == "graphs"
    assert new["code_hash"][moved[0]] == job.code
    pd.testing.assert_frame_equal(new.drop(index=moved), old.drop(index=moved), check_dtype=False)


def test_only_what_a_table_lacks_is_measured(tmp_path):
    path, asked = tmp_path / "rows.csv", []

    def measure(way, seed):
        asked.append((way, seed))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return {"way": way, "seed": seed, "loss": 0.5}

    jobs = [(way, seed) for way in ("plain", "LoRA") for seed in (0, 1)]
    with pytest.raises(KeyboardInterrupt):
        tables.append_missing(path, ["way", "seed"], jobs, measure)
    tables.append_missing(path, ["way", "seed"], jobs, measure)
    assert asked == [jobs[0], *jobs[1:2], *jobs[1:]]
    assert pd.read_csv(path)[["way", "seed"]].to_records(index=False).tolist() == jobs


def test_no_two_things_have_one_name():
    """So that a name means one thing; a source's set may be of bytes, of seconds or of both."""
    sources = {*runs.of_peaks(), *runs.of_steps()}
    others = [*runs.of_lessons(), "fits", command.PASTED, command.CONSTANTS, *command.PARTS]
    assert len(others) == len(set(others)) and not sources & set(others)


def test_a_name_that_is_none_is_one_sentence(capsys):
    assert command.main(["lige"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and "liger" in told and told.count("\n") == 1


def test_a_plan_predicts_nothing(capsys, monkeypatch):
    monkeypatch.setattr(record, "make", None)
    assert command.main(["liger", "--plan", "--again"]) == 0
    assert "1 sets: liger" in capsys.readouterr().out
    assert command.main(["scoreboard", "--plan"]) == 0
    assert capsys.readouterr().out == "then: data/board.csv\n"


def test_the_parts_can_be_made():
    for part in command.PARTS.values():
        tree = ast.parse((tables.ROOT / f"{part.module.replace('.', '/')}.py").read_text("utf-8"))
        assert "write" in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


# --------------------------------------------------------------------------------- what is kept
@pytest.fixture
def predicts(monkeypatch, tmp_path_factory):
    """The bytes that a run of a source will have, or the error that it will raise."""
    amounts = {"a run": 10, "a second": 20}

    def found(module, table, name):
        def predict(run):
            if isinstance(amounts[run], Exception):
                raise amounts[run]
            return {"allocated": amounts[run]}

        return {(run, ""): lambda run=run: predict(run) for run in amounts}

    monkeypatch.setattr(runs, "predictions", found)
    monkeypatch.setattr(traces, "FOLDER", tmp_path_factory.mktemp("traces"))
    return amounts


def test_an_interrupted_recording_goes_on_where_it_stopped(tmp_path, predicts):
    second = JOB._replace(run="a second")
    record.make([JOB], 1, tmp_path)
    predicts["a run"] = 11  # would be seen if it were predicted again
    assert record.make([JOB, second], 1, tmp_path) == {}
    kept = [record.kept(job, tmp_path).amounts["allocated"] for job in (JOB, second)]
    assert kept == [10, 20]
    record.forget([JOB, second], tmp_path)
    assert list(tmp_path.iterdir()) == [] and record.kept(JOB, tmp_path) is None


def test_what_other_code_left_is_not_taken(tmp_path, predicts, monkeypatch):
    record.make([JOB], 1, tmp_path)
    monkeypatch.setattr(runs, "hash_of", lambda module: "other code")
    assert record.kept(JOB, tmp_path) is None


def test_a_file_that_was_cut_is_not_taken(tmp_path, predicts):
    record.make([JOB], 1, tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:20])
    assert record.kept(JOB, tmp_path) is None


def test_a_run_that_fails_leaves_the_rows_of_its_set(tmp_path, predicts, monkeypatch, capsys):
    """The others are written, and the exit status tells."""
    second, written = JOB._replace(set="other", run="a second"), {}
    predicts["a run"] = ValueError("the model\nis wrong")
    monkeypatch.setattr(record, "KEPT", tmp_path)
    for call in (record.make, record.kept, record.forget, record.attempt):
        monkeypatch.setattr(call, "__defaults__", _with(call.__defaults__, tmp_path))
    monkeypatch.setattr(peaks, "write_each", written.update)
    assert command.carry_out(command.Plan(sources=[JOB, second]), 1) == 2
    assert [job.set for job in written] == ["other"]
    told = capsys.readouterr().err
    assert "liger / a run of evidence.sources.liger_operations: ValueError: the model is" in told


def _with(defaults: tuple | None, folder) -> tuple | None:
    """Default arguments with another folder in the place of the one for what is kept."""
    return defaults and tuple(folder if d == tables.ROOT / "build" / "evidence" else d
                              for d in defaults)  # fmt: skip


def test_bytes_and_seconds_come_from_one_prediction(monkeypatch):
    calls = []

    def predict():
        calls.append(1)
        traces.cost.step_time([], ["building the model"], None)
        return {"allocated": 5}

    monkeypatch.setattr(traces.cost, "step_time", lambda *_, **__: None)
    monkeypatch.setattr(runs, "predictions", lambda *_: {("a run", ""): predict})
    found = traces.of_source(JOB._replace(seconds_too=True))
    assert calls == [1] and found.amounts == {"allocated": 5} and found.step.operations == []


# --------------------------------------------------------------------- processes of a recording
PARENT = """
import multiprocessing, os, time
from concurrent.futures import ProcessPoolExecutor
from evidence.record import end_with_parent

if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=end_with_parent) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        time.sleep(600)
"""


def test_a_process_ends_when_the_one_that_started_it_is_killed(tmp_path):
    """By itself it would wait for its next task for ever."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    started = subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(tables.ROOT)},
    )
    with started:
        assert int(started.stdout.readline())
        started.kill()
        assert started.stdout.read() == b""  # open as long as one of them lives
