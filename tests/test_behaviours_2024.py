"""What transformers did in 2024, held against what a real card allocated for each token."""

import copy
from dataclasses import replace
from functools import cache

import pandas as pd
import pytest

from behaviours_2024 import BEHAVIOURS
from helpers.hardware import data_file
from real_cards import fms

LAYERS, TOKENS = 2, 4096


def measured(model: str) -> float:
    """Bytes that LoRA's peak on an A100 grows by with each token, from batch 4 to 8."""
    rows = pd.read_csv(data_file("measurements", "peaks.csv")).query("quantity == 'allocated'")
    peaks = rows[rows["set"] == "fms"].set_index("run")["measured"]
    return (peaks[f"{model} LoRA, batch 8"] - peaks[f"{model} LoRA, batch 4"]) / (4 * TOKENS)


@cache
def peak(model: str, batch: int, behaviours=BEHAVIOURS) -> int:
    """Of LoRA on the first layers."""
    workload = fms.MODELS[model][0]
    config = copy.deepcopy(workload.config)
    config.num_hidden_layers = LAYERS
    return fms.run(replace(workload, config=config), "LoRA", batch, behaviours).peak_allocated


@pytest.mark.parametrize("model", ["Mistral-7B", "PowerLM-3B"])
def test_a_token_takes_what_it_took_on_a_real_card(model):
    config = fms.MODELS[model][0].config
    kept = 2 * config.hidden_size * (config.num_hidden_layers - LAYERS)  # inputs of other layers
    predicted = (peak(model, 3) - peak(model, 2)) / TOKENS + kept
    assert predicted == pytest.approx(measured(model), rel=0.001)


@pytest.mark.parametrize(
    ("model", "left_out"),
    [("Mistral-7B", name) for name in BEHAVIOURS[:-1]] + [("PowerLM-3B", BEHAVIOURS[-1])],
)
def test_a_behaviour_left_out_is_seen(model, left_out):
    others = tuple(name for name in BEHAVIOURS if name != left_out)
    assert peak(model, 3, others) != pytest.approx(peak(model, 3), rel=0.003)
