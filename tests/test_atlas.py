"""The atlas: what is recorded, how far it is from full predictions, and what the page reads."""

import gzip
import json
import random
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import transformers

from evidence.atlas import check, full, page, points, table
from evidence.atlas.chunks import FEWEST, Chunks, by_chunks, renumbered
from evidence.atlas.growth import Growth, grown
from evidence.atlas.laws import Point, Seeds, sizes_at
from evidence.atlas.pace import _for_samples, operation_at
from evidence.atlas.pieces import NotAlike, cuts
from evidence.atlas.sums import sizes_of_sums
from evidence.atlas.twins import Asked as Twin
from evidence.atlas.twins import OfSamples, Twins, seen
from fake_cuda.replay import Events, replay
from planned import saved_seeing
from planner import recorded
from planner.atlas import ALLOCATED, SEVERAL, Asked, packed, unpacked
from planner.candidates import OF_ADAMW
from planner.command import parsed
from planner.question import ask
from planner.script import script
from planner.techniques import Plan, every_plan
from tools.shared import fit_page

ROOT = Path(__file__).resolve().parents[1]
MODELS = page.models()
MOST_BYTES = 5 * 2**20  # of all files
# What 19 of 20 points may be off, as a share; the page states what they are.
USUAL = {"allocated_mib": 0.01, "reserved_mib": 0.03, "seconds": 0.01}
# Of those whose gradients are added to what is reserved (`check.added`), the worst;
# a sample of 28 points had said 0.05.
ADDED = 0.15
LEAST_POINTS = 100
PLANS = {(plan.kind, plan.way): plan for plan in every_plan()}
SMALL = {  # a model that is simulated fast
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "vocab_size": 2048,
    "max_position_embeddings": 1024,
}


@pytest.fixture(scope="module")
def index():
    return page.index()


def test_all_files_are_small_and_a_model_is_there():
    files = list(table.FOLDER.glob("*.json.gz"))
    assert MODELS and len(files) == len(MODELS) + 1  # and what is said of them
    assert sum(path.stat().st_size for path in files) <= MOST_BYTES


@pytest.mark.parametrize("model", MODELS)
def test_each_recipe_of_the_planner_is_recorded_or_says_why_not(model):
    recorded = table.read(model)
    assert recorded["model"] == model and re.fullmatch(r"\d{4}-\d\d-\d\d", recorded["date"])
    for family, recipes in recorded["families"].items():
        offered = [p.name for p in every_plan() if table.offered(model, family, p)]
        assert sorted(recipes) == sorted(offered)
        for name, own in recipes.items():
            assert re.fullmatch(r"[0-9a-f]{12}", own["code_hash"])
            assert ("why" in own) != ("points" in own), name


@pytest.mark.parametrize("model", MODELS)
def test_points_are_bytes_that_add_up_and_seconds_of_each_card(model):
    lengths = points.lengths_of(model)
    for recipes in table.read(model)["families"].values():
        for name, own in recipes.items():
            width = 9 + 7 * Plan.named(name).kind.accumulates
            places = [row[:2] for row in own.get("points", [])]
            assert len({tuple(place) for place in places}) == len(places)
            for length, n, *row in own.get("points", []):
                assert length in lengths and n in points.MICRO_BATCHES
                assert len(row) + 2 == width
                for start in range(0, len(row), 7):
                    allocated, reserved, *parts = row[start : start + 7]
                    assert allocated <= reserved and abs(sum(parts) - allocated) <= len(parts)
            for timed in own.get("seconds", {}).values():
                assert len(timed) == len(places)
                assert all(
                    0 < low <= 1 <= high and once < first for first, low, high, once, *_ in timed
                )


def test_the_sample_lies_as_near_to_full_predictions_as_is_said():
    errors = check.errors().abs()
    assert len(errors) >= LEAST_POINTS
    added = check.added()
    assert errors["reserved_mib"][added].max() <= ADDED
    for what, bound in USUAL.items():
        told = errors[what][~added] if what == "reserved_mib" else errors[what]
        assert told.quantile(0.95) <= bound, what


def test_page_and_command_say_the_same_of_the_sample():
    usual = f"{recorded.usual_error():.2%}"
    assert f"| peak reserved | {usual} |" in fit_page.trust()
    errors = check.errors()["reserved_mib"].abs()
    assert 0.95 <= (errors <= recorded.usual_error()).mean() < 0.97


def test_the_sample_is_drawn_from_the_atlas_and_holds_what_stands_there():
    drawn = check.drawn()
    assert len(set(drawn)) == len(drawn) == check.POINTS
    rows = pd.read_csv(check.PREDICTED).to_dict("records")
    assert {tuple(row[name] for name in check.KEY) for row in rows} <= set(drawn)
    for row in rows:
        for name, value in check.from_the_atlas(tuple(row[key] for key in check.KEY)).items():
            assert row[f"atlas_{name}"] == pytest.approx(value)


@pytest.mark.parametrize("model", MODELS)
def test_a_file_has_columns_and_is_read_as_rows(model):
    for recipes in table.read(model)["families"].values():
        for own in recipes.values():
            assert unpacked(packed(own)) == own


def test_seconds_are_kept_to_a_tenth_of_a_percent():
    numbers = random.Random(0)
    rows = [
        [float(f"{n:.4g}") for n in (once + each, 0.8, 1.6, once, each)] + [3]
        for once, each in ((numbers.random(), 3 * numbers.random()) for _ in range(100))
    ]
    recipe = {"points": [[512, n] for n in range(100)], "seconds": {"T4": rows, "H100": rows[::-1]}}
    found = unpacked(packed(recipe))["seconds"]
    for card, told in found.items():
        for one, row in zip(told, recipe["seconds"][card], strict=True):
            assert one[1:4] == row[1:4] and one[5] == row[5]
            assert one[0] == pytest.approx(row[0], rel=1.1e-3)
            assert one[4] == pytest.approx(row[4], rel=6e-4)


# ------------------------------------------------------------------------------------- the growth
def test_a_piece_that_repeats_is_found():
    assert cuts("pabcabcs", "pabcabcabcs")[0].size == 3
    assert [cut.size for cut in cuts("baaba", "baabaababa")] == [3, 2]  # not at the first try
    assert [cut.size for cut in cuts("pababsxyxyt", "pabababsxyxyxyt")] == [2, 2]
    with pytest.raises(NotAlike):
        cuts("pababs", "pabqabs")


@pytest.mark.parametrize("name", ("full, checkpointing", "LoRA"))
@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(**SMALL, num_hidden_layers=5),
        transformers.SmolLM3Config(**SMALL, num_hidden_layers=20, pad_token_id=0),
    ],
    ids=("alike", "by turns"),
)
def test_all_blocks_tell_what_few_tell(config, name, tmp_path):
    """Where blocks are not regular, all of them are simulated: the same numbers on any card."""
    config.architectures = ["ForCausalLM"]  # else it would classify
    config.save_pretrained(tmp_path)
    few, whole = (points._recipe(str(tmp_path), "ampere", name, turns) for turns in (2, None))
    assert len(few["points"]) == 10
    for one, other in zip(few["points"], whole["points"], strict=True):
        assert one[:2] == other[:2] and one[2:] == pytest.approx(other[2:], rel=0.02, abs=2)
    for card, rows in few["seconds"].items():
        for one, other in zip(rows, whole["seconds"][card], strict=True):
            assert one[0] == pytest.approx(other[0], rel=0.01)


def assert_told(found: dict, asked: tuple, beyond: int, seconds_off: float = 2e-3) -> None:
    """What is recorded of a step is what a full prediction says of it, within so many MiB."""
    _, family, _, length, n, accumulation = asked
    card = points.FAMILIES[family].card
    at = next(k for k, row in enumerate(found["points"]) if row[:2] == [length, n])
    row, timed = found["points"][at], found["seconds"][card][at]
    start = ALLOCATED if accumulation == 1 else SEVERAL
    seconds = timed[0] if accumulation == 1 else timed[3] + accumulation * timed[4]
    told = full.prediction((*asked, card))
    assert row[start] == pytest.approx(told["allocated_mib"], abs=beyond)
    assert row[start + 1] == pytest.approx(told["reserved_mib"], abs=beyond)
    assert seconds == pytest.approx(told["seconds"], rel=seconds_off)


@pytest.fixture
def classifier(tmp_path):
    """The folder of a small BERT, over whose wide layers sums do not grow as a line."""
    shape = SMALL | {"max_position_embeddings": 512, "intermediate_size": 4096}
    transformers.BertConfig(**shape, num_hidden_layers=6).save_pretrained(tmp_path)
    return str(tmp_path)


def test_a_step_that_classifies_is_that_of_a_full_prediction(classifier):
    """Few blocks and few micro-batches tell of all: with one sample and with more, of fewer tokens
    and of more than those over which sums take memory of their own; and of two micro-batches."""
    found = points._recipe(classifier, "ampere", "full", 3)
    assert [row[:2] for row in found["points"]][::7] == [[128, 1], [256, 4], [512, 16]]
    for point in ((512, 1, 1), (128, 4, 1), (512, 16, 2)):
        assert_told(found, (classifier, "ampere", "full", *point), beyond=0)


def test_sums_over_tokens_are_told_by_the_rule_of_their_kernel(classifier):
    """From 1,024 and 2,048 tokens, of 8,192: no storage is off; as a line they would be."""
    plan, seeds, point = Plan.named("full"), Seeds.of(128, 8), Point(512, 16)
    asked = (ask(classifier, "A100-80GB", length=n, batch=size) for n, size in (*seeds, point))
    *three, whole = (seen(question, plan, question.workload.length, 2) for question in asked)
    told = sizes_at(seeds, [one.events for one in three], point)
    line = told.copy()
    for number, size in sizes_of_sums(seeds, [one.sums for one in three], point).items():
        told[number] = size
    assert told.tolist() == list(whole.events.sizes) and (line != told).any()
    over_few = sizes_of_sums(seeds, [one.sums for one in three], Point(128, 4))
    assert over_few and set(over_few.values()) == {0}


def test_what_each_sample_asks_for_happens_as_often_as_there_are_samples():
    """Operations 1 to 4 are of two samples."""
    own = [OfSamples(at=1, size=2)]
    asked = list(_for_samples([0, 1, 2, 3, 4, 5, 5], own, few=2, counts=[1, 3]))
    assert [k for k, _ in asked] == [0, 1, 2, 3, 4, 1, 2, 5, 5]
    of_first = [there is None or bool(there[0]) for _, there in asked]
    assert of_first == [True, True, True, False, False, False, False, True, True]
    assert all(there is None or there[1] for _, there in asked)


def test_a_step_with_pictures_is_that_of_a_full_prediction(tmp_path):
    """Two lengths of each batch tell of all others: what the picture takes does not grow, neither
    its memory nor its attention. Its loss in chunks is not recorded."""
    name = "LoRA, checkpointing"
    saved_seeing(tmp_path, patch=16)
    found = points._recipe(str(tmp_path), "ampere", name, turns=None)
    assert [row[0] for row in found["points"]][::5] == [512, 1024, 2048, 4096]
    # For fewer tokens so small a model needs most while its pictures are put together.
    for point in ((4096, 1, 1), (4096, 1, 2), (4096, 8, 1)):
        assert_told(found, (str(tmp_path), "ampere", name, *point), beyond=2)
    chunked = points.recipe(str(tmp_path), "ampere", "LoRA, chunked loss")
    assert chunked == {"why": "more tokens are more chunks"}


@pytest.fixture
def five_blocks(tmp_path):
    """The folder of a tiny Llama."""
    transformers.LlamaConfig(
        **SMALL, num_hidden_layers=5, num_key_value_heads=2, architectures=["LlamaForCausalLM"]
    ).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize("name", ("full, chunked loss", "LoRA, checkpointing, chunked loss"))
def test_a_step_with_more_chunks_is_told_to_the_byte(name, five_blocks):
    """From four and five chunks, of 32: each storage, in its order, and each product. A piece taken
    for one that repeats where it is the last, which has fewer tokens, would grow."""
    plan, point = Plan.named(name), Point(1024, 16)
    twins = Twins.of(Twin(five_blocks, "T4", plan), points.CHUNKED_SEEDS)
    (_, own), *_ = by_chunks(twins, points.CHUNKED_SEEDS, [point])
    whole = seen(ask(five_blocks, "T4", length=1024, batch=16), plan, 1024, 3)
    events, numbers = renumbered(whole.events)
    assert list(own.near.events.events) == events
    three = own.near, own.far, own.wide
    told = sizes_at(points.CHUNKED_SEEDS, [one.events for one in three], point)
    sums = sizes_of_sums(points.CHUNKED_SEEDS, [one.sums for one in three], point)
    told[list(sums)] = list(sums.values())
    assert bool(sums) != plan.kind.adapters  # the gradients of norms
    real = np.array([whole.events.sizes[i] for i in numbers])
    assert told.tolist() == real.tolist()
    grown_ = [
        operation_at(ops, points.CHUNKED_SEEDS, point)
        for ops in zip(*(one.operations for one in three), strict=True)
    ]
    assert products(grown_) == products(whole.operations)


def products(operations) -> list[tuple]:
    """The name and the shape of each."""
    found = [op for op in operations if op.kind == "product"]
    return [(op.name, *[(p.batch, p.rows, p.columns, p.inner) for p in op.work]) for op in found]


def test_a_loss_in_chunks_is_that_of_a_full_prediction(five_blocks):
    """In any micro-batch, on a T4, whose attention is written out. Seconds of so small a model are
    told less well, with a loss in chunks."""
    name = "LoRA, chunked loss"
    found = points._recipe(five_blocks, "turing", name)
    assert [row[:2] for row in found["points"]][::5] == [[512, 1], [1024, 1]]
    for point in ((512, 2, 1), (512, 8, 2), (1024, 16, 1)):
        assert_told(found, (five_blocks, "turing", name, *point), beyond=1, seconds_off=1e-2)


def test_what_is_more_than_chunks_is_no_step_with_more_chunks(five_blocks):
    plan = Plan.named("LoRA, chunked loss")
    four, five = (seen(ask(five_blocks, "T4", length=n, batch=4), plan, n, 2) for n in (512, 640))
    grown_ = Chunks(four, five)
    with pytest.raises(NotAlike, match="more tokens more happens than more chunks"):
        grown_.by(five, 1)


def test_one_sample_is_told_by_its_like_where_attention_is_written_out():
    asked = ask("gpt-oss-20b", "A100-80GB", length=512, batch=1)
    plain = Plan.named("LoRA")
    told = {p: points.seeds_of(asked, plain, p) for p in points.all_points("gpt-oss-20b")}
    assert told[Point(512, 1)] == Seeds.only(Point(512, 1))
    assert all({s.micro_batch for s in told[p]} == {1} for p in told if p.micro_batch == 1)
    assert told[Point(1024, 2)] == points.SEEDS
    fused = ask("gpt2", "T4", length=512, batch=1)
    assert points.seeds_of(fused, plain, Point(512, 1)) == points.SEEDS


def test_chunks_of_a_loss_are_told_by_micro_batches_that_have_enough_of_them():
    asked, plan = ask("qwen3-0.6b", "T4", length=512, batch=1), Plan.named("LoRA, chunked loss")
    told = {p: points.seeds_of(asked, plan, p) for p in points.all_points("qwen3-0.6b")}
    assert [p for p in told if told[p].alone] == [Point(512, 1), Point(512, 2), Point(1024, 1)]
    assert all(three.near.chunks >= FEWEST for three in told.values() if not three.alone)
    assert Point(512, 4).one_chunk_more().chunks == 5


@pytest.mark.parametrize(
    "model, lengths",
    [
        ("mistral-7b", points.LENGTHS[2:5]),  # shorter than its window
        ("gemma-3-1b", points.LENGTHS[2:]),  # all as long as its window, or longer
        ("bert-base-uncased", points.LENGTHS[:3]),
        ("qwen3-vl-4b", points.LENGTHS[2:7]),
    ],
)
def test_all_lengths_of_a_model_are_on_one_side_of_its_window(model, lengths):
    assert points.lengths_of(model) == lengths


def test_what_few_blocks_do_not_tell_all_of_them_do(monkeypatch):
    asked = []

    def told(model, family, name, turns):
        asked.append(turns)
        if turns is not None:
            raise NotAlike("blocks differ")
        return {"points": []}

    monkeypatch.setattr(points, "_recipe", told)
    assert points.recipe("gpt2", "ampere", "full") == {"points": []} and asked == [2, 3, None]


@pytest.mark.parametrize("card, name", [("A100-80GB", "full, checkpointing"), ("T4", "full")])
def test_a_grown_log_is_the_log_of_the_deeper_model(card, name):
    """Two and three blocks tell of five, to the byte, in any micro-batch; on a T4, whose attention
    is written out (grouped heads in fp32), with the square of the length."""
    plan, seeds = Plan.named(name), Seeds.of(64, 2)
    near, far, wide = (ask("tinyllama-1.1b", card, length=n, batch=size) for n, size in seeds)
    shallow = seen(near, plan, 64, 2).events
    three = [seen(q, plan, q.workload.length, 3).events for q in (near, far, wide)]
    asked = ask("tinyllama-1.1b", card, length=256, batch=8)
    whole, _ = replay(seen(asked, plan, 256, 5).events, True)
    sizes = sizes_at(seeds, three, Point(256, 8))
    found, _ = replay(grown(Growth(shallow, three[0]).plan(2), three[0].kinds, sizes), True)
    assert found.peak_reserved == pytest.approx(whole.peak_reserved, rel=1e-3)
    assert found.peak_allocated == pytest.approx(whole.peak_allocated, rel=1e-4)


@pytest.mark.parametrize(
    "quantity",
    [
        lambda n, length: 7.0,
        lambda n, length: 3.0 * length,
        lambda n, length: 5.0 * length**2,
        lambda n, length: n * (2.0 * length + 4.0 * length**2),
        lambda n, length: 100.0 + 8.0 * n * length,
        lambda n, length: (3.0 + 2.0 * n) * length,
        lambda n, length: 0.0,
    ],
)
def test_three_micro_batches_tell_of_all_others(quantity):
    seeds = Seeds.of(512, 2)
    three = [quantity(point.micro_batch, point.length) for point in seeds]
    for length, n in ((512, 1), (512, 16), (4096, 1), (2048, 3)):
        assert seeds.at(Point(length, n), *three) == pytest.approx(quantity(n, length))


def test_logs_that_differ_by_more_are_refused():
    one = Events(["forward", 0, ~0], ["activations"], [512], 0)
    with pytest.raises(NotAlike):
        Growth(one, Events(["forward", 0, 1, ~0, ~1], ["activations"] * 2, [4096, 8192], 0))
    other = Events(["forward", 0, 1], ["activations"] * 2, [1, 1], 0)
    with pytest.raises(NotAlike):
        sizes_at(Seeds.of(1, 1), [one, other, one], Point(3, 1))


# ------------------------------------------------------------------------------------- the page
def test_what_is_said_with_the_atlas_is_what_the_planner_says_now(index):
    """Else: python -m evidence words."""
    said = recorded.read(recorded.PLANNER)
    assert said["index"] == json.loads(page.text(index))
    assert list(said["models"]) == MODELS
    for model in MODELS[:1]:
        assert said["models"][model] == json.loads(page.text(page.said_of(model))), model


@pytest.mark.parametrize("model", MODELS[:2])
def test_the_code_of_the_page_is_the_planners(model):
    content = page.of_model(model)
    for family, own in content["families"].items():
        card = points.FAMILIES[family].card
        question = ask(model, card, length=2048, batch=8)
        for name in list(own["recipes"])[::7]:
            plan = Plan.named(name)
            n = 2 if plan.kind.accumulates else 8
            numbers = {"length": 2048, "micro_batch": n, "accumulation": 8 // n, "samples": 16}
            text = own["recipes"][name]["code"]
            for mark, number in numbers.items():
                text = text.replace("{" + mark + "}", str(number))
            assert text == script(question, plan, n), name


@pytest.mark.parametrize("model", MODELS[:1])
def test_what_fits_needs_no_more_than_the_card_and_recipes_are_in_the_planners_order(model, index):
    content = json.loads(page.text(page.of_model(model)))
    kinds = [kind["name"] for kind in index["kinds"]]
    for card in index["cards"]:
        if card["family"] not in content["families"]:
            continue
        found = Asked(index, content, card, 1024, 8).fits()
        assert all(one.need <= card["memory"] for one in found)
        order = [kinds.index(one.kind) for one in found]
        assert order == sorted(order)


def test_no_optimizer_is_faster_than_the_search_takes_it_to_be():
    """What it leaves out rests on it. Seconds are recorded to a tenth of a percent."""
    pairs = 0
    for model in MODELS[::3]:
        with gzip.open(table.file_of(model), "rt", encoding="utf-8") as file:
            families = json.load(file)["families"].values()
        for recipes in families:
            times = dict(seconds_of_the_first_card(recipes))
            for (plan, *place), (seconds, *_) in times.items():
                adamw = PLANS.get((plan.kind.with_adamw, plan.way))
                if (adamw, *place) in times:
                    whole, _, _, end, *_ = times[adamw, *place]
                    takes = min(OF_ADAMW[one] for one in plan.kind.techniques if one in OF_ADAMW)
                    assert seconds >= whole - (1 - takes) * end - 0.002 * whole, (model, plan.name)
                    pairs += 1
    assert pairs > 5000


def seconds_of_the_first_card(recipes: dict) -> Iterator[tuple[tuple, list]]:
    """Of each plan, length and micro-batch."""
    card = next(card for own in recipes.values() for card in own.get("seconds", ()))
    for name, own in recipes.items():
        if "points" in own:
            rows = unpacked(own, card)
            for (length, n, *_), row in zip(rows["points"], rows["seconds"][card], strict=True):
                yield (Plan.named(name), length, n), row


def test_a_damaged_file_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "FOLDER", tmp_path)
    (tmp_path / "gpt2.json.gz").write_bytes(b"no archive")
    with pytest.raises(ValueError, match="gpt2.json.gz is damaged: make evidence SETS=atlas"):
        table.read("gpt2")
    assert table.read("qwen3-0.6b") == {}


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("docs/*.*")) + [ROOT / "README.md"], ids=lambda p: p.name
)
def test_commands_of_pages_are_read_by_the_command(path):
    """What a reader copies: with a value for each name in capitals or in the script's ${...}."""
    text = path.read_text(encoding="utf-8")
    lines = re.findall(r"`(onegpu (?:fit|predict) [^`\n]*-[^`\n]*)`", text)
    lines += re.findall(r"^\$? ?(onegpu (?:fit|predict) .*)$", text, re.MULTILINE)
    for line in lines:
        line = re.sub(r"\$\{asked\.(length|batch)\}|\bTOKENS\b|\bSAMPLES\b", "8", line)
        line = re.sub(r"\$\{card\}|\bCARD\b", "T4", re.sub(r"\$\{[^}]*\}|\bMODEL\b", "gpt2", line))
        parsed(shlex.split(line)[1:])
    assert lines or path.name not in ("will_it_fit.js", "will_it_fit.md", "predict.md", "README.md")
