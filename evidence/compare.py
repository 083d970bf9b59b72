"""How far predicted times are from measured ones, in numbers."""

import pandas as pd

APART = 0.05  # times that differ by less have no order


def errors(rows: pd.DataFrame, column: str = "predicted") -> dict[str, float]:
    """Errors of the times of a table's rows, of ratios within a set, and pairs in order.

    Args:
        rows: with set, seconds (measured) and the predicted seconds in `column`.

    Returns:
        Shares, not percent: median and 90 % of the absolute errors, and of the errors of ratios
        between two runs of a set; how many pairs differ by 5 % or more, and the share in order.
    """
    absolute = (rows[column] / rows["seconds"] - 1).abs()
    ratios, right = [], []
    for _, own in rows.groupby("set", sort=False):
        pairs = list(zip(own["seconds"], own[column], strict=True))
        for k, (real, ours) in enumerate(pairs):
            for other, theirs in pairs[:k]:
                ratios.append(abs(ours / theirs / (real / other) - 1))
                if max(real, other) / min(real, other) > 1 + APART:
                    right.append((ours > theirs) == (real > other))
    ratio = pd.Series(ratios, dtype=float)
    return {
        "rows": len(rows),
        "median": absolute.median(),
        "90 %": absolute.quantile(0.9),
        "ratios": ratio.median(),
        "ratios, 90 %": ratio.quantile(0.9),
        "pairs": len(right),
        "in order": sum(right) / len(right) if right else 1.0,
    }
