"""What the planner is asked: cards, the margin, what a plan means for a card."""

import pytest

from helpers.hardware import GIB
from helpers.runs import load
from planned import question, saved_decoder
from planner.question import blind_margin, find_card
from planner.techniques import Plan


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return saved_decoder(tmp_path_factory.mktemp("decoder"))


def test_the_margin_is_that_of_the_blind_test():
    keys = ["set", "run", "quantity"]
    blind = load("blind_peaks").merge(load("real_cards")[[*keys, "measured"]], on=keys)
    needed = blind["measured"] / blind["predicted"]
    assert len(blind) == 142 and 0.94 < (needed <= 1 + blind_margin()).mean() < 0.96


def test_a_card_without_bf16_gets_fp16_where_gradients_can_be_unscaled(decoder):
    asked = question(decoder, gpu="T4")
    assert asked.precision == "fp16"
    inside = asked.settings(Plan.named("full, Adafactor in backward"), 2)
    assert "fp16" not in inside and "bf16" not in inside
    assert asked.settings(Plan.named("LoRA"), 2)["fp16"]
    assert question(decoder).settings(Plan.named("full, Adafactor in backward"), 2)["bf16"]
    assert "bf16" not in question(decoder).settings(Plan.named("full in bf16"), 2)


def test_of_cards_as_near_the_slowest_whose_rates_are_known_stands_for_a_size():
    names = {size: find_card(f"{size}GiB").name for size in (8, 12, 16, 24, 48, 64, 80)}
    assert names == {
        8: "RTX 4060 Laptop",
        12: "RTX 3060",  # and not the RTX 4070 or 5070
        16: "RTX 4060 Ti 16GB",
        24: "RTX 3090",  # and not the RTX 4090
        48: "RTX A6000",
        64: "RTX A6000",  # as near as cards of 80 GiB, and slower
        80: "A100-80GB",
    }


def test_memory_alone_is_a_card_as_fast_as_the_nearest():
    card = find_card("23.5 GB")
    assert card.memory == 23.5 * GIB and card.context is None
    assert f"as fast as the {card.name}" in card.facts["asked"] and card.facts["bf16_tflops"]
    assert find_card("t4").facts["asked"] == "T4"
