"""The runs of PEFT's comparison: one in small, by arithmetic, and what is judged."""

from pathlib import Path

import pandas as pd
import pytest

from evidence.peft_methods import IMAGES, TEXTS
from evidence.sources import peft_texts
from fake_cuda import MiB

ROOT = Path(__file__).resolve().parents[1]


def test_what_lives_after_a_step_is_counted_by_hand():
    width, heads, words, layers, length, rank = 1024, 8, 65_536, 2, 512, 64
    small = dict(hidden_size=width, num_attention_heads=heads, num_key_value_heads=heads)
    small |= dict(num_hidden_layers=layers, intermediate_size=2048, vocab_size=words)
    found = peft_texts.train_texts("lora rank64-rslora", [64, length], **small)
    weights = words * width + layers * (4 * width * heads * 128 + 3 * width * 2048)
    adapters = layers * 2 * rank * (width + heads * 128)  # with gradient and two states in float32
    token = 2 * words + layers * 2 * 2 * heads * 128  # logits; keys and values, kept for a cache
    workspaces, first_segment = 2 * 8519680, 2 * MiB
    by_hand = 2 * weights + 4 * 4 * adapters + 4 * length * token + workspaces - first_segment
    allocated, reserved, peak = found[1]
    assert allocated == pytest.approx(by_hand, rel=0.005)
    assert found[0][0] == pytest.approx(by_hand - 4 * (length - 64) * token, rel=0.005)
    assert allocated < reserved == peak


def test_a_run_that_a_constant_was_taken_from_is_not_judged():
    table = pd.read_csv(ROOT / "data" / "measurements" / "peaks.csv", keep_default_na=False)
    for name, runs in (("peft-texts", TEXTS), ("peft-images", IMAGES)):
        rows = table[table["set"] == name]
        judged = rows[rows["role"] == "judged"]
        assert set(judged["run"]) | {peft_texts.CALIBRATION} >= set(runs)
        assert set(judged["run"]) <= set(runs) - {peft_texts.CALIBRATION}
    calibrates = table[table["run"] == peft_texts.CALIBRATION]
    assert (calibrates["role"] == "calibrates").sum() == 3  # the three lengths
