"""The loop of lesson 15, which readers take home: what it promises, at tiny size."""

import runpy
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, set_seed

from helpers import free, language_modelling
from test_house import code_lines

FILE = Path(__file__).parents[1] / "examples" / "launch" / "loop.py"
TINY = language_modelling("tiny")
LENGTHS = (128, 64, 32, 8, 128, 8, 100, 20, 128, 8)  # a full group of four, another, and two


@pytest.fixture(scope="module")
def loop():
    return runpy.run_path(str(FILE))


@pytest.fixture(autouse=True)
def own_process():
    """Accelerate remembers the last run of a process."""
    free()
    yield
    free()


def unequal() -> list[dict]:
    """Texts of which unequal parts count."""
    rows = zip(TINY.data("train"), LENGTHS, strict=False)
    place = torch.arange(TINY.length)
    return [row | {"labels": row["labels"].where(place < n, -100)} for row, n in rows]


def restless() -> LlamaForCausalLM:
    """A model whose attention drops out, so that random numbers matter."""
    set_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 2, "vocab_size": 257, "attention_dropout": 0.2}
    return LlamaForCausalLM(LlamaConfig(**shape))


def run(loop, model, folder, **settings) -> list[float]:
    rows = unequal()
    usual = {"rate": 1e-3, "epochs": 2, "group": 4, "cpu": True}
    steps = loop["train"](model, rows, rows[:3], TINY.collate, str(folder), **usual | settings)
    return [loss for _, loss in steps]


def weights(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def by_trainer() -> tuple[list[float], torch.Tensor]:
    rows = unequal()
    workload = replace(TINY, data=lambda split: rows, learning_rate=1e-3)
    settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    trainer = workload.trainer(**settings, num_train_epochs=2, use_cpu=True)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, weights(trainer.model)


def test_it_has_forty_lines():
    assert len(code_lines(FILE.read_text())) == 40


def test_it_computes_what_trainer_computes(loop, tmp_path):
    """Unequal lengths, and a last group of two micro-batches."""
    losses, wanted = by_trainer()
    free()
    model = TINY.model()
    before = weights(model)
    found = run(loop, model, tmp_path, shuffle=False)
    assert len(found) == 6 and found == pytest.approx(losses[:6], abs=1e-3)
    apart = (weights(model) - wanted).norm() / (wanted - before).norm()
    assert apart < 1e-3


@pytest.mark.parametrize("stop", [2, 3, 4])  # within an epoch, between two, within the second
def test_a_resumed_run_ends_as_the_whole_one(loop, tmp_path, stop):
    whole, model = restless(), restless()
    losses = run(loop, whole, tmp_path / "whole")
    free()
    rows = unequal()
    settings = {"rate": 1e-3, "epochs": 2, "group": 4, "cpu": True, "every": 1}
    folder = tmp_path / "broken"
    begun = loop["train"](model, rows, rows[:3], TINY.collate, str(folder), **settings)
    before = [loss for _, loss in islice(begun, stop)]  # then the power fails
    free()
    set_seed(7)  # as a new process: other random numbers, other weights
    again = LlamaForCausalLM(restless().config)
    after = run(loop, again, folder, done=stop)
    assert before + after == losses
    assert torch.equal(weights(again), weights(whole))


def test_a_state_from_another_step_would_be_seen(loop, tmp_path):
    """The planted defect: batches that are not skipped."""
    whole = restless()
    losses = run(loop, whole, tmp_path, every=2)
    free()
    (tmp_path / "step-2").rename(tmp_path / "step-3")
    after = run(loop, restless(), tmp_path, done=3)
    assert after != losses[3:]


def test_the_saved_model_loads_again_and_its_loss_is_the_one_printed(loop, tmp_path, capsys):
    model = TINY.model()
    run(loop, model, tmp_path, shuffle=False, epochs=1)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(weights(again), weights(model))
    lost = tokens = 0
    with torch.no_grad():
        for row in unequal()[:3]:
            counted = int((row["labels"][1:] != -100).sum())
            loss = again(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss
            lost, tokens = lost + counted * loss.item(), tokens + counted
    assert f"{lost / tokens:.3f}" in capsys.readouterr().out
    assert model.training  # evaluation does not switch dropout off for what follows
