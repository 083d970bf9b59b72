"""`fit` over several cards: its order and where it ends, bad input, and one answer by the wrappers.

But for the last test a formula stands in the place of the predictions.
"""

import dataclasses
import json
import re
import types

import pytest
import torch

from fake_cuda.scripts import Script, apart
from fake_cuda.scripts.verdict import NOT_UPDATED, ONE_UPDATE, OVER
from fake_cuda.trace import CATEGORIES
from helpers.hardware import GIB
from helpers.prediction import CONTEXT
from planned import saved_decoder
from planner import rank_recipes, search_several
from planner.command import main
from planner.facts import Facts
from planner.micro_batches import Known
from planner.question import Question
from planner.rank_recipes import CARRIES, TooLong
from planner.ranks import cut_as_asked
from planner.search_several import Search, fit_several
from planner.several import SECONDS, SMALLEST, WAYS, ask_several, cut_margin

WEIGHTS = {"ddp": 16, "zero1": 12, "fsdp2": 6}  # GiB of what is kept, over two cards
COMPUTES = 1.0  # seconds of a step
POWERS = 1, 2, 4, 8, 16
WHOLE = 4  # GiB of gradients of all weights


real = Search._facts


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
        note = rank_recipes.RANK_0.format(2, 1024)
        about = dict(step_seconds=seconds, low=seconds, high=seconds, note=note)
        return Facts(size, size, used, {"forward": size}, **about)

    monkeypatch.setattr(Search, "_facts", facts)
    monkeypatch.setattr(Known, "weights", lambda known, way: GIB * weights(way))
    return asked


def weights(way) -> float:
    """GiB of what is kept."""
    return WEIGHTS[way.parallel] / (4 if way.adapters else 1)


def of_a_rank(way, samples: int, grows: float) -> dict[str, int]:
    """Bytes of a rank by category, in bf16. Micro-batches before the last keep gradients of their
    own, and temporaries are those of one weight or of the logits. Where weights are not gathered
    in 16 bits, autocast copies those that are trained, and what adapters read."""
    cut, kept = way.parallel == "fsdp2", 1 if way.adapters else WHOLE
    own = kept / (2 if cut and not way.adapters else 1) if samples < 16 else 0
    used = {"parameters": weights(way), "gradients": own, "optimizer states": 2 * kept}
    used["optimizer states"] /= 2 if cut else 1
    used["activations"] = samples * grows * (0.2 if way.checkpointing else 1)
    if not cut and way.adapters and not way.checkpointing:
        used["activations"] *= 1.4
    if not cut:
        used["activations"] += kept / 2
    used["temporaries"] = max(2, 0.3 * grows * samples)
    if cut and way.adapters:
        used |= {"gradients": 0, "temporaries": used["temporaries"] + own}
    return {name: int(size * GIB) for name, size in used.items()}


def as_facts(used: dict[str, int]) -> Facts:
    """What a prediction finds; a fuller card reserves less in vain."""
    size = sum(used.values())
    reserved = size + int(0.3 * GIB) if size < 20 * GIB else int(1.01 * size)
    about = dict(step_seconds=1.0, low=1.0, high=1.0, note=rank_recipes.RANK_0.format(2, 1))
    return Facts(size, reserved, used, {"forward": size}, **about)


def names(found) -> list[str]:
    return [recipe.way.name for recipe in found.recipes]


@pytest.mark.parametrize("grows", (0.25, 1, 3))
def test_the_largest_micro_batch_that_fits_is_found_without_trying_all(decoder, grows, monkeypatch):
    """Whatever room there is, as if each had been predicted."""
    tried = []

    def facts(search, way, micro_batch, told, times):
        tried.append((way, micro_batch))
        return as_facts(of_a_rank(way, micro_batch, grows))

    def tries() -> int:
        tried.clear()
        for room in range(8, 80, 3):
            card = dataclasses.replace(usual.card, memory=room * GIB)
            search = Search(dataclasses.replace(usual, card=card), ranks, print, False, None, [])
            for way in WAYS:
                facts = {n: as_facts(of_a_rank(way, n, grows)) for n in POWERS}
                needs = {n: search.need(way, one.peak_reserved) for n, one in facts.items()}
                fits = [n for n, size in needs.items() if size <= card.memory]
                found, slow = search.fitting(way)
                assert (found and found.micro_batch) == max(fits, default=None), (room, way)
                assert not slow
        return len(tried)

    monkeypatch.setattr(Search, "_facts", facts)
    monkeypatch.setattr(Known, "weights", lambda known, way: GIB * weights(way))
    monkeypatch.setattr(Question, "parameters", WHOLE * GIB // 4)
    monkeypatch.setattr(rank_recipes, "rank_script", lambda *_, **__: "")
    usual, ranks = ask_several(decoder, "2x24GiB", length=16, batch=32)
    bounded = tries()
    monkeypatch.setattr(Known, "least", lambda known, way, _: known.weights(way))
    assert bounded < tries()


@pytest.mark.parametrize("grows", (0.25, 1, 3))
def test_what_a_micro_batch_takes_at_least_it_takes(decoder, grows, monkeypatch):
    """By each other prediction of what computes the same, and by all of them."""
    monkeypatch.setattr(Known, "weights", lambda known, way: GIB * weights(way))
    monkeypatch.setattr(Search, "_facts", lambda s, way, n, *_: as_facts(of_a_rank(way, n, grows)))
    monkeypatch.setattr(rank_recipes, "rank_script", lambda *_, **__: "")
    search = Search(*ask_several(decoder, "2x24GiB", length=16, batch=32), print, False, None, [])
    every = [search.recipe(way, n) for way in WAYS for n in POWERS]
    for one in every:
        for seen in (*([other] for other in every), every):
            known = Known(seen, 2, 16, WHOLE * GIB // 4, True)
            least = known.least(one.way, one.micro_batch)
            assert least <= one.facts.peak_reserved, (one.way, one.micro_batch, seen[0].way)
            assert seen[0] is not one or least >= 0.95 * one.facts.peak_allocated


def test_a_slow_prediction_takes_nothing_away_and_is_named(decoder, by_formula, monkeypatch):
    given, slow = Search.recipe, set()

    def recipe(search, way, micro_batch):
        tried.append(micro_batch)
        if {micro_batch, way.name} & slow:
            raise TooLong("it was not predicted")
        return given(search, way, micro_batch)

    def fitting(way, *not_in_time):
        slow.clear(), slow.update(not_in_time), tried.clear()
        found, late = Search(*asked, print, False, None, []).fitting(way)
        return found and found.micro_batch, late, list(tried)

    tried: list[int] = []
    monkeypatch.setattr(Search, "recipe", recipe)
    asked = ask_several(decoder, "2x18GiB", length=16, batch=8)
    _, zero1, fsdp2, *_ = WAYS  # of ZeRO-1 two samples fit, of FSDP2 all four at once
    assert fitting(zero1, 2) == (1, [2], [1, 2])
    assert fitting(fsdp2, 1, 2) == (4, [], [4])
    # What is not done with two samples is not done with one, but may be with all of them.
    assert fitting(zero1, 1, 2) == (None, [1, 2], [1, 4])
    assert fitting(fsdp2, 1, 2, 4) == (None, [1, 2, 4], [4])
    # But where one was done, one more is tried.
    asked = ask_several(decoder, "2x22GiB", length=16, batch=16)
    assert fitting(zero1) == (4, [], [1, 4])
    assert fitting(zero1, 4) == (2, [4], [1, 4, 2])
    assert fitting(zero1, 4, 2) == (1, [2, 4], [1, 4, 2])
    slow.clear()
    slow.add(1)
    found = fit_several(decoder, "2x14.2GiB", length=16, batch=8)
    assert found.recipes and "full, fsdp2, micro-batch 1, 2" in found.not_tried
    # ZeRO-1 told afterwards that DDP would not fit.
    slow.clear(), slow.add("full, ddp")
    assert fit_several(decoder, "2x17.5GiB", length=16, batch=8).not_tried == []


def ends_without_an_answer() -> list[Exception]:
    """What a script's process ends with where its time is over, or the machine's memory."""
    script = Script(__file__, seconds=1)
    ends = [(None, False), (-9, False), (-9, True)]
    told = [script._ended(apart.Ended(status, keeper), "", {}) for status, keeper in ends]
    told.append(OVER.format("300 s"))
    told += ["fails by itself: MemoryError", "fails by itself: [Errno 12] Cannot allocate memory"]
    found = [ValueError(f"the script for fsdp2 over 2 {text}") for text in told]
    return [*found, OSError(12, "Cannot allocate memory"), MemoryError()]


@pytest.mark.parametrize("error", ends_without_an_answer(), ids=lambda error: str(error)[24:60])
def test_what_was_found_stays_where_a_prediction_ends_without_an_answer(
    decoder, by_formula, monkeypatch, error
):
    given = Search._facts

    def facts(search, way, *rest):
        return real(search, way, *rest) if way.name == "full, fsdp2" else given(search, way, *rest)

    def late(*_, **__):
        raise error

    monkeypatch.setattr(Search, "_facts", facts)
    monkeypatch.setattr(rank_recipes, "predict_rank", late)
    found = fit_several(decoder, "2x18GiB", length=16, batch=8, cache=False)
    assert {"full, zero1", "LoRA, ddp"} <= set(names(found)) and "full, fsdp2" not in names(found)
    assert found.not_tried[0] == "full, fsdp2"
    assert "Not predicted" in str(found)
    error = ValueError("the script for fsdp2 over 2 fails by itself: KeyError")
    with pytest.raises(ValueError, match="KeyError"):
        fit_several(decoder, "2x18GiB", length=16, batch=8, cache=False)


def test_the_nearest_miss_is_found_though_the_smallest_way_is_slow(
    decoder, by_formula, monkeypatch
):
    given = Search._facts

    def facts(search, way, *rest):
        if way == SMALLEST or every:
            raise TooLong("it was not predicted")
        return given(search, way, *rest)

    every = False
    monkeypatch.setattr(Search, "_facts", facts)
    found = fit_several(decoder, "2x2.5GiB", length=16, batch=8)
    assert not found.recipes and found.miss.way != SMALLEST
    assert found.not_tried == ["LoRA, fsdp2, checkpointing"]
    assert "Nothing that was predicted fits. The nearest miss needs" in str(found)
    # What is known not to fit is not named.
    monkeypatch.setattr(Search, "_facts", given)
    search = Search(*ask_several(decoder, "2x2.5GiB", length=16, batch=8), print, False, None, [])
    left = [search_several.Late(WAYS[-2], [1, 2, 4])]
    monkeypatch.setattr(Known, "weights", lambda known, way: 0)
    assert search.still(left) == left
    search.recipe(WAYS[-2], 1)
    assert search.still(left) == []
    monkeypatch.setattr(Search, "_facts", facts)
    every = True
    with pytest.raises(
        ValueError, match="^nothing was predicted, .* ask for a batch of as few samples"
    ):
        fit_several(decoder, "2x2.5GiB", length=16, batch=8)
    monkeypatch.setattr(Known, "weights", lambda known, way: 99 * GIB)
    with pytest.raises(ValueError, match="^nothing fits, for the weights, with a margin"):
        fit_several(decoder, "2x2.5GiB", length=16, batch=8)


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
    fits = fit_several(decoder, "2x4GiB", length=16, batch=8)
    assert names(fits) == [SMALLEST.name] and fits.miss is None


def test_what_is_cut_has_a_margin_of_its_own(decoder, by_formula):
    """Ranks of cut weights reserved more than was predicted, which no run of one card tells."""
    found = fit_several(decoder, "2x18GiB", length=16, batch=8)
    zero1, fsdp2, _ = found.recipes
    assert cut_margin() > 2 * found.asked.margin > 0
    need = fsdp2.facts.peak_reserved * (1 + cut_margin()) + CONTEXT
    assert fsdp2.need == pytest.approx(need, rel=1e-6)
    assert zero1.need == found.asked.need(zero1.facts.peak_reserved)
    assert f"with fsdp2 {cut_margin():.1%}" in str(found)


def test_adapters_of_sixteen_rows_do_not_divide_over_three_cards(decoder, by_formula):
    """Though all weights do: their first and last sizes are 96, 192 and 384."""
    asked, ranks = ask_several(decoder, "3x24GiB", length=16, batch=6)
    asked.__dict__["skeleton"] = torch.nn.Linear(96, 384, bias=False)
    search = Search(asked, ranks, print, False, None, [])
    held = {way.name: search.recipe(way, 1).held for way in WAYS}
    assert held["full, fsdp2"] == held["LoRA, ddp"] == "all ranks hold as much"
    assert held["LoRA, fsdp2"] == "it has the larger shards"


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
    assert found.not_tried == [way.name for way in WAYS[1:] if not way.adapters]
    assert "LoRA, ddp" in names(found)  # adapters have their own time
    # What cannot fit is not named, and the smallest way is predicted where nothing fits.
    found = fit_several(decoder, "2x4.5GiB", length=16, batch=16)
    assert (names(found), found.not_tried) == ([SMALLEST.name], ["LoRA, fsdp2"])
    assert found.recipes[0].micro_batch == 2
    assert f"Not predicted, since {SECONDS} s were over" in str(found)
    assert found.not_tried[0] in str(found).splitlines()[-1]
    # What is named is checked again after the smallest way was predicted.
    still = Search.still

    def excludes_all(search, left):
        return [] if any(one.way == SMALLEST for one in search.seen) else still(search, left)

    monkeypatch.setattr(Search, "still", excludes_all)
    assert fit_several(decoder, "2x4.5GiB", length=16, batch=16).not_tried == []


@pytest.mark.parametrize("note", (ONE_UPDATE, NOT_UPDATED.format("forward passes")))
def test_a_prediction_that_came_to_no_end_is_none(decoder, monkeypatch, note):
    """With one update, what it sent at its start would count as a step's."""
    given = rank_recipes.predict_rank
    told = lambda *a, **k: dataclasses.replace(given(*a, **k), note=note)  # noqa: E731
    monkeypatch.setattr(rank_recipes, "predict_rank", told)
    search = Search(*ask_several(decoder, "2xA100-80GB", length=16), print, False, None, [])
    with pytest.raises(TooLong, match="LoRA, fsdp2"):
        search.recipe(WAYS[-3], 1)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_each_way_is_one_that_ranks_know(way):
    for accumulation in (1, 4):
        settings = way.settings(2, accumulation, True)
        assert cut_as_asked(8, way.parallel, **settings).settings["bf16"] is True
    assert way.bytes_per_weight(8, True) <= way.bytes_per_weight(2, True) <= 16


def test_what_a_link_carries_is_read_from_what_is_said():
    assert CARRIES.search("x " + rank_recipes.RANK_0.format(8, 57086.2))[1] == "57,086"


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


def test_what_the_environment_says_of_workspaces_is_another_prediction(
    decoder, tmp_path, monkeypatch
):
    monkeypatch.setattr(rank_recipes.cache, "kept", lambda key, make: keys.append(key) or make())
    monkeypatch.setattr(rank_recipes, "predict_rank", lambda *_, **__: given)
    monkeypatch.setattr(rank_recipes, "facts_of", lambda _: "facts")
    given = types.SimpleNamespace(note="")
    keys: list[str] = []
    search = Search(*ask_several(decoder, "2xT4", length=16), print, True, None, [])
    for told in (":4096:8", ":16:8", ":4096:8"):
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", told)
        assert search._facts(WAYS[0], 1, 1, 1) == "facts"
    assert keys[0] == keys[2] != keys[1]


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
