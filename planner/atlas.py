"""The planner's answer from recorded points, as the page "Will it fit?" computes it in JavaScript.

The page's script (`docs/will_it_fit.js`) and this follow `planner.search`, with recorded points in
place of its lines. A test asks both the same questions.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import exp, log

# Where a row of points has a step of one micro-batch, and one of several.
ALLOCATED, SEVERAL, PARTS = 2, 9, 7
FASTEST, SMALLEST = "fastest", "smallest"  # of answer

TEMPORARIES = -1  # of the parts of what is allocated

PERMILLE = 1000
STEPS = 1000  # of the natural logarithm: one is 0.1 %


def unpacked(recipe: dict, only: str = "") -> dict:
    """A recipe of the atlas with a row for each point; its file has columns (`packed`).

    Args:
        recipe: as its file has it.
        only: the card whose seconds are wanted; all if "".

    Returns:
        The same, with `points`: tokens of a sample, samples, and in MiB what a step of one
        micro-batch takes and, where there can be several, one of more; and with `seconds` of each
        card: of a step of one micro-batch, the shortest and the longest as shares of it, of a
        step's end, of each micro-batch where there are several, and the number of the limit.
    """
    if "points" not in recipe:
        return recipe
    count = len(recipe["points"][0])
    points = [list(row) for row in zip(*recipe["points"], strict=True)]
    of_first, seconds = None, {}
    for card, columns in recipe["seconds"].items():
        if of_first and only not in ("", card):
            continue
        low, high, once, changes, limit, more = (
            c if isinstance(c, list) else [c] * count for c in columns
        )
        steps = list(accumulate(changes))
        if of_first:
            steps = [a + b for a, b in zip(of_first, steps, strict=True)]
        of_first = of_first or steps
        each = [exp(step / STEPS) for step in steps]
        whole = [(a + b) * (1 + c / PERMILLE) for a, b, c in zip(once, each, more, strict=True)]
        rows = zip(map(_digits, whole), low, high, once, map(_digits, each), limit, strict=True)
        seconds[card] = [list(row) for row in rows]
    return recipe | {"points": points, "seconds": seconds}


def packed(recipe: dict) -> dict:
    """A recipe with rows as its file has it: in less than half of the bytes, once compressed.

    There are columns in place of rows, and one number where all of a column are the same. Seconds
    of a micro-batch are whole steps of a logarithm, and so kept to 0.05 %; of them those of the
    first card are taken off, if it is another, and then those of the point before. Seconds of a
    step of one micro-batch are thousandths beyond the sum of its parts, which is nearly all.

    >>> rows = {"points": [[512, 1]], "seconds": {"T4": [[3.0042, 0.8, 1.6, 1.0, 1.9996, 3]]}}
    >>> packed(rows)["seconds"]
    {'T4': [0.8, 1.6, 1.0, 693, 3, 2]}
    >>> unpacked(packed(rows))["seconds"]
    {'T4': [[3.0057, 0.8, 1.6, 1.0, 1.9997, 3]]}
    """
    if "points" not in recipe:
        return recipe
    of_first, seconds = None, {}
    for card, rows in recipe["seconds"].items():
        whole, low, high, once, each, limit = zip(*rows, strict=True)
        steps = [round(STEPS * log(one)) for one in each]
        beyond = [a - b for a, b in zip(steps, of_first or [0] * len(steps), strict=True)]
        changes = [b - a for a, b in pairwise([0, *beyond])]
        of_first = of_first or steps
        sums = [a + b for a, b in zip(once, each, strict=True)]
        more = [round(PERMILLE * (a / b - 1)) for a, b in zip(whole, sums, strict=True)]
        columns = [list(column) for column in (low, high, once, changes, limit, more)]
        seconds[card] = [c[0] if len(set(c)) == 1 else c for c in columns]
    points = [list(column) for column in zip(*recipe["points"], strict=True)]
    return recipe | {"points": points, "seconds": seconds}


def _digits(seconds: float) -> float:
    """As many as tell two steps apart, so that a file that is read and written stays the same."""
    return float(f"{seconds:.5g}")


@dataclass(frozen=True)
class Found:
    """A recipe with a micro-batch; sizes in MiB."""

    recipe: str
    kind: str
    way: int  # its place among the ways
    micro_batch: int
    accumulation: int
    allocated: int
    reserved: int
    by_category: list[int]
    need: float
    seconds: float  # of a step; 0 where the card's rates are unknown
    low: float
    high: float
    limited_by: str


@dataclass(frozen=True)
class Asked:
    """A question to the atlas, with the page's data."""

    index: dict
    model: dict
    card: dict
    length: int
    batch: int

    @property
    def family(self) -> dict | None:
        """What is recorded for cards of this kind; None for nothing."""
        return self.model["families"].get(self.card["family"])

    def logits_are_large(self) -> bool:
        """Whether it pays to spare them."""
        logits = 4 * self.length * self.batch * self.model["vocabulary"]
        return logits >= self.index["small_logits"] * self.card["memory"] * 2**20

    def ways(self) -> list[int]:
        """The numbers of the ways that are tried: logits are spared where they are large."""
        spares = self.family["spares"] if self.logits_are_large() else ""
        ways = enumerate(self.index["ways"])
        return [k for k, way in ways if way["logits"] in ("", spares)]

    def name(self, kind: dict, way: int) -> str:
        """A recipe's, such as "LoRA, checkpointing"."""
        return ", ".join(filter(None, (kind["name"], self.index["ways"][way]["name"])))

    def of(self, kind: dict, way: int, micro_batch: int) -> Found | None:
        """A recipe with a micro-batch; None where it is not recorded."""
        name = self.name(kind, way)
        recipe = self.family["recipes"].get(name)
        rows = recipe["points"] if recipe else []
        at = next((k for k, r in enumerate(rows) if r[:2] == [self.length, micro_batch]), None)
        if at is None:
            return None
        # A micro-batch of more than the batch is a step by itself, and so is any of some kinds.
        accumulation = max(1, self.batch // micro_batch) if kind["accumulates"] else 1
        start = ALLOCATED if accumulation == 1 else SEVERAL
        allocated, reserved, *parts = rows[at][start : start + PARTS]
        allocated += self.card["workspaces"]
        reserved += self.card["workspaces"]
        parts[TEMPORARIES] += self.card["workspaces"]
        need = reserved * (1 + self.index["margin"]) + self.card["context"]
        seconds, low, high, limit = 0.0, 1.0, 1.0, ""
        if timed := recipe["seconds"].get(self.card["like"]):
            first, low, high, once, each, k = timed[at]
            seconds = first if accumulation == 1 else once + accumulation * each
            limit = self.index["limits"][k]
        return Found(
            name, kind["name"], way, micro_batch, accumulation, allocated, reserved, parts, need,
            seconds, low * seconds, high * seconds, limit,
        )  # fmt: skip

    def tried(self, kind: dict) -> dict[int, list[Found]]:
        """The ways that the planner tries for a kind, one after another, and what of each fits."""
        tried: dict[int, list[Found]] = {}
        for way in self.ways():
            if any(tried.values()) and self.index["ways"][way]["host"]:
                break  # that is slower than what fits
            own = [self.of(kind, way, n) for n in self.micro_batches(kind)]
            tried[way] = [one for one in own if one and one.need <= self.card["memory"]]
            if any(one.micro_batch == self.batch for one in tried[way]):
                break  # what follows saves memory
        return tried

    def candidates(self, kind: dict) -> list[Found]:
        """Those of a kind that fit, best first."""
        found = [one for fits in self.tried(kind).values() for one in fits]
        as_good = self.index["as_fast"] * min((f.seconds for f in found), default=0)

        def order(one: Found) -> tuple:
            return (0 if one.seconds <= as_good else one.seconds), one.way, one.micro_batch

        return sorted(found, key=order)

    def largest(self, one: Found) -> int:
        """Samples of the largest micro-batch that would fit, by a line through recorded ones."""
        kind = next(k for k in self.index["kinds"] if k["name"] == one.kind)
        recorded = [self.of(kind, one.way, n) for n in self.index["micro_batches"]]
        room, known = self.card["memory"], [f for f in recorded if f]
        largest = max(
            (f for f in known if f.need <= room), key=lambda f: f.micro_batch, default=one
        )
        others = [f for f in known if f.micro_batch != largest.micro_batch]
        if not others:
            return largest.micro_batch
        near = max(others, key=lambda f: f.micro_batch)
        samples = largest.micro_batch - near.micro_batch
        per_sample = max(1.0, (largest.need - near.need) / samples)
        return largest.micro_batch + max(0, int((room - largest.need) / per_sample))

    def complete(self, order: str) -> bool:
        """Whether all that the planner would try for an order is recorded."""
        lengths, sizes = self.model["lengths"], self.index["micro_batches"]
        recorded = self.length in lengths and self.batch in sizes
        if not recorded or self.length * self.batch > self.index["tokens"] or not self.family:
            return False
        ways = {True: lambda kind: self.ways(), False: self.tried}[order == SMALLEST]
        tried = {self.name(kind, way) for kind in self.index["kinds"] for way in ways(kind)}
        return not tried & set(self.family["missing"])

    def micro_batches(self, kind: dict) -> list[int]:
        """Those that are tried."""
        if not kind["accumulates"]:
            return [self.batch]
        return [n for n in self.index["micro_batches"] if self.batch % n == 0]

    def fits(self) -> list[Found]:
        """At most one of a kind, least change first."""
        found: list[Found] = []
        adapters = {kind["name"]: kind["adapters"] for kind in self.index["kinds"]}
        for kind in self.index["kinds"] if self.family else []:
            rivals = [] if kind["adapters"] else [f for f in found if not adapters[f.kind]]
            fastest = min((rival.seconds for rival in rivals), default=None)
            for one in self.candidates(kind)[:1]:
                if fastest is None or one.seconds * self.index["faster"] < fastest:
                    found.append(one)
        return found

    def smallest(self) -> list[Found]:
        """Of each kind that fits what needs least, whatever that takes in time."""
        found: list[Found] = []
        for kind in self.index["kinds"] if self.family else []:
            micro_batch = 1 if kind["accumulates"] else self.batch
            own = [self.of(kind, way, micro_batch) for way in self.ways()]
            fits = [one for one in own if one and one.need <= self.card["memory"]]
            least = self.index["as_small"] * min((one.need for one in fits), default=0)
            found += [one for one in fits if one.need <= least][:1]
        return found

    def answer(self, order: str) -> list[Found]:
        """The recipes that fit, in an order: "change", "fastest" or "smallest"."""
        if order == SMALLEST:
            return sorted(self.smallest(), key=lambda one: one.need)
        found = self.fits()
        return sorted(found, key=lambda one: one.seconds) if order == FASTEST else found

    def miss(self) -> Found | None:
        """What saves most of what is recorded."""
        kind = next(k for k in self.index["kinds"] if k["name"] == self.index["smallest"])
        ways = reversed(self.ways()) if self.family else ()
        return next(filter(None, (self.of(kind, way, 1) for way in ways)), None)

    def smallest_card(self, one: Found) -> str:
        """The smallest known card that holds a recipe; "" for none."""
        margin = 1 + self.index["margin"]
        for card in self.index["cards"]:
            same = card["family"] == self.card["family"] and card["like"] == card["name"]
            reserved = one.reserved - self.card["workspaces"] + card["workspaces"]
            if same and reserved * margin + card["context"] <= card["memory"]:
                return card["name"]
        return ""
