"""`onegpu`: JSON, text, and one sentence with exit status 2 for bad input."""

import argparse
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from unittest.mock import Mock

import pytest
import transformers

from helpers import workloads
from planned import saved_decoder
from planner import finding
from planner.command import Progress, main, setting
from planner.facts import Facts
from planner.predictions import Predictions

TINY = ["predict", "--size", "tiny", "--gpu", "T4"]
TASK = "language_modelling"


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


def test_a_library_of_another_version_is_one_sentence(capsys, monkeypatch):
    said = "peft 0.18.1 is here, and the course needs <1,>=0.21: make install"
    monkeypatch.setattr("planner.command.report_command", Mock(side_effect=ImportError(said)))
    assert command(capsys, "report") == (2, "", f"error: {said}\n")


def test_a_status_says_whether_it_must_fit_and_does(capsys):
    """BERT-large with one sample of 512 tokens fits a T4, with 64 it does not."""
    large = ["predict", "--gpu", "T4", "--json", "--length", "512"]
    for samples, wanted in ((1, 0), (64, 3)):
        asked = [*large, f"per_device_train_batch_size={samples}"]
        status, out, err = command(capsys, *asked, "--must-fit")
        assert (status, err, json.loads(out)["fits"]) == (wanted, "", wanted == 0)
    assert command(capsys, *asked)[0] == 0
    status, out, err = command(capsys, "predict", "--size", "tiny", "--gpu", "cpu", "--must-fit")
    assert (status, out) == (2, "") and "name one with --gpu" in err


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
        (["torch_compile_mode=max-autotune"], "torch_compile_mode cannot be predicted"),
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
    bad = [sys.executable, "-m", "planner", *TINY, "bf17=True"]
    done = subprocess.run(bad, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "did you mean 'bf16'" in done.stderr


def test_the_example_of_the_readme_is_what_the_command_prints(capsys, request):
    text = (request.config.rootpath / "README.md").read_text(encoding="utf-8")
    called, shown = re.search(r"^\$ onegpu (.*)\n((?:.*\n)*?)```", text, re.M).groups()
    status, out, _ = command(capsys, *shlex.split(called))
    timed = re.compile(r"in \d+\.\d s")
    assert status == 0 and timed.sub("", out) == timed.sub("", shown)


def test_fit(monkeypatch, capsys, tmp_path):
    """The predictions are a formula's: bytes by the micro-batch, one second a step."""

    def predict(predictions, plan, micro_batch, *, layers=(), length=0):
        size = 2**30 * (12 * (not plan.kind.adapters) + micro_batch)
        return Facts(size, size, {"parameters": size}, {"forward": size}, 1.0, 1.0, 1.0, "it")

    monkeypatch.setattr(Predictions, "predict", predict)
    asked = ["fit", "--model", saved_decoder(tmp_path), "--length", "32"]
    status, out, err = command(capsys, *asked, "--gpu", "24GiB")
    assert (status, err) == (0, "")
    assert "LoRA" in out and "tokens/s" in out and "effective batch 8" in out
    status, coded, _ = command(capsys, *asked, "--gpu", "24GiB", "--code")
    assert status == 0 and coded.startswith(out.rstrip()) and "\ntrainer.train()\n" in coded
    status, out, _ = command(capsys, *asked, "--gpu", "24GiB", "--json")
    facts = json.loads(out)
    assert status == 0 and facts["batch"] == 8 and {"torch"} <= set(facts["versions"])
    row = facts["recipes"][0]
    assert row["fits"] and "TrainingArguments(" in row["code"] and row["price"]
    assert row["kind"] == row["name"] == "full" and row["facts"]["limited_by"] == "it"
    status, out, _ = command(capsys, *asked, "--gpu", "1.5GiB")
    assert status == 3 and "nearest miss" in out


@pytest.mark.parametrize("before", [None, "0"])
def test_the_word_that_nothing_is_compiled_is_taken_back(before, monkeypatch):
    name = finding.COMPILES_NOTHING
    monkeypatch.delenv(name, raising=False) if before is None else monkeypatch.setenv(name, before)
    monkeypatch.setattr(finding, "_found", lambda options: os.environ[name])
    assert finding.find(argparse.Namespace()) == "1"
    assert os.environ.get(name) == before
    monkeypatch.setattr(finding, "_found", lambda options: int("no number"))
    with pytest.raises(ValueError, match="no number"):
        finding.find(argparse.Namespace())
    assert os.environ.get(name) == before


def test_a_search_loads_no_compiler():
    code = "import sys, planner.finding as f\nwith f.nothing_compiled():\n import planner.search\n"
    code += "print('bitsandbytes' in sys.modules, 'torch._inductor.compile_fx' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.splitlines()[-1] == "True False"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "qwen3-235b"], "qwen3-0.6b, qwen3-1.7b, qwen3-14b, qwen3-30b-a3b, qwen3-32b"),
        (["--model", "qwen3-235b"], "the model's hub id, such as Qwen/Qwen3"),
        (["--model", "llama3.2-1b"], "did you mean 'llama-3.2-1b'"),
        (["--model", "phi-2"], "where there are phi-4-14b"),
        (["--model", "t5-small"], "the hub cannot be reached"),  # no relative of tinyllama
        (["--model", "someone/some-model"], "the hub cannot be reached"),
        (["--model", "vit-large-patch16-224", "--task", TASK], "is not a model for"),
        (["--model", "vit-large-patch16-224", "--longest"], "pictures of one size"),
        (["--model", "vit-large-patch16-224", "--gpus", "2xT4"], "is no language model"),
        (["--model", "qwen3-vl-4b", "--task", TASK], "is not a model for"),
        (["--model", "qwen3-vl-4b", "--data", "texts.csv"], "reads a picture with each text"),
        (["--model", "qwen3-vl-4b", "--gpus", "2xT4"], "is no language model"),
        (["--model", "qwen3-vl-4b", "--image-size", "0"], "pixels a side, and not of 0"),
        (
            ["--model", "gpt2", "--gpus", "2xT4", "--image-size", "0"],
            "--image-size is for one card",
        ),
        (["--model", "qwen3-vl-4b", "--length", "258"], "as 258 tokens, so that 258 leave none"),
        (["--model", "gpt2", "--image-size", "512"], "image_size is for image_text_to_text alone"),
        (["--model", "gpt2", "--gpu", "A101"], "did you mean 'A10'"),
        (["--model", "gpt2", "--gpu", "24 apples"], "is not a known GPU"),
        (["--model", "gpt2", "--gpu", "here"], "is not a known GPU"),
        (["--model", "gpt2", "--gpu", "P100"], "no hardware for 16 bits"),
        (["--model", "gpt2", "--length", "1025"], "reads 1024 tokens at most"),
        (["--model", "gpt2", "--batch", "0"], "batch"),
        (["--model", "gpt2", "bf16=True"], "is not an option of fit"),
        ([], "--model"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_bad_input_of_fit_is_one_sentence(arguments, message, capsys):
    assert main(["fit", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err


@pytest.mark.parametrize("kind", [transformers.Gemma3Config, transformers.Llama4Config])
def test_a_model_of_text_and_pictures_is_one_sentence(kind, tmp_path, capsys):
    kind(architectures=["OneForCausalLM"]).save_pretrained(tmp_path)
    asked = ["predict", "--model", str(tmp_path), "--gpu", "T4", "--length", "16"]
    assert main(asked) == 2
    assert "has parts beside that for texts" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [transformers.XLNetConfig, transformers.PerceiverConfig])
def test_a_model_of_any_length_or_without_padding_is_taken(kind, tmp_path):
    kind().save_pretrained(tmp_path)
    asked = workloads.workload(str(tmp_path), "text_classification", length=700)
    assert asked.length == 700


def test_progress_is_one_line_in_twenty_seconds_where_nobody_watches(capsys, monkeypatch):
    clock = Mock(return_value=0.0)
    monkeypatch.setattr("planner.terminal.time.monotonic", clock)
    with Progress() as progress:
        for clock.return_value in (5.0, 19.0, 21.0, 30.0, 42.0):
            progress(f"at {clock.return_value:.0f}")
    assert capsys.readouterr().err == "at 21\nat 42\n"


def test_the_command_is_installed_under_its_name(request):
    """And the old name says where it went."""
    project = tomllib.loads((request.config.rootpath / "pyproject.toml").read_text())["project"]
    value = project["scripts"]["onegpu"]
    assert EntryPoint("onegpu", value, "console_scripts").load() is main
    old = [sys.executable, "-m", "helpers", "predict"]
    done = subprocess.run(old, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "onegpu" in done.stderr


def test_an_interruption_and_a_closed_pipe_are_silent(monkeypatch, capsys, tmp_path):
    class Closed(io.StringIO):
        flush = Mock(side_effect=BrokenPipeError)
        fileno = (tmp_path / "out").open("w").fileno

    monkeypatch.setattr("planner.report.judged", Mock(side_effect=KeyboardInterrupt))
    assert command(capsys, "report") == (130, "", "")
    monkeypatch.setattr("planner.report.judged", list)
    monkeypatch.setattr("planner.report.on_real_cards", str)
    monkeypatch.setattr(sys, "stdout", Closed())
    assert main(["report"]) == 141
    assert capsys.readouterr().err == ""
