"""The recipe that readers copy from lesson 10 compiles, breaks nowhere and trains as eager code."""

import copy
import os
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import Trainer, TrainingArguments

import notebook_rules as rules
from helpers import language_modelling

LESSON = next((Path(__file__).resolve().parents[1] / "notebooks").glob("10_*.ipynb"))
TINY = language_modelling("tiny", length=64)


def recipe(backend: str) -> str:
    """The lesson's, compiled by a backend that builds no code: that needs a compiler, and long."""
    texts = "\n".join(cell.source for cell in rules.markdown(rules.read(LESSON)))
    (found,) = [part.split("```")[0] for part in texts.split("```python\n")[1:]]
    assert found.count("layer.compile(") == 1
    return found.replace("layer.compile(", f"layer.compile(backend={backend!r}, ")


def quiet(folder, **more) -> TrainingArguments:
    settings = {"max_steps": 3, "use_cpu": True, "report_to": "none", "save_strategy": "no"}
    settings |= {"disable_tqdm": True, "logging_steps": 1, "learning_rate": 1e-3}
    settings |= {"train_sampling_strategy": "sequential", "per_device_train_batch_size": 2}
    return TrainingArguments(str(folder), **settings | more)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the recipe on a model, which then has trained, and returns what is printed."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    torch._dynamo.reset()
    counters.clear()

    def pasted(model, data, backend="eager"):
        def trainer(*args, **more):
            print("graphs so far:", counters["stats"]["unique_graphs"])
            return Trainer(*args, **more)

        space = {"os": os, "torch": torch, "model": model, "data": data, "Trainer": trainer}
        space["batch"] = TINY.collate([data[i] for i in range(4)])
        space["TrainingArguments"] = lambda _, **more: quiet(tmp_path, **more)
        said = StringIO()
        with redirect_stdout(said):
            exec(compile(recipe(backend), "recipe", "exec"), space)
        return said.getvalue()

    yield pasted
    torch._dynamo.reset()


def gradients(model, batch) -> torch.Tensor:
    model.zero_grad()
    model(**batch).loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_the_recipe_trains_as_eager_code(run, tmp_path):
    data = TINY.data("train").select(range(8))
    model = TINY.model(pretrained=False)
    eager = copy.deepcopy(model)
    said = run(model, data, backend="aot_eager")  # real graphs, for both passes
    assert "as eager: True" in said and "graph breaks: 0" in said
    assert "graphs so far: 1\n" in said  # one for all layers
    batch = TINY.collate([data[i] for i in range(4)])
    Trainer(eager, quiet(tmp_path, dataloader_drop_last=True), train_dataset=data).train()
    wanted = torch.cat([p.flatten() for p in eager.parameters()])
    found = torch.cat([p.flatten() for p in model.parameters()])
    assert torch.allclose(found, wanted, atol=1e-4)  # three steps of AdamW
    assert torch.allclose(gradients(model, batch), gradients(eager, batch), atol=1e-4)
    again = type(model).from_pretrained(tmp_path)  # what it saved, under the names of eager code
    saved = torch.cat([p.flatten() for p in again.parameters()])
    assert torch.equal(saved, found)


def test_the_recipe_sees_a_break(run):
    """The planted defect: a layer that reads a number of its output in Python."""
    model = TINY.model(pretrained=False)
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda _, given, out: out * (1 + 0 * out.max().item()))
    said = run(model, TINY.data("train").select(range(8)))
    assert "as eager: True" in said and "graph breaks: 0" not in said
