"""`onegpu predict --prices`: what a run costs, and the cheapest card that holds it."""

import csv
import json
from types import SimpleNamespace

import pytest

from fake_cuda.cards import cards
from fake_cuda.files import example_file
from planner import prices
from planner.command import main

LIST = str(example_file("prices.csv"))
LONG = prices.Length(steps=1000)
TINY = ["predict", "--size", "tiny", "--prices"]


def asked(capsys, *arguments):
    status = main(list(arguments))
    return status, *capsys.readouterr()


def predicted(seconds=None, fits=True, tokens=None):
    low, high = (seconds and seconds * share for share in (0.5, 2))
    times = dict(step_seconds=seconds, step_seconds_low=low, step_seconds_high=high)
    return SimpleNamespace(fits=fits, tokens=tokens, used=2**30, note="", **times)


def offered(card, per_hour, length=LONG, **about):
    price = prices.Price(card, per_hour, "EUR", "2026-01-02", "a list")
    return prices.offer(predicted(**about), price, length)


def test_the_example_has_a_date_and_a_source_in_each_row():
    with example_file("prices.csv").open(encoding="utf-8", newline="") as lines:
        rows = [*csv.DictReader(lines)]
    assert len(rows) >= 5 and all(row["date"] and "https://" in row["source"] for row in rows)
    assert {row["card"] for row in rows} <= set(cards())
    assert prices.read("example") == prices.read(LIST) != {}


def test_a_cost_by_hand():
    half_an_hour = offered("T4", 3.0, seconds=1.8)  # a thousand steps of 1.8 s
    assert half_an_hour.cost == pytest.approx(1.5)
    assert (half_an_hour.cost.low, half_an_hour.cost.high) == pytest.approx((0.75, 3.0))
    by_tokens = prices.Length(tokens=8e6)
    assert offered("T4", 3.0, by_tokens, seconds=1.8, tokens=8000).cost == pytest.approx(1.5)
    assert offered("T4", 3600.0, prices.Length(), seconds=2.0).cost == pytest.approx(2.0)


def test_the_cheapest_run_that_fits_is_first():
    """Not the cheapest hour: a card that is twice as dear and three times as fast costs less."""
    slow, fast = offered("T4", 1.0, seconds=3.0), offered("H100", 2.0, seconds=1.0)
    full, unknown = offered("L4", 0.1, seconds=0.1, fits=False), offered("H20", 0.2)
    order = prices.cheapest_first([full, unknown, slow, fast])
    assert [one.price.card for one in order] == ["H100", "T4", "H20", "L4"]
    text = prices.table(order, prices.Length(steps=1000))
    assert "The cheapest that holds it: H100." in text and "no time is predicted" in text
    assert "EUR for 1,000 steps" in text and text.endswith("Prices: 2026-01-02, a list.")
    assert "None of them holds it." in prices.table([full], prices.Length())


def test_the_command_orders_the_cards_of_a_list(capsys):
    status, out, err = asked(capsys, *TINY, LIST, "--steps", "1,000", "--gpu", "T4,L4")
    assert (status, err) == (0, "") and "USD for 1,000 steps" in out and "2026-05-07" in out
    status, out, err = asked(capsys, *TINY, LIST, "--json", "--must-fit", "--tokens", "1e9")
    found = json.loads(out)
    assert status == 0 and found["run"] == "1,000,000,000 tokens"
    assert {card["card"] for card in found["cards"]} == set(prices.read(LIST))
    costs = [card["cost"] for card in found["cards"]]
    assert costs == sorted(costs) and found["cards"][0]["cost_low"] < costs[0]
    first = found["cards"][0]
    steps = 1e9 / (8 * 128)
    assert costs[0] == pytest.approx(first["price_per_hour"] * steps * first["step_seconds"] / 3600)


def test_a_status_says_that_no_card_of_the_list_holds_it(capsys, monkeypatch):
    none = predicted(seconds=1.0, fits=False)
    monkeypatch.setattr("planner.command._model_predicted", lambda _: (none, "a title\n", {}))
    assert asked(capsys, *TINY, LIST, "--must-fit")[0] == 3
    status, out, _ = asked(capsys, *TINY, LIST)
    assert status == 0 and "None of them holds it." in out


@pytest.mark.parametrize(
    "text, said",
    [
        ("card\nT4\n", "lacks the column price_per_hour: see examples/prices.csv"),
        ("card,price_per_hour\n", "has no row"),
        ("card,price_per_hour\nT4,free\n", "line 2: 'free' is no price for an hour"),
        ("card,price_per_hour\nT4,-1\n", "line 2: '-1' is no price for an hour"),
        ("card,price_per_hour\nT4,nan\n", "line 2: 'nan' is no price for an hour"),
        ("card,price_per_hour\nT4,1\nL5,1\n", "line 3: 'L5' is not a known GPU"),
        ("card,price_per_hour\nT4,1\nt4,2\n", "line 3: T4 has a price already"),
        ("card,price_per_hour\nT4\n", "line 2: '' is no price for an hour"),
    ],
)
def test_a_list_that_is_none_is_one_sentence(text, said, tmp_path, capsys):
    path = tmp_path / "mine.csv"
    path.write_text(text)
    status, out, err = asked(capsys, *TINY, str(path))
    assert (status, out) == (2, "") and said in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([*TINY, "nowhere.csv"], "No such file"),
        ([*TINY, LIST, "--gpu", "T4,A10"], "A10 has no price: the list has T4, L4, L40S"),
        ([*TINY, LIST, "--steps", "1", "--tokens", "1"], "say once how long the run is"),
        ([*TINY, LIST, "--steps", "few"], "'few' is no number of them"),
        ([*TINY, LIST, "--gpus", "2xT4"], "--prices is for one card"),
        ([*TINY, LIST, "--timeline", "step.png"], "--timeline draws one card's step"),
        (["predict", "--size", "tiny", "--steps", "9"], "add --prices"),
        (["predict", "--size", "tiny", "--gpu", "T4,L4"], "several cards are compared by"),
    ],
)
def test_what_does_not_go_together_is_one_sentence(arguments, said, capsys):
    status, out, err = asked(capsys, *arguments)
    assert (status, out) == (2, "") and said in err and err.count("\n") == 1


def test_a_card_that_cannot_run_it_is_named(capsys, monkeypatch):
    def refused(options):
        if options.gpu == "L4":
            raise ValueError("it asks for what only some cards have")
        return predicted(seconds=1.0), "", {}

    monkeypatch.setattr("planner.command._model_predicted", refused)
    status, out, err = asked(capsys, *TINY, "example", "--gpu", "T4,L4")
    assert (status, out) == (2, "") and err.startswith("error: L4: it asks for what only")


def test_tokens_of_a_step_that_nobody_knows():
    with pytest.raises(ValueError, match="tell --steps instead"):
        offered("T4", 1.0, prices.Length(tokens=1e6), seconds=1.0)
