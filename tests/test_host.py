"""The computer around a card: told by name or number, found by one step, kept for its own card."""

import json
from unittest.mock import Mock

import pandas as pd
import pytest
import torch

from evidence import record
from evidence.runs import Job
from fake_cuda.constants import ELEVEN_HOSTS
from fake_cuda.cost import CONSTANTS, HOST_SECONDS, Timed
from helpers import host, language_modelling, predict
from helpers.hardware import data_file, gpu
from planned import saved_decoder
from planner import calibration, predict_rank
from planner.command import main
from planner.predictions import Predictions
from planner.question import ask
from planner.techniques import Plan
from tools.shared.pretended import pretended

ONE = {"per_device_train_batch_size": 1}
RUN = ["--gpu", "H100", "--model", "gpt2", "--length", "64", "per_device_train_batch_size=1"]
no_card = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real card")


@pytest.fixture
def place(monkeypatch, tmp_path):
    path = tmp_path / "build" / "hosts.json"
    monkeypatch.setattr(host, "_path", lambda: path)
    return path


@pytest.fixture(scope="module")
def tiny():
    return language_modelling("tiny")


def told(capsys, *arguments) -> tuple[int, str, str]:
    return main(list(arguments)), *capsys.readouterr()


# ----------------------------------------------------------------------------------- told
def test_names_are_seconds_and_the_answer_says_which(tiny, place):
    found = {name: predict(tiny, gpu="H100", host=name, **ONE) for name in host.SPEEDS}
    seconds = [prediction.step_seconds for prediction in found.values()]
    assert list(host.SPEEDS) == ["fast", "typical", "slow"] and seconds == sorted(seconds)
    for name, prediction in found.items():
        assert prediction.host == host.SPEEDS[name]
        assert f"A {name} host: {host.us(host.SPEEDS[name])}" in prediction.note
    assert predict(tiny, gpu="H100", **ONE).host == HOST_SECONDS


def test_named_hosts_are_those_of_the_rows():
    """Of the machines whose row calibrates the column keeps the host: the ends are among them."""
    table = pd.read_csv(data_file("speeds.csv"))
    hosts = table.loc[table["host"] != HOST_SECONDS, "host"].round(6)
    assert (hosts.min(), hosts.max()) == (host.SPEEDS["fast"], host.SPEEDS["slow"])
    waiting = table.query("limited == 'host' and role != 'excluded'").drop_duplicates("set")
    first = table[table["told"].isna() & (table["role"] != "excluded")]
    assert len(waiting) == len(first) == 11 and "eleven" in ELEVEN_HOSTS
    assert (waiting["role"] == "judged").sum() == 6  # as evidence/trust.py says


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("quick", "host='quick' is not fast, typical, slow or a number of seconds"),
        (-1, "host=-1 is not fast"),
        (float("nan"), "host=nan is not fast"),
        (True, "host=True is not fast"),
        ([1], "is not fast"),
        (26, "host=26 is more than the 1,000 us that any machine takes"),
        (float("inf"), "host=inf is more than"),
    ],
)
def test_what_is_no_host_is_said_in_a_sentence(wrong, why, tiny):
    with pytest.raises(ValueError, match="host=") as error:
        predict(tiny, gpu="H100", host=wrong, **ONE)
    assert why in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("command", (["predict", "--size"], ["fit", "--model"]))
@pytest.mark.parametrize("wrong", ("quick", "-1", "nan", "26", ""))
def test_the_command_says_it_too(command, wrong, capsys):
    status, out, err = told(capsys, *command, "gpt2", "--gpu", "H100", f"--host={wrong}")
    assert (status, out) == (2, "") and err.count("\n") == 1 and "host=" in err


def test_host_is_no_setting(capsys):
    status, _, err = told(capsys, "predict", "--size", "tiny", "--gpu", "T4", "host=slow")
    assert status == 2 and "host is not a keyword of TrainingArguments" in err


def test_the_answer_of_the_command(capsys, place):
    """It offers what helps where the host decides and nobody told it; JSON has the range."""
    asked = ["predict", "--size", "tiny", "--gpu", "H100"]
    assumed, known = told(capsys, *asked)[1], told(capsys, *asked, "--host", "2e-5")[1]
    assert "onegpu calibrate finds them, --host tells them" in assumed
    assert "calibrate" not in known
    facts = json.loads(told(capsys, *asked, "--json", "--host", "fast")[1])
    assert facts["step_seconds_low"] < facts["step_seconds"] < facts["step_seconds_high"]
    assert facts["host"] == host.SPEEDS["fast"]
    facts = json.loads(told(capsys, "predict", "--size", "tiny", "--gpu", "cpu", "--json")[1])
    assert facts["step_seconds_low"] is facts["step_seconds_high"] is facts["host"] is None


def test_scripts_and_ranks_are_told_too(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "layer = torch.nn.Linear(8, 8).cuda()\n"
        "optimizer = torch.optim.SGD(layer.parameters())\n"
        "for _ in range(3):\n"
        "    layer(torch.zeros(2, 8, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    asked = ["predict", "--gpu", "H100", "--json", "--script", str(script)]
    fast, slow = (json.loads(told(capsys, *asked, "--host", s)[1]) for s in ("fast", "slow"))
    assert fast["step_seconds"] < slow["step_seconds"] and slow["host"] == host.SPEEDS["slow"]
    found = predict_rank(saved_decoder(tmp_path), "H100", 2, "ddp", length=16, host="slow")
    assert found.host == host.SPEEDS["slow"]


def test_recipes_of_another_host_are_not_those_that_were_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("planner.cache.own_file", lambda *parts: tmp_path.joinpath("build", *parts))
    question, plan = ask(saved_decoder(tmp_path), "H100", length=16), Plan.named("full")
    found = [Predictions(question, host=h).predict(plan, 1) for h in ("fast", "slow", "fast", None)]
    assert found[0].step_seconds == found[2].step_seconds < found[1].step_seconds
    assert len(list((tmp_path / "build" / "predictions").iterdir())) == 3


# -------------------------------------------------------------------------- found by a step
@pytest.mark.parametrize("seconds", (1.2e-5, 2.6e-5, 2e-4))
def test_a_predicted_step_tells_the_host_it_was_predicted_with(seconds, capsys, place):
    asked = ["predict", "--size", "gpt2", *RUN[:2], *RUN[4:], "--json", "--host", str(seconds)]
    step = json.loads(told(capsys, *asked)[1])["step_seconds"]
    status, out, err = told(capsys, "calibrate", "--step-seconds", str(step), *RUN, "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["host"] == pytest.approx(seconds, rel=0.02)
    assert not json.loads(out)["kept"] and not place.exists()
    text = told(capsys, "calibrate", "--step-seconds", str(step), *RUN)[1]
    flag = text.partition("--host ")[2].split()[0]
    assert float(flag) == pytest.approx(seconds, rel=0.02) and "kept" not in text


def test_accumulated_micro_batches_tell_it_as_well(tiny):
    many = ONE | {"gradient_accumulation_steps": 8}
    step = predict(tiny, gpu="H100", host=3e-5, **many).step_seconds
    assert predict(tiny, gpu="H100", host=Timed(step), **many).host == pytest.approx(3e-5, rel=0.02)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--step-seconds", "1e-4", *RUN], "the card alone needs"),
        (["--step-seconds", "5", *RUN], "Is it the time of one step?"),
        (["--step-seconds", "0", *RUN], "is the time of a step, and 0 s are none"),
        (["--step-seconds", "-1", *RUN], "and -1 s are none"),
        (["--step-seconds", "nan", *RUN], "and nan s are none"),
        (["--step-seconds", "soon", *RUN], "invalid float value: 'soon'"),
        (["--step-seconds", "0.1", "--gpu", "H100"], "name its --model"),
        (["--step-seconds", "0.1", *RUN, "batch=1"], "batch"),
        (["--step-seconds", "0.1", *RUN, "host=1"], "host is not a keyword"),
        (["--step-seconds", "0.1", "--model", "gpt2", "--gpu", "A101"], "did you mean 'A10'"),
        (["--step-seconds", "0.1", "--model", "gpt2", "--gpu", "cpu"], "a host waits for a card"),
        (RUN, "go with its --step-seconds"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value[:2]),
)
def test_what_tells_no_host_is_one_sentence(arguments, why, capsys):
    status, out, err = told(capsys, "calibrate", *arguments)
    assert (status, out) == (2, "") and err.count("\n") == 1 and why in err


def test_a_step_that_the_card_may_limit_tells_nothing(tiny):
    """Within the range of the card's own time any host could be read into it."""
    alone = predict(tiny, gpu="T4", host=0, per_device_train_batch_size=64).step_seconds
    slowest = CONSTANTS.ranges.card_slowest
    for factor, tells in ((0.9, False), (slowest * 0.99, False), (slowest * 1.5, True)):
        took = Timed(factor * alone)
        found = predict(tiny, gpu="T4", host=took, per_device_train_batch_size=64)
        assert (found.host is not None) == (found.step_seconds is not None) == tells
        assert tells or "does not tell the host" in found.note
        assert not tells or found.step_seconds == pytest.approx(took, rel=1e-3)


@no_card
def test_without_a_card_a_timed_step_is_asked_for(capsys):
    for arguments, why in (
        ([], "no card is here whose step could be measured: give one that was timed"),
        (["--model", "gpt2", "--step-seconds", "0.1"], "name it, as in --gpu T4"),
    ):
        status, _, err = told(capsys, "calibrate", *arguments)
        assert status == 2 and why in err and err.count("\n") == 1


# ----------------------------------------------------------------------------------- kept
@no_card
def test_a_measured_step_is_kept_for_the_machines_own_card(monkeypatch, capsys, place, tiny):
    with pretended("T4"):
        expected = predict(tiny, gpu="T4", host=4e-5, **ONE).step_seconds
        run = Mock(seconds=10 * expected, steps=10)
        monkeypatch.setattr(calibration, "train", Mock(return_value=run))
        status, out, err = told(capsys, "calibrate")
        assert (status, err) == (0, "") and "It is kept" in out and "40 us" in out
        for card in ("here", "T4"):
            found = predict(tiny, gpu=card, **ONE)
            assert found.host == pytest.approx(4e-5, rel=0.02)
            assert "This machine's host: 40 us for an operation, found on 20" in found.note
        assert predict(tiny, gpu="T4", host="fast", **ONE).host == host.SPEEDS["fast"]
        assert predict(tiny, gpu="H100", **ONE).host == HOST_SECONDS
        assert predict(tiny, gpu="cpu", **ONE).host is None
        shown = told(capsys, "predict", "--size", "tiny", "--gpu", "T4")[1]
        assert "This machine's host" in shown and "are assumed: onegpu" not in shown
    assert host.kept(gpu("T4")) is None  # another machine has the folder


@no_card
def test_a_timed_step_of_the_own_card_is_kept_and_of_another_is_not(capsys, place):
    asked = ["calibrate", "--step-seconds", "0.1", *RUN]
    with pretended("T4"):
        assert told(capsys, *asked)[0] == 0 and not place.exists()
        asked[asked.index("H100")] = "T4"
        status, out, _ = told(capsys, *asked, "--json")
        assert status == 0 and json.loads(out)["kept"]
        assert host.kept(gpu("T4")).seconds == json.loads(out)["host"]


@no_card
@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", '{"Tesla T4": 3}', '{"Tesla T4": {"host": "x", "date": "d"}}']
    + ['{"Tesla T4": {"host": 7.0, "date": "d"}}', '{"Tesla T4": {"host": 1e-5}}'],
)
def test_a_damaged_file_is_ignored_and_written_anew(text, place):
    place.parent.mkdir(parents=True)
    place.write_text(text)
    with pretended("T4"):
        assert host.kept(gpu("T4")) is None
        host.keep(2e-5)
        assert host.kept(gpu("T4")).seconds == 2e-5


@no_card
def test_what_was_found_here_changes_no_recorded_prediction(monkeypatch, place):
    with pretended("T4"):
        host.keep(9e-5)
        seen = []
        monkeypatch.setattr(record, "_made", lambda job: seen.append(host.kept(gpu("T4"))))
        record.made(Job("source", "", "", ""))
        assert seen == [None] and host.kept(gpu("T4")).seconds == 9e-5
