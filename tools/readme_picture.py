"""Draw the README's picture from recorded rows: predictions held against real cards.

    python tools/readme_picture.py

`make outputs` draws it; the file says from which numbers, and a test compares them with today's
rows.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from helpers import report  # noqa: E402  (after the path is set; it also sets the course's style)

PICTURE = ROOT / "data" / "real_cards.png"


def numbers() -> dict:
    """How many rows each set has, and the sizes of their errors."""
    return report.errors(report.judged()).to_dict()


if __name__ == "__main__":
    rows = report.judged()
    report.draw(rows).savefig(PICTURE, dpi=160, metadata={"Description": json.dumps(numbers())})
