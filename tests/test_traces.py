"""Rows that are recorded anew from traces are those of a full simulation."""

from dataclasses import replace

import pytest

from evidence import code, predictions, record, runs, steps, tables, traces
from evidence.pairs import fused
from evidence.runs import Job
from fake_cuda import cost
from helpers import language_modelling, predict

LESSON = Job("lesson", "evidence.pairs", "pairs of a test", "tiny")
SOURCE = Job("source", "evidence.sources.attention_kernels", "attention-b200", "", seconds_too=True)
# Of modules that a run goes through, those that ask the model of time: when all is traced.
ASKING = {"fake_cuda.simulation", "fake_cuda.replay", "helpers.host", "helpers.prediction"}
# How far the card has come matters where several streams free blocks; no timed row has several.
ASKING |= {"fake_cuda.streams"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(traces, "FOLDER", tmp_path)
    return tmp_path


@pytest.fixture
def lesson(monkeypatch):
    """A run of a lesson, and how often it was simulated."""
    calls = []

    def predicted():
        calls.append(1)
        workload = language_modelling("tiny", length=16)
        return predict(workload, gpu="T4", per_device_train_batch_size=2)

    monkeypatch.setattr(runs, "of_a_lesson", lambda *_: {("tiny", "", 0): predicted})
    return calls


def other_model_of_time(monkeypatch, name: str) -> None:
    constants = cost.CONSTANTS.with_value(name, 3 * dict(numbers())[name])
    monkeypatch.setitem(cost.step_time.__kwdefaults__, "constants", constants)


def numbers():
    return ((one.name, one.value) for one in steps.listed(cost.CONSTANTS))


def test_a_row_of_a_lesson_comes_out_of_its_trace(lesson, folder, monkeypatch):
    simulated = record.made(LESSON)
    assert record.made(LESSON) == simulated and lesson == [1]
    other_model_of_time(monkeypatch, "seconds of a kernel")
    again = record.made(LESSON)
    assert lesson == [1] and again["step_seconds"] != simulated["step_seconds"]
    for file in folder.iterdir():
        file.unlink()
    assert repr(record.made(LESSON)) == repr(again) and lesson == [1, 1]


def test_the_time_of_a_bound_is_recorded_as_it_is(lesson, folder, monkeypatch):
    """No trace says that a row is the least that a compiler could reach."""
    plain = runs.of_a_lesson()["tiny", "", 0]

    def bound():
        found = plain()
        return replace(found, time=fused(found.time))

    monkeypatch.setattr(runs, "of_a_lesson", lambda *_: {("tiny", "", 0): bound})
    made = record.made(LESSON)
    assert made["step_seconds"] == made["fused_seconds"]
    assert not list(folder.iterdir())


@pytest.mark.parametrize("constant", ["host", "stream"])
def test_a_step_of_a_source_comes_out_of_its_trace(monkeypatch, constant):
    run = next(run for run, _ in runs.predictions(SOURCE.module, "STEPS", SOURCE.set))
    job = SOURCE._replace(run=run)
    first = record.made(job)
    monkeypatch.setattr(runs, "predictions", None)  # nothing can be simulated any more
    kept = record.made(job)
    assert kept.step.operations == first.step.operations and kept.step.card == first.step.card
    other_model_of_time(monkeypatch, constant)
    hosts = steps.Hosts(2e-5, 3e-5, None)
    assert steps.facts(kept.step, hosts, run) == steps.facts(first.step, hosts, run)


def test_a_host_that_nobody_told_is_todays(lesson, monkeypatch):
    record.made(LESSON)
    slow = 2 * cost.HOST_SECONDS
    monkeypatch.setitem(cost.step_time.__kwdefaults__, "host", slow)
    (step,) = [traces.kept(LESSON).step]
    assert "host" not in step.options
    assert cost.step_time(*step[:3], **step.options).host == slow


def test_a_row_that_does_not_follow_from_its_step_has_no_trace(folder):
    facts = dict.fromkeys([*predictions.BYTES, *predictions.SPEED])
    for fault in (
        traces.Lesson(facts | {"step_seconds": 1.0}, None, 1),  # of a script: its process had it
        traces.Lesson(facts | {"step_seconds": 1.0}, step_of_nothing(), 1),  # a bound
    ):
        traces.keep(LESSON, fault)
        assert not list(folder.iterdir())
    traces.keep(LESSON, traces.Lesson(facts, None, 1))  # bytes alone
    assert traces.kept(LESSON).row() == facts


def step_of_nothing() -> traces.Step:
    from evidence.cards import card

    return traces.Step([], ["building the model"], card("T4"), {})


def test_what_is_known_of_a_card_has_to_be_the_same(lesson, monkeypatch):
    record.made(LESSON)
    assert traces.kept(LESSON)
    other = {"T4": traces.cards()["L4"]}
    monkeypatch.setattr(traces, "cards", lambda: other)
    assert traces.kept(LESSON) is None


def test_other_versions_and_other_code_make_other_traces(lesson, monkeypatch):
    record.made(LESSON)
    with monkeypatch.context() as changed:
        changed.setattr(traces, "libraries", lambda: "torch 1.0")
        assert traces.kept(LESSON) is None
    monkeypatch.setattr(runs, "hash_of", lambda module, without: "other code")
    assert traces.kept(LESSON) is None


@pytest.mark.parametrize(
    ("module", "moves"),
    [("fake_cuda.cost", False), ("fake_cuda.constants", False), ("fake_cuda.operations", True)],
)
def test_only_the_model_of_time_leaves_traces_as_they_are(monkeypatch, module, moves):
    meaning = code._meaning_of

    def hashes() -> list[str]:
        asked = code.code_hash.__wrapped__
        return [asked("evidence.sources.fms", without=w) for w in ((), traces.COSTS)]

    before = hashes()
    changed = lambda name: meaning(name) + "changed" * (name == module)  # noqa: E731
    monkeypatch.setattr(code, "_meaning_of", changed)
    whole, trace = hashes()
    assert whole != before[0] and (trace != before[1]) == moves


def test_what_is_traced_does_not_ask_the_model_of_time():
    behind = code.modules_behind("evidence.sources.fms", "evidence.sources.compiled_course")
    asking = set()
    for name in behind - set(traces.COSTS):
        for package, imported in code._imports(name, code._file(name)):
            if {package, f"{package}.{imported}"} & set(traces.COSTS):
                asking.add(name)
    assert asking <= ASKING, "its traces depend on the model of time"
    assert all((tables.ROOT / f"{name.replace('.', '/')}.py").is_file() for name in traces.COSTS)
