"""`fit` over several cards: its order and where it ends, bad input, and one answer by the wrappers.

But for the last test a formula stands in the place of the predictions.
"""

import dataclasses
import json
import re

import pytest

from fake_cuda.trace import CATEGORIES
from helpers.hardware import GIB
from helpers.prediction import CONTEXT
from planned import saved_decoder
from planner import search_several
from planner.command import main
from planner.facts import Facts
from planner.micro_batches import Known
from planner.ranks import cut_as_asked
from planner.search_several import CARRIES, Search, ask_several, cut_margin, fit_several
from planner.several import SECONDS, SMALLEST, WAYS

WEIGHTS = {"ddp": 16, "zero1": 12, "fsdp2": 6}  # GiB of what is kept, over two cards
COMPUTES = 1.0  # seconds of a step
POWERS = 1, 2, 4, 8, 16


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return saved_decoder(tmp_path_factory.mktemp("decoder"))


@pytest.fixture
def by_formula(monkeypatch):
    """Which ways were predicted, with which micro-batch."""
    asked = []

    def facts(search, way, micro_batch, told, times):
        asked.append((way.name, micro_batch))
        samples = micro_batch * (0.5 if way.checkpointing else 2)
        seconds = COMPUTES * (1 + way.checkpointing) + times / 100
        used = dict.fromkeys(CATEGORIES, 0)
        used |= {"parameters": int(weights(way) * GIB), "activations": int(samples * GIB)}
        size = sum(used.values())
        note = search_several.RANK_0.format(2, 1024)
        about = dict(step_seconds=seconds, low=seconds, high=seconds, note=note)
        return Facts(size, size, used, {"forward": size}, **about)

    monkeypatch.setattr(Search, "_facts", facts)
    monkeypatch.setattr(Known, "weights", lambda known, way: GIB * weights(way))
    return asked


def weights(way) -> float:
    """GiB of what is kept."""
    return WEIGHTS[way.parallel] / (4 if way.adapters else 1)


def names(found) -> list[str]:
    return [recipe.way.name for recipe in found.recipes]


@pytest.mark.parametrize("grows", (0.25, 1, 3))
def test_the_largest_micro_batch_that_fits_is_found_without_trying_all(decoder, grows, monkeypatch):
    """Whatever room there is, as if each had been predicted. Micro-batches before the last keep
    gradients of their own, and temporaries are those of one weight or of the logits."""
    tried = []

    def need(way, samples):
        """Bytes of a rank by category."""
        cut, kept = way.parallel == "fsdp2", 1 if way.adapters else 4  # GiB of gradients, whole
        own = kept / (2 if cut and not way.adapters else 1) if samples < 16 else 0
        used = {"parameters": weights(way), "gradients": own, "optimizer states": 2 * kept}
        used["optimizer states"] /= 2 if cut else 1
        used["activations"] = samples * grows * (0.2 if way.checkpointing else 1)
        used["temporaries"] = max(2, 0.3 * grows * samples)
        if cut and way.adapters:
            used |= {"gradients": 0, "temporaries": used["temporaries"] + own}
        return {name: int(size * GIB) for name, size in used.items()}

    def facts(search, way, micro_batch, told, times):
        tried.append((way, micro_batch))
        used = need(way, micro_batch)
        about = dict(step_seconds=1.0, low=1.0, high=1.0, note=search_several.RANK_0.format(2, 1))
        size = sum(used.values())
        return Facts(size, int(size * 1.04), used, {"forward": size}, **about)

    def tries() -> int:
        tried.clear()
        for room in range(8, 80, 3):
            card = dataclasses.replace(usual.card, memory=room * GIB)
            search = Search(dataclasses.replace(usual, card=card), ranks, print, False, None, [])
            for way in WAYS:
                needs = {n: search.need(way, 1.04 * sum(need(way, n).values())) for n in POWERS}
                fits = [n for n, size in needs.items() if size <= card.memory]
                found = search.fitting(way)
                assert (found and found.micro_batch) == max(fits, default=None), (room, way)
        return len(tried)

    monkeypatch.setattr(Search, "_facts", facts)
    monkeypatch.setattr(Known, "weights", lambda known, way: GIB * weights(way))
    monkeypatch.setattr(search_several, "rank_script", lambda *_, **__: "")
    usual, ranks = ask_several(decoder, "2x24GiB", length=16, batch=32)
    bounded = tries()
    monkeypatch.setattr(Known, "least", lambda known, way, _: known.weights(way))
    assert bounded < tries()


def test_of_a_way_that_fits_a_slow_prediction_takes_nothing_away(decoder, by_formula, monkeypatch):
    given, slow = Search.recipe, {2}

    def recipe(search, way, micro_batch):
        if micro_batch in slow:
            raise search_several.TooLong("it was not predicted")
        return given(search, way, micro_batch)

    monkeypatch.setattr(Search, "recipe", recipe)
    search = Search(*ask_several(decoder, "2x18GiB", length=16, batch=8), print, False, None, [])
    assert search.fitting(WAYS[1]).micro_batch == 1  # ZeRO-1, of which two samples fit
    slow |= {1, 4}
    with pytest.raises(search_several.TooLong):
        search.fitting(WAYS[2])


@pytest.mark.parametrize("gpus", ("2xA100-80GB", "2x18GiB", "2x14.2GiB", "2x2.5GiB"))
def test_one_process_and_two_give_the_same_answer(decoder, by_formula, gpus):
    found = [fit_several(decoder, gpus, length=16, batch=16, processes=n) for n in (1, 2)]
    assert str(found[1]) == str(found[0]) and found[1].to_json() == found[0].to_json()
    assert (found[0].miss is None) == (gpus != "2x2.5GiB")


def test_what_fits_as_it_is_ends_its_kind(decoder, by_formula):
    found = fit_several(decoder, "2xA100-80GB", length=16, batch=8)
    assert names(found) == ["full, ddp", "LoRA, ddp"] and found.miss is None
    assert by_formula == [("full, ddp", 4), ("LoRA, ddp", 4)]  # and nothing else was predicted
    first = found.recipes[0]
    assert (first.micro_batch, first.accumulation) == (4, 1)
    assert "gradient_as_bucket_view=True" in first.code and "RANKS = 2" in first.code


def test_what_has_to_save_is_tried_until_one_needs_not(decoder, by_formula):
    """DDP and ZeRO-1 need accumulation or checkpointing, FSDP2 fits as it is."""
    found = fit_several(decoder, "2x18GiB", length=16, batch=8)
    assert names(found) == ["full, zero1", "full, fsdp2", "LoRA, ddp"]
    assert {way for way, _ in by_formula if "full" in way and "checkpointing" in way} == set()
    zero1, fsdp2, _ = found.recipes
    assert (zero1.micro_batch, zero1.accumulation) == (2, 2)
    assert zero1.need <= 18 * GIB and fsdp2.accumulation == 1
    assert [n for way, n in by_formula if way == "full, zero1"] == [2]  # by what DDP with one took


def test_of_the_same_training_the_fastest_comes_first(decoder, by_formula):
    """Where nothing fits without checkpointing, it is tried, and takes longer."""
    found = fit_several(decoder, "2x14.2GiB", length=16, batch=16)
    kinds = [recipe.way.adapters for recipe in found.recipes]
    assert kinds == sorted(kinds)
    full = [recipe for recipe in found.recipes if not recipe.way.adapters]
    assert [r.way.name for r in full] == ["full, fsdp2", "full, zero1, checkpointing"]
    assert full[0].slowest < full[1].slowest
    lines = str(found).splitlines()
    assert any(line.startswith("  price") and "computed twice" in line for line in lines)


def test_nothing_fits_names_the_nearest_miss_and_what_would(decoder, by_formula):
    found = fit_several(decoder, "2x2.5GiB", length=16, batch=8)
    assert not found.recipes and found.miss.way == SMALLEST and found.miss.micro_batch == 1
    assert found.miss.need == pytest.approx(2 * GIB * (1 + cut_margin()) + CONTEXT, rel=1e-6)
    text = str(found)
    assert "Nothing fits. The nearest miss needs" in text
    assert f"2 x {found.miss.smallest_card} hold it" in text


def test_the_nearest_miss_is_the_smallest_way_though_a_bound_left_it_out(
    decoder, by_formula, monkeypatch
):
    least = lambda known, way, n: 99 * GIB if way == SMALLEST else known.weights(way)  # noqa: E731
    monkeypatch.setattr(Known, "least", least)
    found = fit_several(decoder, "2x2.5GiB", length=16, batch=8)
    assert not found.recipes and found.miss.way == SMALLEST


def test_what_is_cut_has_a_margin_of_its_own(decoder, by_formula):
    """Ranks of cut weights reserved more than was predicted, which no run of one card tells."""
    found = fit_several(decoder, "2x18GiB", length=16, batch=8)
    zero1, fsdp2, _ = found.recipes
    assert cut_margin() > 2 * found.asked.margin > 0
    need = fsdp2.facts.peak_reserved * (1 + cut_margin()) + CONTEXT
    assert fsdp2.need == pytest.approx(need, rel=1e-6)
    assert zero1.need == found.asked.need(zero1.facts.peak_reserved)
    assert f"with fsdp2 {cut_margin():.1%}" in str(found)


def test_what_travels_has_two_bounds_of_time(decoder, by_formula):
    """1 GiB over PCI Express 4.0, 32 GB/s in one direction, and over NVLink, 300."""
    recipe = fit_several(decoder, "2xA100-80GB", length=16, batch=8).recipes[0]
    computes = recipe.facts.step_seconds
    assert recipe.sent == GIB and set(recipe.seconds) == {"PCI Express", "NVLink"}
    hidden, none = recipe.seconds["PCI Express"]
    assert hidden == computes and none == pytest.approx(computes + GIB / 32e9)
    assert recipe.slowest == none
    unknown = fit_several(decoder, "2xA10", length=16, batch=8)
    assert unknown.recipes[0].seconds == {}
    assert "No link of the A10 is in data/links.csv" in str(unknown)


def test_only_what_is_cut_travels_with_each_micro_batch(decoder, by_formula):
    found = fit_several(decoder, "2x14.2GiB", length=16, batch=16)
    fsdp2 = next(r for r in found.recipes if r.way.parallel == "fsdp2")
    zero1 = next(r for r in found.recipes if r.way.parallel == "zero1")
    assert fsdp2.accumulation == 4 and fsdp2.sent == 2 * GIB  # told by two micro-batches
    assert zero1.sent == GIB


def test_after_its_time_no_other_way_is_begun_and_it_says_so(decoder, by_formula, monkeypatch):
    clock = iter(range(0, 10**6, 400))
    monkeypatch.setattr(search_several.time, "monotonic", lambda: next(clock))
    found = fit_several(decoder, "2x18GiB", length=16, batch=8)
    assert found.not_tried and "full, fsdp2" in found.not_tried
    assert f"Not tried, since {SECONDS} s were over" in str(found)
    assert found.not_tried[0] in str(found).splitlines()[-1]


def test_a_prediction_that_came_to_no_end_is_none(decoder, monkeypatch):
    """With one update, what it sent at its start would count as a step's."""
    given = search_several.predict_rank
    told = lambda *a, **k: dataclasses.replace(given(*a, **k), note=search_several.ONE_UPDATE)  # noqa: E731
    monkeypatch.setattr(search_several, "predict_rank", told)
    search = Search(*ask_several(decoder, "2xA100-80GB", length=16), print, False, None, [])
    with pytest.raises(search_several.TooLong, match="LoRA, fsdp2"):
        search.recipe(WAYS[-3], 1)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_each_way_is_one_that_ranks_know(way):
    for accumulation in (1, 4):
        settings = way.settings(2, accumulation, True)
        assert cut_as_asked(8, way.parallel, **settings).settings["bf16"] is True
    assert way.least(8, True) <= way.least(2, True) <= 16


def test_what_a_link_carries_is_read_from_what_is_said():
    assert CARRIES.search("x " + search_several.RANK_0.format(8, 57086.2))[1] == "57,086"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--gpus 2x", "'2x' is no number of cards: write 2x24GiB or 8xA100-80GB"),
        ("--gpus 24GiB", "is no number of cards"),
        ("--gpus twox24GiB", "is no number of cards"),
        ("--gpus 0x24GiB", "'0x24GiB' is not several cards: ask for one with --gpu 24GiB"),
        ("--gpus 1xT4", "is not several cards"),
        ("--gpus 2xA101", "did you mean 'A10'"),
        ("--gpus 2x24GiB --gpu T4", "--gpu is for one card, and --gpus names several"),
        ("--gpus 2x24GiB --longest", "--longest is for one card"),
        ("--gpus 2x24GiB --data texts.csv", "--data is for one card"),
        ("--gpus 3x24GiB", "a batch of 8 does not divide over 3 cards: 9 does"),
        ("--gpus 2x24GiB --batch 0", "batch"),
        ("--gpus 2x24GiB --host slowly", "host"),
        ("--gpus 2x24GiB --task text_classification", "for language modelling"),
    ],
)
def test_bad_input_is_one_sentence(arguments, message, capsys):
    assert main(["fit", "--model", "gpt2", "--length", "64", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err


def test_the_command_answers_as_text_as_code_and_for_programs(decoder, by_formula, capsys):
    asked = ["fit", "--model", decoder, "--length", "16", "--gpus", "2x24GiB"]
    assert main([*asked, "--code"]) == 0
    out = capsys.readouterr().out
    assert "on 2 x a card of 24.00 GiB" in out and "torchrun --nproc-per-node 2" in out
    assert re.search(r"over PCI Express +\d\.\d\d s \(all hidden\) to \d\.\d\d s \(none\)", out)
    assert main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    row = told["recipes"][0]
    assert (told["ranks"], told["batch"], row["fits"]) == (2, 8, True)
    assert row["name"] and row["sent"] == GIB and "DistributedDataParallel(" in row["code"]
    assert main([*asked[:-1], "2x2.5GiB"]) == 3


def test_a_recipe_is_what_predict_says_of_its_settings(decoder, capsys):
    """By the real wrappers: the same peak, and what travels."""
    found = fit_several(decoder, "2xA100-80GB", length=16, batch=4, cache=False)
    recipe = found.recipes[0]
    assert recipe.way.name == "full, ddp" and len(found.recipes) == 2
    asked = ["predict", "--model", decoder, "--length", "16", "--gpus", "2xA100-80GB"]
    asked += ["--parallel", "ddp", "per_device_train_batch_size=2", "bf16=True"]
    assert main([*asked, "gradient_as_bucket_view=True", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert recipe.facts.peak_reserved == told["peak_reserved"]
    assert recipe.need == found.asked.need(told["peak_reserved"])
    assert f"{recipe.sent / 2**20:,.0f} MiB" in told["note"]
