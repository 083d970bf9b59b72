"""The page "Will it fit?" in a browser: its answers are the command's, by link and by keyboard."""

import functools
import json
import random
import shlex
from pathlib import Path

import pytest

from planner import recorded
from planner.answer import ORDERS
from planner.atlas import Asked
from planner.command import parsed

ROOT = Path(__file__).resolve().parents[2]
SITE, PICTURES = ROOT / "build" / "site", ROOT / "build" / "browser"
PAGE = "docs/will_it_fit.html"
ATLAS = SITE / "_static" / "atlas"
QUESTIONS = 10
OPTIONS = {"model": "model", "length": "length", "batch": "batch", "card": "gpu", "order": "order"}

if not (ATLAS / "index.json").exists():
    pytest.skip("no site in build/site: make site", allow_module_level=True)


@functools.cache
def data(name: str) -> dict:
    return json.loads((ATLAS / f"{name}.json").read_text(encoding="utf-8"))


def questions() -> list[dict]:
    """Drawn by chance, the same in each run, of cards for which something is recorded; in each of
    the orders in turn."""
    index, draw = data("index"), random.Random(QUESTIONS)
    families = {family for name in index["models"] for family in data(name)["families"]}
    cards = [card["name"] for card in index["cards"] if card["family"] in families]
    models = [draw.choice(index["models"]) for _ in range(QUESTIONS)]
    return [
        {
            "model": model,
            "length": draw.choice([n for n in data(model)["lengths"] if n <= 4096]),
            "batch": draw.choice(index["batches"]),
            "card": draw.choice(cards),
            "order": list(ORDERS)[k % len(ORDERS)],
        }
        for k, model in enumerate(models)
    ]


def link(address: str, question: dict) -> str:
    told = "&".join(f"{name}={value}".replace(" ", "+") for name, value in question.items())
    return f"{address}/{PAGE}#{told}"


def asked(question: dict) -> Asked:
    index = data("index")
    card = next(card for card in index["cards"] if card["name"] == question["card"])
    model, length = data(question["model"]), question["length"]
    if model["task"] in index["samples"]:  # whatever is chosen for texts
        length = model["lengths"][0]
    return Asked(index, model, card, length, question["batch"])


def command_answers(question: dict):
    """What `onegpu fit` tells at once; None where it would search."""
    told = (question[name] for name in ("model", "card", "length", "batch", "order"))
    return recorded.fit(*told)


def visit(page, address: str) -> None:
    page.goto("about:blank")  # a new fragment alone would not load the page
    page.goto(address)
    page.wait_for_function("!document.querySelector('#fit-state').textContent.startsWith('With')")


@pytest.mark.parametrize(
    "question", questions(), ids=lambda question: "-".join(map(str, question.values()))
)
def test_the_page_gives_the_numbers_of_the_atlas_in_the_order_of_the_command(
    question, window, address
):
    visit(window, link(address, question))
    own = asked(question)
    wanted = own.answer(question["order"]) or list(filter(None, [own.miss()]))
    shown = [
        dict(box.evaluate("box => ({...box.dataset})"))
        for box in window.locator(".fit-recipe").all()
    ]
    told = [(box["recipe"], box["microBatch"], box["need"]) for box in shown]
    assert told == [(one.recipe, str(one.micro_batch), f"{one.need:.1f}") for one in wanted]
    command = window.locator("#fit-state code").inner_text()
    options = parsed(shlex.split(command)[1:])
    options.order = options.order or "change"
    told = {name: getattr(options, key) for name, key in OPTIONS.items()}
    one = own.model["task"] in own.index["samples"]  # then there is one length, which is left out
    assert told == question | ({"length": None} if one else {})
    if answer := command_answers(question):
        assert [(box["recipe"], float(box["need"])) for box in shown] == [
            (recipe.name, pytest.approx(recipe.need / 2**20, abs=0.1)) for recipe in answer.recipes
        ]
    for box, one in zip(shown, wanted, strict=True):
        assert float(box["seconds"]) == pytest.approx(one.seconds, rel=1e-3)


@pytest.mark.parametrize("order", ORDERS)
def test_an_order_is_the_commands_and_is_said_as_there(order, window, address):
    question = {"model": "qwen3-0.6b", "length": 512, "batch": 1, "card": "RTX 3090"}
    question["order"] = order
    visit(window, link(address, question))
    told = [recipe.name for recipe in command_answers(question).recipes]
    boxes = window.locator(".fit-recipe").all()
    assert [box.get_attribute("data-recipe") for box in boxes] == told
    assert (ORDERS[order] or "Least change is first.") in window.locator("#fit-state").inner_text()
    window.screenshot(path=PICTURES / f"fit-{order}-{window.scheme}.png")


def test_a_link_with_nonsense_is_answered_by_a_sentence(window, address):
    visit(window, f"{address}/{PAGE}#model=gpt-9&length=x&card=%3Cb%3E")
    words = window.locator("#fit-state").inner_text()
    assert "gpt-9" in words and "which is not here" in words and "<b>" in words


def test_a_sample_as_long_as_a_window_of_attention_is_said_not_to_be_recorded(window, address):
    question = {"model": "mistral-7b", "length": 4096, "batch": 1, "card": "A100-80GB"}
    visit(window, link(address, question))
    words = window.locator("#fit-state").inner_text()
    assert "a window of 4,096 tokens, and nothing as long is recorded" in words
    assert "nothing fits" not in words and not window.locator(".fit-recipe").count()


def test_a_question_is_asked_by_keyboard_and_becomes_a_link(window, address):
    visit(window, f"{address}/{PAGE}")
    window.locator("#fit select[name=length]").focus()
    window.keyboard.press("ArrowDown")
    window.keyboard.press("Tab")
    assert "length=2048" in window.url
    assert window.locator(".fit-recipe").count()
    window.locator("#fit select[name=order]").focus()
    window.keyboard.press("ArrowDown")
    window.keyboard.press("Tab")
    assert "order=fastest" in window.url
    assert "The fastest is first." in window.locator("#fit-state").inner_text()


def test_a_length_stays_in_the_link_after_a_model_of_pictures(window, address):
    """Its field is disabled for such a model, and what is disabled is no part of a form's data."""
    names = data("index")["models"]
    found = [name for name in names if data(name)["task"] == "image_classification"]
    if not found:
        pytest.skip("no model of pictures is recorded")
    visit(window, link(address, questions()[0] | {"model": "gpt2", "length": 512}))
    model, length = (window.locator(f"#fit select[name={name}]") for name in ("model", "length"))
    model.select_option(found[0])
    window.wait_for_function("document.querySelector('#fit select[name=length]').disabled")
    model.select_option("gpt2")
    assert "length=512" in window.url and length.input_value() == "512"


def test_the_code_is_the_planners(window, address):
    from planner.question import ask
    from planner.script import script
    from planner.techniques import Plan

    question = questions()[0] | {"card": "A100-80GB", "length": 1024, "batch": 8}
    visit(window, link(address, question))
    one = asked(question).fits()[0]
    planned = ask(question["model"], question["card"], length=1024, batch=8)
    text = window.locator(".fit-recipe pre").first.evaluate("box => box.textContent")
    assert text == script(planned, Plan.named(one.recipe), one.micro_batch)


def rows_of(window, label: str) -> dict[str, str]:
    """The recipes of one of the two views, by the name of the card or the model."""
    rows = window.get_by_label(label).locator("tbody tr").all()
    return {row.get_attribute("data-name"): row.get_attribute("data-recipe") for row in rows}


def test_every_card_is_asked_the_same_question(window, address):
    question = questions()[2] | {"length": 1024, "batch": 8}
    assert question["order"] == "smallest"
    visit(window, link(address, question))
    window.get_by_text("Every card", exact=True).click()
    told = rows_of(window, "The first recipe that fits, on every card")
    known = [card["name"] for card in data("index")["cards"] if card["like"] == card["name"]]
    assert list(told) == known
    for name, recipe in told.items():
        first = next(iter(asked(question | {"card": name}).answer("smallest")), None)
        assert recipe == (first.recipe if first else ""), name


@pytest.mark.parametrize("card", ["T4", "RTX 4090"])
def test_every_model_is_asked_the_same_question(window, address, card):
    question = questions()[0] | {"length": 1024, "batch": 8, "card": card}
    visit(window, link(address, question))
    window.get_by_text("Every model", exact=True).click()
    models = data("index")["models"]
    label = "The first recipe that fits, for every model"
    count = f"document.querySelectorAll('[aria-label=\"{label}\"] tbody tr').length"
    window.wait_for_function(f"{count} == {len(models)}")
    told = rows_of(window, label)
    assert list(told) == models
    for name, recipe in told.items():
        first = next(iter(asked(question | {"model": name}).fits()), None)
        assert recipe == (first.recipe if first else ""), name


def test_without_javascript_a_table_answers(chromium, address):
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{address}/{PAGE}")
    assert page.locator("article table").first.locator("tbody tr").count() == len(
        data("index")["models"]
    )
    assert "onegpu fit" in page.locator("#fit-state").inner_text()
    context.close()


def test_a_damaged_file_is_said_and_the_page_goes_on(window, address):
    model = data("index")["models"][0]
    window.route(f"**/atlas/{model}.json", lambda route: route.fulfill(body='{"model":'))
    visit(window, f"{address}/{PAGE}#model={model}")
    assert "cannot answer" in window.locator("#fit-state").inner_text()
    window.screenshot(path=PICTURES / f"fit-damaged-{window.scheme}.png")
