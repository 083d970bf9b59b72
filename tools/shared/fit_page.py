"""The page "Will it fit?" of the site: what it reads, and what stands there without JavaScript."""

import sys
from pathlib import Path

from evidence.atlas import check, page
from planner.atlas import Asked, Found
from planner.recorded import WITHIN

NAME = "will_it_fit"
CARDS = ("T4", "16GiB", "24GiB", "48GiB", "80GiB")  # of the table
LENGTH, BATCH = 1024, 8  # that the table is for
TABLE, TRUST = "<!-- table -->", "<!-- trust -->"
NOTHING = "not recorded"  # of this model for this kind of card


def contents() -> dict[str, dict]:
    """What the page fetches, by the name of the file: an index, and each model. A file of the atlas
    that is damaged is left out, with a sentence."""
    found = {}
    for model in page.models():
        try:
            found[model] = page.of_model(model)
        except ValueError as error:
            print(error, file=sys.stderr)
    return {"index": page.index() | {"models": list(found)}} | found


def write(files: dict[str, dict], folder: Path) -> None:
    """As JSON, one file each."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(page.text(content), encoding="utf-8")


def words(one: Found | None) -> str:
    """A recipe in a cell of the table."""
    if one is None:
        return "none"
    return f"{one.recipe}, {one.micro_batch} x {one.accumulation}"


def answer(asked: Asked) -> str:
    """What a cell of the table says, with a mark where recipes that are tried are not recorded."""
    if not asked.family:
        return NOTHING
    mark = "" if asked.complete("change") else " \\*"
    return words(next(iter(asked.fits()), None)) + mark


def table(files: dict[str, dict]) -> str:
    """The first recipe that fits, of every model on cards of some sizes."""
    index = files["index"]
    cards = {card["name"]: card for card in index["cards"]}
    lines = ["| model | " + " | ".join(CARDS) + " |", "|---" * (len(CARDS) + 1) + "|"]
    for model in index["models"]:
        most = max(files[model]["lengths"])
        title = model if most >= LENGTH else f"{model} ({most} tokens)"
        length = min(most, LENGTH)
        asked = [Asked(index, files[model], cards[name], length, BATCH) for name in CARDS]
        cells = [answer(one) for one in asked]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def trust() -> str:
    """How far the atlas is from full predictions, by its sample."""
    errors = check.errors().abs()
    worst, usual = errors.max(), errors.quantile(WITHIN, interpolation="higher")
    lines = ["| | 19 of 20 within | the worst |", "|---|---|---|"]
    names = ["peak allocated", "peak reserved", "seconds of a step"]
    for name, what in zip(check.WHAT, names, strict=True):
        lines.append(f"| {what} | {usual[name]:.2%} | {worst[name]:.2%} |")
    said = (
        "The numbers here grew from predictions of models of two and three blocks, of a few more "
        "or of all where those do not tell the others, with short samples. "
        f"{len(errors)} "
        "of them, drawn by chance, were predicted in full as well. This is how far the two lie "
        f"apart; seconds are those of the {errors['seconds'].count()} that fit the card they were "
        "drawn with, since no others are shown:"
    )
    added = check.added()
    too_much = (check.errors()["reserved_mib"][added] > 0).sum()
    by_sum, asked = errors["reserved_mib"][added].max(), errors["reserved_mib"][~added].max()
    least_sure = (
        "What is reserved is told least surely where a step has several micro-batches and all "
        "weights learn: what the gradients of the later ones need is added there, and how the "
        "allocator would cut it was not replayed. "
        f"Of {added.sum()} such points in the sample the worst is {by_sum:.2%} off, and {too_much} "
        f"say more than is needed; of the other {(~added).sum()} the worst is {asked:.2%} off."
    )
    blind = page.blind_margin()
    rest = (
        f"How far full predictions lie from real cards is another matter: a card has to hold "
        f"a CUDA context and {blind:.1%} more than predicted, since 19 of 20 blind runs, whose "
        "predictions came before anything was changed for them, needed no more."
    )
    return "\n".join([said, "", *lines, "", least_sure, "", rest])


def filled(text: str, files: dict[str, dict]) -> str:
    """The page's Markdown with its table and its errors."""
    return text.replace(TABLE, table(files)).replace(TRUST, trust())
