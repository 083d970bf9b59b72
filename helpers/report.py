"""Predictions held against what other people measured on real cards."""

import pandas as pd

from .runs import load


def judged(rows: pd.DataFrame | None = None) -> pd.DataFrame:
    """The rows of `data/real_cards.csv` that judge, with `error`, predicted / measured - 1."""
    rows = load("real_cards") if rows is None else rows
    missing = {*"set run card quantity measured predicted role remark".split()} - {*rows}
    if missing:
        raise ValueError(f"real_cards.csv lacks the column {min(missing)}: see data/README.md")
    rows = rows[rows["role"] == "judged"].dropna(subset="predicted")
    return rows.assign(error=rows["predicted"] / rows["measured"] - 1)


def errors(rows: pd.DataFrame, by: str | list[str] = "set") -> pd.DataFrame:
    """How many rows, and the sizes of their errors in %: the middle one, nine of ten, the worst."""
    sizes = rows.assign(error=100 * rows["error"].abs()).groupby(by, sort=False)["error"]
    table = sizes.quantile([0.5, 0.9, 1.0]).unstack().set_axis(["median", "90 %", "worst"], axis=1)
    table.insert(0, "rows", sizes.size())
    return table.round(2)


def on_real_cards(rows: pd.DataFrame) -> str:
    """What `judged` rows say, as text: by source, and each row that is off by more than 5 %."""
    sizes = 100 * rows["error"].abs()
    text = (
        f"Predicted against measured on real cards: {len(rows)} measurements by other people, "
        f"{rows['set'].nunique()} sets, {rows['card'].nunique()} known cards\n"
        f"error: median {sizes.median():.2f} %, nine of ten within {sizes.quantile(0.9):.2f} %, "
        f"worst {sizes.max():.2f} %\n\n"
    )
    text += errors(rows, ["set", "quantity"]).reset_index().to_string(index=False)
    far = rows[sizes > 5].assign(error=lambda far: (100 * far["error"]).map("{:+.1f} %".format))
    if far.empty:
        return f"{text}\n\nNo row is off by more than 5 %."
    far = far[["set", "run", "quantity", "error", "remark"]].fillna("unexplained")
    return f"{text}\n\nOff by more than 5 %\n{far.to_string(index=False)}"
