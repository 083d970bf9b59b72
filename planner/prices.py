"""What a run costs on cards whose prices somebody brings, and the cheapest of those that hold it.

A price list is a table (examples/prices.csv is one) with the columns `card`, a name of
data/gpus.csv, and `price_per_hour`; `currency`, `date` and `source` may stand beside them. The name
`example` stands for that one, which a wheel brings.
"""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fake_cuda.cards import gib, gpu
from fake_cuda.cost import Estimate
from fake_cuda.files import example_file

COLUMNS = ("card", "price_per_hour")
EXAMPLE = "example"
HOUR = 3600
# What a price has no part for, said below each table.
LEFT_OUT = (
    "The order is by the middle of each range. Not in it: starting, loading data, evaluating, "
    "saving, and what a provider asks for processors, memory and storage."
)


class Price(NamedTuple):
    """Of a card for an hour, where and when it was read."""

    card: str
    per_hour: float
    currency: str = ""
    date: str = ""
    source: str = ""


def read(path: str | Path) -> dict[str, Price]:
    """The prices of a list, by card.

    Args:
        path: of a .csv file, or `EXAMPLE`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such table, or a row has no card that is known or no price.
    """
    try:
        with _file(path).open(encoding="utf-8-sig", newline="") as lines:
            table = csv.DictReader(lines)
            rows, columns = [*table], table.fieldnames or []
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text: a price list is a .csv file") from error
    if lacking := [name for name in COLUMNS if name not in columns]:
        raise ValueError(f"{path} lacks the column {lacking[0]}: see examples/prices.csv")
    found: dict[str, Price] = {}
    for number, row in enumerate(rows, start=2):
        price = _price(row, f"{path}, line {number}")
        if price.card in found:
            raise ValueError(f"{path}, line {number}: {price.card} has a price already")
        found[price.card] = price
    if not found:
        raise ValueError(f"{path} has no row: a price list has a card and a price in each")
    return found


def _file(path: str | Path) -> Path:
    return example_file("prices.csv") if str(path) == EXAMPLE else Path(path)


def _price(row: dict[str, str], where: str) -> Price:
    try:
        name = gpu((row["card"] or "").strip()).name
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    text = (row["price_per_hour"] or "").strip()
    try:
        per_hour = float(text)
    except ValueError:
        per_hour = 0.0
    if not 0 < per_hour < float("inf"):
        raise ValueError(f"{where}: {text!r} is no price for an hour, such as 0.59")
    about = ((row.get(key) or "").strip() for key in ("currency", "date", "source"))
    return Price(name, per_hour, *about)


def cards_asked(asked: str | None, prices: dict[str, Price]) -> list[str]:
    """The cards to compare: those that are named, with commas between, or all of the list.

    Raises:
        ValueError: a name is not known, or has no price.
    """
    names = [gpu(name.strip()).name for name in asked.split(",")] if asked else [*prices]
    for name in names:
        if name not in prices:
            raise ValueError(f"{name} has no price: the list has {', '.join(prices)}")
    return list(dict.fromkeys(names))


def money(amount: float) -> str:
    """An amount in three digits.

    >>> money(0.0013996), money(23.04), money(12345.6)
    ('0.0014', '23', '12,300')
    """
    rounded = float(f"{amount:.3g}")
    return f"{rounded:,.0f}" if rounded >= 100 else f"{rounded:g}"


@dataclass(frozen=True)
class Length:
    """How long a run is: so many steps or tokens; one step where neither is told."""

    steps: float | None = None
    tokens: float | None = None

    def steps_of(self, prediction) -> float:
        """The steps of this prediction's run.

        Raises:
            ValueError: tokens are told, and a step's are not known.
        """
        if self.tokens is None:
            return 1 if self.steps is None else self.steps
        if not prediction.tokens:
            raise ValueError("how many tokens a step has is not known here: tell --steps instead")
        return self.tokens / prediction.tokens

    def __str__(self) -> str:
        if self.tokens is not None:
            return f"{self.tokens:,.0f} tokens"
        return f"{self.steps:,.0f} steps" if self.steps else "a step"


@dataclass(frozen=True)
class Offer:
    """A card, what was predicted for it, and what the run costs there; None without a time."""

    price: Price
    prediction: object
    cost: Estimate | None

    def words(self) -> str:
        """The cost with its range."""
        if self.cost is None:
            return "no time is predicted"
        low, high = money(self.cost.low), money(self.cost.high)
        return f"{money(self.cost)} ({low} to {high})"

    def facts(self) -> dict:
        """For JSON."""
        found = {"card": self.price.card, "fits": self.prediction.fits}
        found |= {"price_per_hour": self.price.per_hour, "currency": self.price.currency}
        found |= {"date": self.price.date, "source": self.price.source}
        ends = dict(cost=None, cost_low=None, cost_high=None)
        if self.cost is not None:
            ends = dict(cost=float(self.cost), cost_low=self.cost.low, cost_high=self.cost.high)
        return found | ends


def offer(prediction, price: Price, length: Length) -> Offer:
    """What a run of that length costs by a prediction for this card."""
    steps, seconds = length.steps_of(prediction), prediction.step_seconds
    if not seconds:
        return Offer(price, prediction, None)
    ends = seconds, prediction.step_seconds_low, prediction.step_seconds_high
    return Offer(price, prediction, Estimate(*(price.per_hour * steps * s / HOUR for s in ends)))


def cheapest_first(offers: list[Offer]) -> list[Offer]:
    """Those that fit first, the cheapest run first; where no time is known, by the hour's price."""

    def order(one: Offer):
        known = one.cost is not None
        return not one.prediction.fits, not known, one.cost if known else one.price.per_hour

    return sorted(offers, key=order)


def table(offers: list[Offer], length: Length) -> str:
    """The offers in their order, and where their prices are from."""
    unit = next((one.price.currency for one in offers if one.price.currency), "")
    rows = [("card", "needs", "fits", f"{unit} an hour".strip(), f"{unit} for {length}".strip())]
    for one in offers:
        needs, fits = gib(one.prediction.used), "yes" if one.prediction.fits else "no"
        rows.append((one.price.card, needs, fits, f"{one.price.per_hour:g}", one.words()))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    best = offers[0]
    if not best.prediction.fits:
        lines.append("None of them holds it.")
    elif best.cost is not None:
        lines.append(f"The cheapest that holds it: {best.price.card}.")
    lines.append(LEFT_OUT)
    told = {(one.price.date, one.price.source) for one in offers} - {("", "")}
    lines += [f"Prices: {', '.join(filter(None, pair))}." for pair in sorted(told)]
    return "\n".join(lines)
