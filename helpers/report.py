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


def blind(rows: pd.DataFrame | None = None) -> pd.DataFrame:
    """The rows predicted before anything was changed for them, with their first `error`."""
    rows = load("real_cards") if rows is None else rows
    keys = ["set", "run", "quantity"]
    first = load("blind_peaks").merge(rows[[*keys, "measured"]], on=keys)
    return first.assign(error=first["predicted"] / first["measured"] - 1)


def on_real_cards(rows: pd.DataFrame) -> str:
    """What `judged` rows say, as text: blind first, then by source, then each that is far off."""
    table = load("real_cards")
    chosen = table[table["role"] == "calibrates"]
    chosen = chosen.assign(error=chosen["predicted"] / chosen["measured"] - 1)
    kinds = {
        "blind, as first predicted": blind(table),
        "judged, by today's rules": rows,
        "calibrating, which judge nothing": chosen,
    }
    shares = pd.concat([part.assign(kind=kind) for kind, part in kinds.items()])
    text = "Predicted against measured on real cards, by other people: errors in %\n"
    text += errors(shares, "kind").reset_index().to_string(index=False)
    text += f"\n{(table['role'] == 'excluded').sum()} more rows are left out, each with its reason."
    text += "\nRows, settings, sources and reasons: data/real_cards.csv; "
    text += "roles that changed: data/measurements/role_changes.csv\n\n"
    text += f"The {len(rows)} rows that judge, {rows['set'].nunique()} sets, "
    text += f"{rows['card'].nunique()} known cards\n"
    text += errors(rows, ["set", "quantity"]).reset_index().to_string(index=False)
    sizes = 100 * rows["error"].abs()
    far = rows[sizes > 5].assign(error=lambda far: (100 * far["error"]).map("{:+.1f} %".format))
    if far.empty:
        return f"{text}\n\nNo row is off by more than 5 %."
    far = far[["set", "run", "quantity", "error", "remark"]].fillna("unexplained")
    return f"{text}\n\nOff by more than 5 %\n{far.to_string(index=False)}"
