"""What older versions of transformers did, held against what a card allocated for each token."""

import copy
from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import pandas as pd
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from evidence.libraries import behaving, of, rows
from evidence.libraries.transformers_4_48 import BEHAVIOURS
from evidence.sources import fms
from helpers.hardware import data_file

LAYERS, TOKENS = 2, 4096
# What each is seen by at least: a share of the peak.
REACH = {"logits shifted by a copy": 0.003, "Granite's own loss": 0.003}


def measured(model: str) -> float:
    """Bytes that LoRA's peak on an A100 grows by with each token, from batch 4 to 8."""
    rows = pd.read_csv(data_file("measurements", "peaks.csv")).query("quantity == 'allocated'")
    peaks = rows[rows["set"] == "fms"].set_index("run")["measured"]
    return (peaks[f"{model} LoRA, batch 8"] - peaks[f"{model} LoRA, batch 4"]) / (4 * TOKENS)


@cache
def peak(model: str, batch: int, left_out: str = "") -> int:
    """Of LoRA on the first layers, with the versions that its rows name."""
    workload = fms.MODELS[model][0]
    config = copy.deepcopy(workload.config)
    config.num_hidden_layers = LAYERS
    then = of(**rows.named()["fms", f"{model} LoRA, batch 4"])
    with behaving(old for old in then if old.name != left_out):
        return fms.run(replace(workload, config=config), "LoRA", batch).peak_allocated


@pytest.mark.parametrize("model", ["Mistral-7B", "PowerLM-3B"])
def test_a_token_takes_what_it_took_on_a_real_card(model):
    config = fms.MODELS[model][0].config
    kept = 2 * config.hidden_size * (config.num_hidden_layers - LAYERS)  # inputs of other layers
    predicted = (peak(model, 3) - peak(model, 2)) / TOKENS + kept
    assert predicted == pytest.approx(measured(model), rel=0.001)


@pytest.mark.parametrize(
    ("model", "left_out"),
    [("Mistral-7B", "logits shifted by a copy"), ("PowerLM-3B", "Granite's own loss")],
)
def test_a_behaviour_left_out_is_seen(model, left_out):
    assert left_out in {old.name for old in BEHAVIOURS}
    assert peak(model, 3, left_out) != pytest.approx(peak(model, 3), rel=REACH[left_out])


def test_texts_without_padding_have_no_mask(monkeypatch):
    with_it = peak("Mistral-7B", 3)
    monkeypatch.setattr(fms, "flash_attn", nullcontext)
    assert peak.__wrapped__("Mistral-7B", 3) != pytest.approx(with_it, rel=0.003)


def test_a_version_decides():
    names = {
        version: {old.name for old in of(transformers=version)}
        for version in ("4.45.2", "4.48.1", "4.49.0", "5.23.0")
    }
    own, shifted, reentrant = (
        "Granite's own loss",
        "logits shifted by a copy",
        "checkpoints are reentrant",
    )
    assert names["4.45.2"] == {own, shifted, reentrant}
    assert names["4.48.1"] == {shifted, reentrant}
    assert names["4.49.0"] == {reentrant} and not names["5.23.0"]


@pytest.mark.parametrize(("version", "reentrant"), [("4.48.1", True), ("5.0.0", False)])
def test_checkpoints_were_reentrant_unless_told_otherwise(version, reentrant):
    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)
    )
    with behaving(of(transformers=version)):
        model.gradient_checkpointing_enable()
    assert model.model.layers[0]._gradient_checkpointing_func.keywords == {
        "use_reentrant": reentrant
    }
