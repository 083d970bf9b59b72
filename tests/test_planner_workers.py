"""The planner's copies of a process: the same answers, whoever gives them, and what goes wrong."""

import gc
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from planned import formula, predictions, saved_decoder
from planner import fit
from planner.predictions import Predictions
from planner.question import Question
from planner.techniques import WAYS, Plan
from planner.workers import Ended, Workers, usual_number

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="no other system is copied here")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return saved_decoder(tmp_path_factory.mktemp("decoder"))


def answer(question):
    if question == "who":
        return os.getpid()
    if question == "slow":
        time.sleep(0.3)
    if question == "bad":
        raise ValueError("no answer to bad")
    if question == "end":
        os.kill(os.getpid(), signal.SIGKILL)
    if question == "spared":
        return gc.get_freeze_count()
    if question == "loads":
        answer.loaded = [[] for _ in range(10_000)]
    return question


def at_leisure(predictions, plan, micro_batch, workload):
    """The formula, sooner or later: copies have the name of another process."""
    random.seed(f"{plan.name} {micro_batch} {multiprocessing.current_process().name}")
    time.sleep(random.random() / 50)
    return formula(predictions, plan, micro_batch, length=workload.length)


@pytest.mark.parametrize(
    "asked",
    (
        {},
        {"gpu": "80GiB"},
        {"order": "fastest"},
        {"order": "smallest"},
        {"longest": True},
        {"gpu": "1.5GiB"},
    ),
)
def test_one_process_and_two_give_the_same_answer(decoder, asked, monkeypatch):
    monkeypatch.setattr(Predictions, "_predicted", at_leisure)
    monkeypatch.setattr(Question, "ways", lambda asked: WAYS)
    asked = {"gpu": "24GiB", "length": 32, "batch": 8, "cache": False} | asked
    said = {1: [], 2: []}
    found = {n: fit(decoder, processes=n, say=said[n].append, **asked) for n in (1, 2)}
    assert str(found[2]) == str(found[1]) and found[2].to_json() == found[1].to_json()
    assert sorted(said[2]) == sorted(said[1])  # and nothing else is predicted
    assert len(set(said[1])) == len(said[1]) or found[1].longest  # nor anything twice


def test_a_copy_predicts_what_this_process_does(decoder):
    found, plan = predictions(decoder, batch=4, keep=False), Plan.named("QLoRA, checkpointing")
    asked = [(2, ("any",), 0), (1, (), 32), (2, (), 0)]
    here = [found.predict(plan, n, layers=layers, length=length) for n, layers, length in asked]
    with found.side_by_side(2) as two:
        assert two.workers is not None
        there = two.each(lambda one: two.predict(plan, one[0], layers=one[1], length=one[2]), asked)
        assert there == here
        assert two.with_batch(1).predict(plan, 1) == found.with_batch(1).predict(plan, 1)


def test_answers_come_in_the_order_of_the_questions():
    with Workers(2, answer) as workers:
        asked = ["slow", *range(5)]
        assert workers.each(workers.ask, asked) == asked
        who = workers.each(workers.ask, ["who"] * 20)
    assert os.getpid() not in who and len(set(who)) <= 2
    assert not any(process.is_alive() for process in workers.processes)


def test_what_stays_of_an_answer_is_not_swept_with_the_next_ones():
    with Workers(1, answer) as workers:
        before, _, after = map(workers.ask, ("spared", "loads", "spared"))
    assert after - before > 9_000


def test_an_error_is_raised_where_it_was_asked():
    with Workers(2, answer) as workers:
        with pytest.raises(ValueError, match="no answer to bad"):
            workers.ask("bad")
        assert workers.each(workers.ask, [1, 2, 3]) == [1, 2, 3]


def test_this_process_answers_in_the_place_of_one_that_was_ended():
    with Workers(2, answer) as workers:
        for process in workers.processes:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        assert workers.each(workers.ask, ["who"] * 4) == [os.getpid()] * 4


def test_ctrl_c_does_not_wait_for_an_answer():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Workers(2, time.sleep) as workers, pytest.raises(KeyboardInterrupt):
            asked = threading.main_thread().ident, signal.SIGINT
            threading.Timer(0.5, signal.pthread_kill, asked).start()
            workers.each(workers.ask, [3600, 3600])
    finally:
        signal.signal(signal.SIGINT, before)
    assert all(process.exitcode == -signal.SIGTERM for process in workers.processes)


def test_after_the_end_nobody_answers():
    with Workers(1, answer) as workers:
        late = threading.Timer(0.1, workers.__exit__)
        late.start()
        with pytest.raises(Ended):
            workers.each(workers.ask, ["slow"] * 10)
        late.join()


def test_a_process_with_other_threads_is_not_copied(monkeypatch):
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    assert usual_number() == 1
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert usual_number() == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert usual_number() == 1
    monkeypatch.setattr(sys, "platform", "darwin")
    assert usual_number() == 1


@pytest.mark.parametrize(
    "number, cards",
    ((signal.SIGINT, "--gpu=T4"), (signal.SIGKILL, "--gpu=T4"), (signal.SIGINT, "--gpus=2xT4")),
)
def test_no_copy_outlives_its_command(decoder, number, cards, tmp_path):
    command = [sys.executable, "-m", "planner", "fit", "--model", decoder, "--no-cache", cards]
    code = "import os; os.sched_getaffinity = lambda _: {0, 1}\nimport sys, planner.command as c\n"
    code += "import planner.workers as w; make = w.Workers.__init__\n"
    code += "def told(*given):\n make(*given)\n print(*[p.pid for p in given[0].processes])\n"
    code += " sys.stdout.flush()\nw.Workers.__init__ = told; sys.exit(c.main(sys.argv[1:]))"
    command[1:3] = ["-c", code]
    with (tmp_path / "errors").open("w+") as errors:
        run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True,
                               start_new_session=True)  # fmt: skip
        copies = [int(pid) for pid in re.findall(r"\d+", run.stdout.readline())]
        assert len(copies) == 2
        os.killpg(run.pid, number) if number == signal.SIGINT else os.kill(run.pid, number)
        assert run.wait(60) == {signal.SIGINT: 130}.get(number, -number)
        until = time.monotonic() + 60
        while any(os.path.exists(f"/proc/{pid}") for pid in copies):
            assert time.monotonic() < until, "a copy is still there"
            time.sleep(0.1)
        errors.seek(0)
        assert "Traceback" not in errors.read()
