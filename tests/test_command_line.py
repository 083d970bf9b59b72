"""`python -m helpers predict`: JSON, text, and one sentence with exit status 2 for bad input."""

import io
import json
import re
import shlex
import subprocess
import sys
from unittest.mock import Mock

import pytest

from helpers.__main__ import main, setting

TINY = ["predict", "--size", "tiny", "--gpu", "T4"]


def command(capsys, *arguments):
    """Exit status, stdout and stderr of the command, run in this process."""
    try:
        status = main(list(arguments))
    except SystemExit as leaving:  # argparse leaves by itself
        status = leaving.code
    return status, *capsys.readouterr()


def test_json(capsys):
    status, out, err = command(capsys, *TINY, "--json", "per_device_train_batch_size=4")
    facts = json.loads(out)
    assert (status, err) == (0, "")
    expected = {"peak_allocated", "peak_reserved", "used", "by_category"}
    assert expected | {"took", "step_seconds", "gpu", "versions"} <= set(facts)
    assert facts["gpu"] == "T4" and facts["workload"] == "tiny BERT, 128 tokens"
    assert sum(facts["by_category"].values()) == facts["peak_allocated"] <= facts["peak_reserved"]
    assert facts["used"] == facts["peak_reserved"] + (facts["context"] or 0)
    assert {"torch", "transformers"} <= set(facts["versions"])


def test_text(capsys):
    status, out, err = command(capsys, *TINY, "fp16=True")
    assert (status, err) == (0, "")
    for part in ("predicted for T4", "parameters", "peak allocated", "peak reserved", "it fits"):
        assert part in out


def test_a_cpu_has_allocated_bytes_alone(capsys):
    status, out, _ = command(capsys, "predict", "--size", "tiny", "--gpu", "cpu")
    assert status == 0 and "peak allocated" in out and "reserved" not in out
    status, out, _ = command(capsys, "predict", "--size", "tiny", "--gpu", "cpu", "--json")
    facts = json.loads(out)
    assert facts["peak_reserved"] is None and facts["used"] is None and facts["fits"] is None


def test_words_are_read_however_they_are_written(capsys):
    assert setting("bf16=false") == ("bf16", False) and setting("seed=NONE") == ("seed", None)
    assert setting("optim=sgd") == ("optim", "sgd")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([*TINY, "gpu=T4"], "gpu is not a keyword of TrainingArguments"),
        ([*TINY, "bf16=yes"], "bf16='yes' is not True or False"),
        (["report", "bf16=True"], "'bf16=True' is not an option of report"),
    ],
)
def test_what_was_not_meant_so(arguments, message, capsys, request, monkeypatch):
    monkeypatch.chdir(request.config.rootpath)
    status, out, err = command(capsys, *arguments)
    assert (status, out) == (2, "") and message in err and err.count("\n") == 1


def test_settings_reach_the_prediction(capsys):
    def peak(*settings):
        status, out, err = command(capsys, *TINY, "--json", *settings)
        assert status == 0, err
        return json.loads(out)["peak_allocated"]

    small = peak("per_device_train_batch_size=2", "optim=sgd")
    assert small < peak("per_device_train_batch_size=2") < peak("per_device_train_batch_size=16")
    assert small == peak("optim=sgd", "--length", "128", "per_device_train_batch_size=2")


def test_the_guides_name_of_checkpointing_is_understood(capsys):
    told = [
        command(capsys, *TINY, "--json", f"{name}_checkpointing=True")[1]
        for name in ("gradient", "activation")
    ]
    old, new = map(json.loads, told)
    assert old["peak_allocated"] == new["peak_allocated"]
    assert "activation_checkpointing since transformers 5.23" in old["note"]
    assert "transformers" not in new["note"]


def test_task_and_length(capsys):
    task = ["--task", "language_modelling", "--length", "32"]
    status, out, _ = command(capsys, *TINY, *task, "bf16=True")
    assert status == 0 and "tiny Llama, 32 tokens" in out
    assert "emulated" in out  # the note is printed


def test_what_does_not_fit_says_so(capsys):
    large = ["predict", "--size", "distilbert-base-uncased", "--gpu", "T4"]
    status, out, _ = command(capsys, *large, "per_device_train_batch_size=128")
    assert status == 0 and "With the context it does not fit" in out


def test_values_are_read_as_python_where_they_are():
    read = dict(map(setting, ["a=1", "b=True", "c=1e-3", "d=adafactor", "e={'k': 1}", "f=a=b"]))
    assert read == {"a": 1, "b": True, "c": 1e-3, "d": "adafactor", "e": {"k": 1}, "f": "a=b"}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--size", "tny"], "did you mean 'tiny'"),
        (["--size", "./nowhere"], "is not a model folder"),
        (["--size", "someone/some-model"], "the hub cannot be reached"),
        (["--gpu", "A101"], "did you mean 'A10'"),
        (["--task", "translation"], "translation"),
        (["--length", "many"], "many"),
        (["--length", "0"], "length"),
        (["--length", "-5"], "length"),
        (["--size", "bert-base-uncased", "--length", "513"], "reads 512 tokens at most"),
        (["bf16"], "'bf16' is not a setting: write name=value"),
        (["--bf16"], "'--bf16' is not a setting: write name=value"),
        (["=3"], "is not a"),
        (["per_device_train_batch_sizes=4"], "did you mean 'per_device_train_batch_size'"),
        (["per_device_train_batch_size=0"], "batch"),
        (["per_device_train_batch_size=four"], "four"),
        (["gradient_accumulation_steps=0"], "gradient_accumulation_steps"),
        (["gradient_accumulation_steps=two"], "gradient_accumulation_steps"),
        (["learning_rate=fast"], ""),
        (["optim=adam"], "is not a known optimizer"),
        (["torch_compile=True"], "torch_compile cannot be predicted"),
        (["--gpu", "cpu", "fp16=True"], "fp16=True does nothing on a CPU"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_bad_input_is_one_sentence(arguments, message, capsys):
    status, out, err = command(capsys, *TINY, *arguments)
    assert (status, out) == (2, "")
    assert len(err.strip().splitlines()) == 1 and "Traceback" not in err
    assert message in err


def test_no_command_is_an_error(capsys):
    status, out, err = command(capsys)
    assert (status, out) == (2, "") and "predict" in err


def test_as_a_real_command():
    bad = [sys.executable, "-m", "helpers", *TINY, "bf17=True"]
    done = subprocess.run(bad, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "did you mean 'bf16'" in done.stderr


def test_the_example_of_the_readme_is_what_the_command_prints(capsys, request):
    text = (request.config.rootpath / "README.md").read_text(encoding="utf-8")
    called, shown = re.search(r"^\$ python -m helpers (.*)\n((?:.*\n)*?)```", text, re.M).groups()
    status, out, _ = command(capsys, *shlex.split(called))
    timed = re.compile(r"in \d+\.\d s")
    assert status == 0 and timed.sub("", out) == timed.sub("", shown)


def test_an_interruption_and_a_closed_pipe_are_silent(monkeypatch, capsys, tmp_path):
    class Closed(io.StringIO):
        flush = Mock(side_effect=BrokenPipeError)
        fileno = (tmp_path / "out").open("w").fileno

    monkeypatch.setattr("helpers.report.judged", Mock(side_effect=KeyboardInterrupt))
    assert command(capsys, "report") == (130, "", "")
    monkeypatch.setattr("helpers.report.judged", list)
    monkeypatch.setattr("helpers.report.on_real_cards", str)
    monkeypatch.setattr(sys, "stdout", Closed())
    assert main(["report"]) == 141
    assert capsys.readouterr().err == ""
