"""Read over rows that somebody contributes: the table that `make gpu` wrote on their machine.

    python -m tools.check_rows FILE.csv ...

Exit status 1 if a row cannot be taken, with the reason and its row. Then it shows how well the
predictions met the rows: one that is far off is a finding, and no reason to leave it out.

Writes: nothing
"""

import csv
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from evidence.schemas import checking, measured
from tools.shared.rows import COLUMNS, compared


def faults(path: Path) -> Iterator[str]:
    """What is wrong with a table, one sentence each."""
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
    whole = [cells for cells in rows[1:] if len(cells) == len(COLUMNS)]
    for line, cells in enumerate(rows[1:], start=2):
        if len(cells) != len(COLUMNS):
            yield f"row {line} has {len(cells)} cells, not {len(COLUMNS)}: it was cut or edited"
    if len(whole) == len(rows) - 1:  # else the numbers of the rows would not be those of the file
        table = pd.DataFrame(whole, columns=COLUMNS)
        yield from checking.problems(measured.on_a_card(COLUMNS), table, path.name)


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
    sys.exit(main())
