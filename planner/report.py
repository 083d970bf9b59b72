"""Predictions held against what other people measured on real cards: errors by source."""

import pandas as pd

from helpers.runs import load

COLUMNS = ("set", "run", "card", "quantity", "measured", "predicted", "role", "remark")
KERNELS = "liger-kernels"  # one operation a row, many of them exact
FAR = 0.05  # a row that is off by more than this share is named, with its remark


def with_error(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with `error`, predicted / measured - 1."""
    return rows.assign(error=rows["predicted"] / rows["measured"] - 1)


def judged(rows: pd.DataFrame | None = None) -> pd.DataFrame:
    """The rows of `data/real_cards.csv` that judge, with `error`, predicted / measured - 1. Single
    Triton kernels are not among them: the README counts these apart."""
    rows = load("real_cards") if rows is None else rows
    if missing := set(COLUMNS) - {*rows}:
        raise ValueError(f"real_cards.csv lacks the column {min(missing)}: see data/README.md")
    found = with_error(rows[rows["role"] == "judged"].dropna(subset="predicted"))
    return found[found["set"] != KERNELS]


def blind(rows: pd.DataFrame | None = None) -> pd.DataFrame:
    """The rows predicted before anything was changed for them, with their first `error`."""
    rows = load("real_cards") if rows is None else rows
    keys = ["set", "run", "quantity"]
    return with_error(load("blind_peaks").merge(rows[[*keys, "measured"]], on=keys))


def errors(rows: pd.DataFrame, by: str | list[str] = "set") -> pd.DataFrame:
    """How many rows, and the sizes of their errors in %: the middle one, nine of ten, the worst."""
    sizes = rows.assign(error=100 * rows["error"].abs()).groupby(by, sort=False)["error"]
    table = sizes.quantile([0.5, 0.9, 1.0]).unstack().set_axis(["median", "90 %", "worst"], axis=1)
    table.insert(0, "rows", sizes.size())
    return table.round(2)


def on_real_cards(rows: pd.DataFrame) -> str:
    """What `judged` rows say, as text: blind first, then by source, then each that is far off."""
    return "\n\n".join([_by_role(rows), _by_source(rows), _far_off(rows)])


def _by_role(rows: pd.DataFrame) -> str:
    table = load("real_cards")
    roles = {
        "blind, as first predicted": blind(table),
        "judged, by today's rules": rows,
        "calibrating, which judge nothing": with_error(table[table["role"] == "calibrates"]),
    }
    all_rows = pd.concat([part.assign(kind=kind) for kind, part in roles.items()])
    left_out = (table["role"] == "excluded").sum()
    return "\n".join(
        [
            "Predicted against measured on real cards, by other people: errors in %",
            errors(all_rows, "kind").reset_index().to_string(index=False),
            f"{left_out} more rows are left out, each with its reason.",
            "Rows, settings, sources and reasons: data/real_cards.csv; "
            "roles that changed: data/measurements/role_changes.csv",
        ]
    )


def _by_source(rows: pd.DataFrame) -> str:
    head = f"The {len(rows)} rows that judge, {rows['set'].nunique()} sets, "
    head += f"{rows['card'].nunique()} known cards\n"
    return head + errors(rows, ["set", "quantity"]).reset_index().to_string(index=False)


def _far_off(rows: pd.DataFrame) -> str:
    far = rows[rows["error"].abs() > FAR]
    if far.empty:
        return f"No row is off by more than {100 * FAR:.0f} %."
    far = far.assign(error=(100 * far["error"]).map("{:+.1f} %".format))
    far = far[["set", "run", "quantity", "error", "remark"]].fillna("unexplained")
    return f"Off by more than {100 * FAR:.0f} %\n{far.to_string(index=False)}"
