"""Tables that the course fills by hand, and what its tools make of them."""

import pandas as pd

from evidence.schemas.checking import (
    ANY,
    CARD,
    DAY,
    FILLED,
    POSITIVE,
    WHOLE,
    cell,
    columns,
    fault,
    needs,
    one_of,
    table,
    whole,
)

GUIDES = {"S0": 17, "S1": 73, "S2": 7, "S3": 54, "S4": 16}  # claims of each
CLAIMS = [f"{guide}-{i}" for guide, n in GUIDES.items() for i in range(1, n + 1)]
VERDICTS = ("TRUE", "TRUE*", "FALSE", "OLD", "LIT", "CONTEXT")


def claims(cells: dict[str, set[str]] | None = None):
    """`cells` are the ids of each lesson's cells, by its name; None leaves them unchecked."""

    def unknown(rows: pd.DataFrame) -> pd.Series:
        pairs = zip(rows["lesson"], rows["cell"], strict=True)
        return pd.Series([cells is not None and c not in cells.get(n, ()) for n, c in pairs])

    found = {"id": FILLED, "guide": cell(one_of(*GUIDES)), "claim": FILLED}
    found |= {"verdict": cell(one_of(*VERDICTS)), "lesson": FILLED, "how": FILLED, "cell": ANY}
    return table(
        found,
        "id",
        fault("guide", lambda rows: rows["guide"] != rows["id"].str.split("-").str[0], "not id's"),
        fault("cell", unknown, "which the lesson has not"),
        whole(
            lambda rows: list(rows["id"]) == CLAIMS,
            f"the ids are not {CLAIMS[0]} to {CLAIMS[-1]}, each once and in order",
        ),
    )


def scoreboard(runs: dict[str, set[str]] | None = None):
    """`runs` are the names of runs by kind (predicted, published, own); None: any name will do."""

    def no_pairs(kind: str, rows: pd.DataFrame) -> pd.Series:
        ends = zip(rows[f"{kind}_with"], rows[f"{kind}_without"], strict=True)
        split = [tuple(names.split(" ; ") for names in pair) for pair in ends]
        return pd.Series([not paired(*pair, runs and runs[kind]) for pair in split])

    def counted(rows: pd.DataFrame) -> pd.Series:
        speed, named = rows["question"] == "speed", rows["predicted_with"] != ""
        right = (rows["counted"] == "samples_per_second").where(
            speed, rows["counted"].isin(["peak_allocated", "peak_reserved"])
        )
        return ~right.where(named, rows["counted"] == "")

    pairs = [f"{kind}_{end}" for kind in ("predicted", "published", "own")
             for end in ("with", "without")]  # fmt: skip
    found = {"question": cell(one_of("speed", "memory")), "method": FILLED}
    found |= {"claimed": cell(one_of("yes", "no", "maybe")), "predicted": ANY, "counted": ANY}
    found |= columns(ANY, " ".join(pairs)) | {"not_here": ANY, "judged": FILLED}
    nothing = lambda rows: rows["predicted_with"] == ""  # noqa: E731
    return table(
        found,
        "question method",
        needs("predicted", nothing, "and no run is named in its place"),
        fault("counted", counted, "which the question does not count"),
        *(
            fault(f"{kind}_with", lambda rows, kind=kind: no_pairs(kind, rows), "no pair of runs")
            for kind in ("predicted", "published", "own")
        ),
        whole(in_order, "its rows are not every method for speed, then every one for memory"),
    )


def paired(one: list[str], two: list[str], known: set[str] | None) -> bool:
    """Whether runs with and without a method are pairs of known ones, or none are named."""
    if one == two == [""]:
        return True
    right = len(one) == len(two) and all(a and b and a != b for a, b in zip(one, two, strict=True))
    return right and (known is None or {*one, *two} <= known)


def in_order(rows: pd.DataFrame) -> bool:
    methods = list(dict.fromkeys(rows["method"]))
    found = list(zip(rows["question"], rows["method"], strict=True))
    return found == [(question, method) for question in ("speed", "memory") for method in methods]


def board():
    found = columns(FILLED, "question method claimed predicted recorded judged")
    return table(found | {"not_here": ANY}, "question method")


def links():
    numbers = {"both_ways_gb_s": cell(POSITIVE), "source": FILLED}
    return table({"link": FILLED, "card": cell(CARD)} | numbers, "link card")


def minutes():
    found = {"lesson": FILLED, "seconds": cell(POSITIVE), **columns(cell(WHOLE), "models samples")}
    return table(found | {"build_seconds": cell(POSITIVE)}, "lesson")


def small_batches():
    found = {"passes": cell(WHOLE), "learning_rate": cell(POSITIVE), "order": cell(WHOLE)}
    found |= {"beta2": cell(POSITIVE), "samples": cell(WHOLE), "test_loss": cell(POSITIVE)}
    found |= {"peak_allocated": cell(WHOLE)}
    found |= columns(FILLED, "device torch transformers") | {"date": cell(DAY)}
    return table(found, "passes learning_rate order beta2")


def adapter_steps():
    found = {"way": FILLED, "seed": cell(WHOLE), "order": cell(WHOLE), "rate": cell(POSITIVE)}
    found |= {"steps": cell(POSITIVE, empty=True), "test_loss": cell(POSITIVE)}
    found |= columns(FILLED, "torch transformers") | {"date": cell(DAY)}
    return table(found, "way seed order")


def compiled_steps():
    peaks = "eager_predicted eager_measured compiled_predicted compiled_measured graphs"
    found = {"way": FILLED} | columns(cell(WHOLE), peaks) | {"why": ANY}
    return table(found | columns(FILLED, "device torch transformers") | {"date": cell(DAY)}, "way")


def equal_compute():
    found = {"rate": cell(POSITIVE), "compute": cell(WHOLE), "seed": cell(WHOLE)}
    found |= {"order": cell(WHOLE), "model": cell(one_of("experts", "same cost", "same size"))}
    found |= {"steps": cell(WHOLE), "tokens": cell(WHOLE), "test_loss": cell(POSITIVE)}
    found |= columns(FILLED, "device torch transformers") | {"date": cell(DAY)}
    return table(found, "rate compute seed order model")


def expert_shares():
    ways = "no balance loss", "the library's", "layer by layer"
    found = {"balance": cell(one_of(*ways)), **columns(cell(WHOLE), "seed order steps")}
    found |= columns(cell(POSITIVE), "busiest test_loss")
    found |= columns(FILLED, "device torch transformers") | {"date": cell(DAY)}
    return table(found, "balance seed order")


def dynamics():
    found = columns(FILLED, "experiment network way") | columns(cell(WHOLE), "batch seed order")
    found |= {"rate": cell(POSITIVE), "loss": cell(POSITIVE, empty=True)}
    found |= {"steps_to_goal": cell(POSITIVE, empty=True), "long_gradients": ANY}
    found |= columns(FILLED, "torch transformers") | {"date": cell(DAY)}
    return table(found, "experiment network way batch rate seed order")


def techniques():
    return table(columns(FILLED, "technique lesson cell saves costs when"), "technique")


def alt():
    return table(columns(FILLED, "figure alt"), "figure")
