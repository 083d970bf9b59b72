"""Read over rows that somebody contributes: the table that `make gpu` wrote on their machine.

    python tools/check_rows.py FILE.csv ...     # or make check-rows ROWS=FILE.csv

Exit status 1 if a row cannot be taken, with the reason and its line. Then it shows how well the
predictions met the rows: one that is far off is a finding, and no reason to leave it out.
"""

import csv
import datetime
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from gpu_kit import COLUMNS, ROOT, compared

OUTCOMES = {"measured", "out of memory", "failed", "skipped"}
NUMBERS = [name for name in COLUMNS if name.startswith(("peak", "seconds", "samples", "tokens"))]


def faults(path: Path) -> Iterator[str]:
    """What is wrong with a table, one sentence each."""
    from helpers import hardware

    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError) as error:
        yield f"it cannot be read: {error}"
        return
    if not rows or rows[0] != COLUMNS:
        yield "its first line is not the one that the kit writes: send the file as it is"
        return
    if len(rows) == 1:
        yield "it has no rows"
    seen: dict[tuple, int] = {}
    for line, cells in enumerate(rows[1:], start=2):
        if len(cells) != len(COLUMNS):
            yield f"line {line} has {len(cells)} cells, not {len(COLUMNS)}: it was cut or edited"
            continue
        row = dict(zip(COLUMNS, cells, strict=True))
        yield from (f"line {line}: {fault}" for fault in faults_of(row, hardware))
        key = tuple(row[name] for name in "section run torch transformers date".split())
        if key in seen:
            yield f"line {line} repeats line {seen[key]}"
        seen.setdefault(key, line)


def faults_of(row: dict[str, str], hardware) -> Iterator[str]:
    """What is wrong with a row."""
    words = set(re.split("[ -]", row["card"].upper()))
    cards = hardware.cards()
    if words <= {"", "CPU"}:
        yield "no card: rows of a CPU are not taken"
    elif not any(set(re.split("[ -]", card.upper())) <= words for card in cards):
        yield f"{row['card']} is not in data/gpus.csv: add its line there, with a source"
    yield from (f"no {name}" for name in "torch transformers date".split() if not row[name])
    outcome = row["outcome"].split(":")[0]
    if outcome not in OUTCOMES:
        yield f"the outcome {outcome!r} is none of the kit's"
    for name in NUMBERS:
        try:
            if row[name] and not float(row[name]) > 0:
                yield f"{name} is {row[name]}"
        except ValueError:
            yield f"{name} is {row[name]!r}, which is no number"
    if outcome == "measured" and not row["peak_allocated"]:
        yield "measured, and without a peak"
    try:
        if row["date"] and datetime.datetime.fromisoformat(row["date"]).year < 2020:
            yield f"the date {row['date']} is before the course"
    except ValueError:
        yield f"the date {row['date']!r} is none"


def main(arguments: list[str] | None = None) -> int:
    given = [Path(name) for name in (sys.argv[1:] if arguments is None else arguments)]
    if not given:
        print("name the file that make gpu wrote: make check-rows ROWS=card.csv", file=sys.stderr)
        return 2
    status = 0
    for path in given:
        found = list(faults(path))
        print(f"{path.name}: {'can be taken' if not found else 'cannot be taken'}")
        print(*(f"  {fault}" for fault in found), sep="\n", end="\n" if found else "")
        if found:
            status = 1
        else:
            print(compared(path))
    return status


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT)]
    sys.exit(main())
