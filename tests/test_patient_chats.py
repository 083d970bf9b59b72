"""Lesson 23 on a CPU with a network, `PATIENT = True`: all its cells, on a checkpoint made here.

The network is a folder that stands for the hub's model, of its family and in its 16 bits, with a
template without marks; what each fact prints is what the lesson stores, which a tiny model printed.
"""

import re
import shutil
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import notebook_rules as rules
from exercises import python
from test_pasted_chats import LESSON
from test_pasted_tuning import tokenizer_with

NAMED = "HuggingFaceTB/SmolLM2-135M-Instruct"
CHATML = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LEFT_OUT = {"colab-setup", "trl"}
RATE = "less than half of it"  # how fast preferences are learned: random weights say nothing of it


def checkpoint(folder: Path) -> Path:
    """A small Llama whose head is its embedding, saved in bfloat16, as SmolLM2 is."""
    tokenizer = tokenizer_with(CHATML)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), **sizes)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def as_patient(cells: dict[str, str], folder: Path) -> dict[str, str]:
    """The lesson's cells with the knob turned, the hub's model in a folder, and a network."""
    changes = {"PATIENT = False": "PATIENT = True", f'"{NAMED}"': repr(str(folder))}
    changes |= {'Path("../build")': f"Path({str(folder.parent)!r})", "online()": "True"}
    for old, new in changes.items():
        assert old in cells["knobs"], f"the knobs have no {old}"
        cells["knobs"] = cells["knobs"].replace(old, new)
    return cells


@pytest.fixture(scope="module")
def patient(tmp_path_factory) -> tuple[dict, dict[str, str]]:
    """The lesson's names at its end, and what each of its cells printed."""
    folder = checkpoint(tmp_path_factory.mktemp("patient") / "model")
    code = [cell for cell in rules.code(rules.read(LESSON)) if cell.id not in LEFT_OUT]
    cells = as_patient({cell.id: python(cell) for cell in code}, folder)
    names, printed = {"__name__": "__main__"}, {}
    for cell, source in cells.items():
        said = StringIO()
        with redirect_stdout(said):
            exec(compile(source, cell, "exec"), names)
        printed[cell] = said.getvalue()
    yield names, printed
    shutil.rmtree(folder.parent, ignore_errors=True)


def test_it_trains_the_model_that_it_names(patient):
    names, printed = patient
    assert "trained here: model in torch.float32" in printed["knobs"]
    assert names["REAL"] and names["HALF"] is None and names["BASE"].weights == Path(names["REAL"])
    assert names["OURS"].get("learning_rate") is None  # the planned rate, not the tiny model's
    assert names["trainer"].args.learning_rate == names["RECIPE"]["learning_rate"]
    first, last = names["curve"][0], names["curve"][-1]
    assert last < first and names["held_out_loss"](names["again"]) < first
    assert {p.dtype for p in names["trainer"].model.parameters()} == {torch.float32}


def test_its_facts_are_those_of_the_tiny_model(patient):
    def lines(text: str) -> list[str]:
        return [line for line in text.splitlines() if RATE not in line]

    facts = [cell for cell in rules.code(rules.read(LESSON)) if rules.CHECK in cell.source]
    assert len(facts) > 6
    for cell in facts:
        stored = "".join(out.get("text", "") for out in cell.outputs)
        assert lines(patient[1][cell.id]) == lines(stored), cell.id
    steps = patient[0]["steps"]
    assert steps[-1] < steps[0]


def test_its_prediction_is_judged_beside_its_measurement(patient):
    names, printed = patient
    assert re.search(r"predicted [\d.]+ MiB, measured [\d.]+ MiB", printed["judge"])
    assert abs(names["error"]) < 0.005
