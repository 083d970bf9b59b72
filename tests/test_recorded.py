"""`onegpu fit` from what is recorded: the same answer at once, none where it would be another."""

import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from evidence.atlas import page
from planner import recorded
from planner.answer import ORDERS, ordered
from planner.command import main
from planner.facts import Facts
from planner.predictions import Predictions
from planner.question import ask, find_card
from planner.script import script
from planner.techniques import KINDS, Plan
from test_planner_shape import HEAVY

ROOT = Path(__file__).resolve().parents[1]
ASKED = ("qwen3-0.6b", "RTX 3090", 1024, 8)
FEW = ("qwen3-0.6b", "RTX 3090", 512, 1)  # so few tokens that no way spares the logits


@pytest.fixture
def atlas(tmp_path, monkeypatch):
    """A copy that a test may change."""
    shutil.copytree(ROOT / "data", tmp_path / "data", ignore=shutil.ignore_patterns("*.png"))
    monkeypatch.chdir(tmp_path)
    recorded.read.cache_clear()
    yield tmp_path / "data" / "atlas"
    recorded.read.cache_clear()


@pytest.mark.parametrize("card", (ASKED[1], "T4"))
def test_the_answer_is_the_planners_in_order_and_fits(card):
    found = recorded.fit(ASKED[0], card, 1024, 8)
    kinds = [kind.name for kind in KINDS]
    order = [kinds.index(recipe.kind) for recipe in found.recipes]
    assert order == sorted(order) and len(order) == len(set(order)) >= 3
    asked = ask(ASKED[0], card, length=1024, batch=8)
    assert (found.question.workload.title, found.question.margin) == (
        asked.workload.title,
        asked.margin,
    )
    for recipe in found.recipes:
        facts, plan = recipe.facts, Plan.named(recipe.name)
        assert recipe.need == pytest.approx(asked.need(facts.peak_reserved), abs=2)
        assert recipe.need <= asked.card.memory
        assert sum(facts.by_category.values()) == pytest.approx(facts.peak_allocated, rel=0.01)
        assert recipe.micro_batch * recipe.accumulation == 8
        assert recipe.micro_batch <= recipe.largest_micro_batch
        assert recipe.code == script(asked, plan, recipe.micro_batch)
        assert recipe.price == asked.price(plan)
        pace = recipe.tokens_low, recipe.tokens_per_second, recipe.tokens_high
        assert list(pace) == sorted(pace)
        smallest = find_card(recipe.smallest_card)
        assert asked.need(facts.peak_reserved, smallest) <= smallest.memory


def test_a_chunked_loss_is_found_where_liger_cannot_be_had():
    names = [recipe.name for recipe in recorded.fit("qwen3-0.6b", "T4", 1024, 8).recipes]
    assert any("chunked loss" in name for name in names), names


def test_orders():
    usual, fastest = (recorded.fit(*ASKED, order) for order in ("change", "fastest"))
    assert {recipe.name for recipe in fastest.recipes} == {recipe.name for recipe in usual.recipes}
    speeds = [recipe.tokens_per_second for recipe in fastest.recipes]
    assert speeds == sorted(speeds, reverse=True)
    assert "The fastest is first." in str(fastest) and "is first" not in str(usual)


def test_a_model_is_found_by_its_id_and_a_card_by_its_memory():
    by_id = recorded.fit("Qwen/Qwen3-0.6B", "24 gb", 1024, 8)
    asked = find_card("24GiB")
    assert by_id.question.workload.name == "qwen3-0.6b"
    assert by_id.question.card.memory == asked.memory
    assert by_id.question.card.facts["asked"] == asked.facts["asked"]
    usual = recorded.fit("qwen3-0.6b", "RTX 3090", None, 8)
    assert usual.question.workload.length == ask("qwen3-0.6b", "RTX 3090").workload.length


def test_a_card_with_larger_workspaces_needs_more_than_is_recorded_of_its_family():
    """cuBLAS takes twice 32 MiB on capability 12, and 8.1 on what stands for it: see
    aten/src/ATen/cuda/CublasHandlePool.cpp."""
    old, new = (recorded.fit("bert-base-uncased", gpu, 256, 1) for gpu in ("A10", "RTX 5090"))
    for one, other in zip(old.recipes, new.recipes, strict=True):
        assert one.name == other.name
        assert other.facts.peak_reserved - one.facts.peak_reserved == 48 * 2**20
        assert other.facts.peak_allocated - one.facts.peak_allocated == 48 * 2**20
        parts = [facts.by_category["temporaries"] for facts in (one.facts, other.facts)]
        assert parts[1] - parts[0] == 48 * 2**20


@pytest.mark.parametrize("gpu", ["H100", "B200"])
def test_cards_of_hopper_and_later_are_answered(gpu):
    found = recorded.fit("qwen3-0.6b", gpu, 1024, 8)
    assert found.recipes and found.timed


def test_a_card_whose_seconds_can_be_predicted_and_are_not_recorded_is_left_to_the_search(
    monkeypatch,
):
    asked = "qwen3-0.6b", "A10G", 1024, 8  # of which no rates are known
    assert recorded.fit(*asked) is not None
    monkeypatch.setattr(recorded, "_has_rates", lambda card: True)
    assert recorded.fit(*asked) is None


@pytest.mark.parametrize(
    "asked",
    [
        ("gpt2-xl", "RTX 3090", 1024, 8),
        ("qwen3-0.6b", "RTX 3090", 1000, 8),
        ("qwen3-0.6b", "RTX 3090", 1024, 12),
        ("qwen3-0.6b", "RTX 3090", 16384, 8),  # its largest micro-batches are not recorded
        ("qwen3-0.6b", "23GiB", 1024, 8),
        ("qwen3-0.6b", "no card", 1024, 8),
        ("mistral-7b", "A100-80GB", 4096, 1),  # as long as its window of attention
        ("smollm3-3b", "T4", 1024, 8),  # the chunked loss is not recorded there
        ("qwen3-8b", "8GiB", 4096, 1),  # nothing fits: the search says what would
    ],
)
def test_what_is_not_recorded_is_left_to_the_search(asked):
    assert recorded.fit(*asked) is None


def test_another_task_than_the_recorded_one_is_left_to_the_search():
    usual = recorded.fit(*ASKED, task="language_modelling")
    assert [one.name for one in usual.recipes] == [one.name for one in recorded.fit(*ASKED).recipes]
    assert recorded.fit(*ASKED, task="text_classification") is None


def test_the_command_tells_the_task(monkeypatch):
    told = []
    monkeypatch.setattr(recorded, "fit", lambda *_, **named: told.append(named["task"]))
    monkeypatch.setattr("planner.finding._predicted", lambda _: SimpleNamespace(recipes=[]))
    for more in ([], ["--task", "text_classification"]):
        main(["fit", "--model", "qwen3-0.6b", *more])
    assert told == [None, "text_classification"]


def test_a_card_without_rates_has_recipes_without_a_pace():
    found = recorded.fit("qwen3-0.6b", "A10G", 1024, 8)
    assert found.recipes and not found.timed and "rates of a A10G are not in" in str(found)


def test_a_folder_of_that_name_is_not_the_hubs_model(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    folder = tmp_path / "Qwen" / "Qwen3-0.6B"
    folder.mkdir(parents=True)
    shutil.copytree(ROOT / "data", tmp_path / "data", ignore=shutil.ignore_patterns("*.png"))
    monkeypatch.chdir(tmp_path)
    assert recorded.fit("Qwen/Qwen3-0.6B", "RTX 3090", 1024, 8) is None
    assert recorded.fit(*ASKED)


def test_other_versions_and_a_known_host_are_left_to_the_search(atlas, monkeypatch):
    assert recorded.fit(*ASKED)
    hosts = atlas.parents[1] / "build" / "hosts.json"
    hosts.parent.mkdir()
    hosts.write_text("{}")
    assert recorded.fit(*ASKED) is None
    hosts.unlink()
    monkeypatch.setattr(recorded, "_installed", lambda name: "1.0")
    assert recorded.fit(*ASKED) is None


def test_a_damaged_file_is_passed_over_with_a_sentence(atlas, capsys):
    (atlas / "qwen3-0.6b.json.gz").write_bytes(b"no archive")
    assert recorded.fit(*ASKED) is None
    assert capsys.readouterr().err == (
        "qwen3-0.6b.json.gz is damaged: make evidence SETS=atlas. It is passed over: all is "
        "predicted.\n"
    )
    (atlas / "planner.json.gz").write_bytes(gzip.compress(b"{}")[:-4])
    recorded.read.cache_clear()
    assert recorded.fit(*ASKED) is None
    (atlas / "planner.json.gz").unlink()
    recorded.read.cache_clear()
    assert recorded.fit(*ASKED) is None and "planner" in capsys.readouterr().err


def test_the_command_answers_from_it_and_loads_nothing():
    asked = "fit --model qwen3-0.6b --length 1024 --code --gpu".split()
    code = "import sys; from planner.command import main; main({}); print(*sys.modules)"
    run = [sys.executable, "-c", code.format([*asked, "RTX 3090"])]
    done = subprocess.run(run, capture_output=True, text=True, cwd=ROOT)
    *answer, modules = done.stdout.strip().split("\n")
    assert not HEAVY & set(modules.split()) and not done.stderr
    assert "Recorded on 20" in done.stdout and "--exact" in done.stdout
    assert "trainer.train()" in "\n".join(answer)


def test_the_command_as_json(capsys):
    assert main(["fit", "--model", "qwen3-0.6b", "--length=1024", "--gpu=RTX 3090", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["source"].startswith("Recorded on") and told["recipes"][0]["fits"]
    assert set(told["versions"]) == {"torch", "transformers"}


def test_the_smallest_is_of_each_kind_what_needs_least():
    found = recorded.fit(*FEW, "smallest")
    usual = {recipe.kind: recipe.need for recipe in recorded.fit(*FEW).recipes}
    needs = {recipe.kind: recipe.need for recipe in found.recipes}
    assert list(needs.values()) == sorted(needs.values()) and set(usual) <= set(needs)
    assert all(needs[kind] <= 1.02 * need for kind, need in usual.items())
    assert sum(needs[kind] < need for kind, need in usual.items()) >= 2
    assert ORDERS["smallest"] in str(found)
    # All ways are asked for then, and of these one is not recorded of every model.
    assert recorded.fit("llama-3.1-8b", "RTX 3090", 1024, 8, "smallest") is None


@pytest.mark.parametrize("size", page.SIZES)
def test_a_size_is_as_fast_as_the_same_card_in_the_atlas_and_in_the_search(size):
    index = recorded.read(recorded.PLANNER)["index"]
    assert recorded._card(index, f"{size}GiB")["like"] == find_card(f"{size}GiB").name


@pytest.mark.parametrize("card, length, batch", [("8GiB", 2048, 8), ("RTX 3080", 4096, 8)])
def test_what_updates_in_backward_is_told_for_every_batch(card, length, batch):
    """Its micro-batches are steps by themselves, of which no row tells two."""
    found = recorded.fit("qwen3-0.6b", card, length, batch).recipes
    in_backward = [recipe for recipe in found if "in backward" in recipe.name]
    assert in_backward and all(recipe.largest_micro_batch >= batch for recipe in in_backward)


def test_orders_are_the_planners():
    for order in ORDERS:
        recipes = recorded.fit(*FEW, order).recipes
        kinds = [kind.name for kind in KINDS]
        by_change = sorted(recipes, key=lambda recipe: kinds.index(recipe.kind))
        assert recipes == ordered(by_change, order)


def test_the_smallest_of_a_card_without_rates_is_in_its_order():
    found = recorded.fit("qwen3-0.6b", "A10G", 512, 1, "smallest")
    assert ORDERS["smallest"] in str(found) and "change alone" not in str(found)


def test_lengths_are_predicted_beside_what_is_recorded(monkeypatch, tmp_path, capsys):
    """And recipes are those that are recorded."""
    plain = recorded.fit("qwen3-0.6b", "T4", 1024, 4)
    asked = []

    def longest(predictions, plan):
        asked.append((predictions.question.workload.length, predictions.question.batch, plan.name))
        return 4711

    def facts(predictions, plan, micro_batch, *, layers=(), length=0):
        asked.append((length, micro_batch, plan.name))
        return Facts(2**30, 2**30, {}, {})

    monkeypatch.setattr("planner.search.longest_sample", longest)
    monkeypatch.setattr("planner.search.token_counts", lambda data, hub_id: [7, 2000])
    monkeypatch.setattr(Predictions, "predict", facts)
    monkeypatch.setattr("planner.workers.usual_number", lambda: 1)
    given = ["fit", "--model", "qwen3-0.6b", "--length", "1024", "--batch", "4", "--json"]
    assert main([*given, "--longest", "--data", "texts.jsonl"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [r["name"] for r in told["recipes"]] == [recipe.name for recipe in plain.recipes]
    assert told["longest"] == {recipe.kind: 4711 for recipe in plain.recipes}
    assert "50.0% of 2 samples have more than 1,024 tokens" in told["data"]
    assert "predicted now" in told["source"] and plain.source in told["source"]
    first = plain.recipes[0]
    assert asked[-1] == (2000, first.micro_batch, first.name)
    assert {one[:2] for one in asked[:-1]} == {(1024, 4)}


@pytest.mark.parametrize("option", ["--exact", "--no-cache", "--host=slow"])
def test_who_asks_for_more_is_answered_by_the_search(option, monkeypatch):
    monkeypatch.setattr(recorded, "fit", lambda *_: pytest.fail("read"))
    monkeypatch.setattr("planner.finding._predicted", lambda _: recorded_answer)
    recorded_answer = type("Answer", (), {"recipes": [], "__str__": lambda _: ""})()
    assert main(["fit", "--model", "qwen3-0.6b", option]) == 3
