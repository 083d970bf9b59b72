"""The techniques as values: what each combination is called, costs and sets."""

import inspect

import pytest

from planner import techniques
from planner.techniques import CHANGE_THE_MODEL, KINDS, WAYS, Kind, Plan, Technique, every_plan

ALL = [value for value in vars(techniques).values() if isinstance(value, Technique)]


def test_every_technique_is_used_and_every_combination_has_its_name():
    used = {technique for plan in every_plan() for technique in plan.techniques}
    assert used == set(ALL) and len({technique.name for technique in ALL}) == len(ALL)
    names = [plan.name for plan in every_plan()]
    assert len(set(names)) == len(KINDS) * len(WAYS) == 81
    assert all(Plan.named(plan.name) == plan for plan in every_plan())
    with pytest.raises(KeyError):
        Plan.named("8-bit LoRA")


def test_kinds_of_the_same_weights_with_adamw_and_by_another_optimizer_alone():
    found = {kind.name: kind.with_adamw.name for kind in KINDS if kind.with_adamw}
    assert found == {
        "full, 8-bit AdamW": "full",
        "full, Adafactor": "full",
        "full, Adafactor in backward": "full",
        "full in bf16, 8-bit AdamW": "full in bf16",
        "full in bf16, Adafactor in backward": "full in bf16",
    }
    for kind in KINDS:
        assert kind.plainer is (None if "in backward" in kind.name else kind.with_adamw)


def test_what_changes_a_model_has_its_place_in_the_order():
    assert {t for t in ALL if t.model} == set(CHANGE_THE_MODEL)
    changes = Plan.named("QLoRA, chunked loss").model_changes()
    assert [c.__name__ for c in changes] == ["in_16_bits", "chunked_loss", "in_4_bits", "adapters"]


@pytest.mark.parametrize(
    ("name", "settings", "price"),
    [
        ("full", {}, ["nothing"]),
        (
            "full in bf16, 8-bit AdamW, chunked loss",
            {"optim": "adamw_8bit"},
            ["weights in bf16", "optimizer states of 8 bits", "logits are computed twice"],
        ),
        (
            "LoRA, checkpointing, Liger kernels",
            {"use_liger_kernel": True, "activation_checkpointing": True},
            ["only adapters", "another package, for Linux alone", "each layer"],
        ),
        (
            "full, Adafactor in backward, checkpointing",
            {"optim": "adafactor", "max_grad_norm": 0, "activation_checkpointing": True},
            ["another optimizer", "gradients are not clipped", "each layer is computed twice"],
        ),
        (
            "QLoRA, checkpoints on the host, chunked loss",
            {
                "activation_checkpointing": True,
                "activation_checkpointing_kwargs": {"offload": True},
            },
            ["only adapters", "rounded to 4 bits", "logits", "each layer", "two journeys"],
        ),
    ],
)
def test_a_plan_sets_and_costs_what_its_techniques_do(name, settings, price):
    plan = Plan.named(name)
    assert plan.settings() == settings
    said = plan.price().split("; ")
    assert len(said) == len(price)
    assert all(begins in text for begins, text in zip(price, said, strict=True))


def test_a_name_decides_nothing():
    """Adapters with an 8-bit optimizer in their name get no optimizer, no type, no change."""
    plan = Plan(Kind("8-bit LoRA in bf16, Adafactor in backward", 2, ()))
    assert plan.settings() == {} and plan.price() == "nothing" and plan.optimizer is None
    assert not plan.half and plan.model_changes() == [] and not plan.kind.adapters
    assert plan.kind.accumulates and plan.kind.possible("fp16") and plan.autocasts("bf16")


@pytest.mark.parametrize("technique", ALL, ids=lambda technique: technique.name)
def test_a_technique_says_what_it_costs_and_changes_something(technique):
    assert technique.price and technique.name
    assert technique.settings or technique.model or technique.optimizer or technique.half
    for function in technique.functions:
        assert inspect.getsource(function).startswith("def ")
