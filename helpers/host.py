"""The computer around a card: how long it takes for an operation, told, found here or assumed.

`onegpu calibrate` finds it and keeps it in `build/hosts.json`, which can be deleted (of a wheel in
the user's folder of caches).
"""

import datetime
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fake_cuda.cost import CONSTANTS, HOST_SECONDS, MOST_OF_A_HOST, Timed

from .hardware import GPU, device, own_file, this_gpu

KNOWN = CONSTANTS.host
SPEEDS = {"fast": KNOWN.fast, "typical": KNOWN.typical, "slow": KNOWN.slow}


class Host(NamedTuple):
    """Seconds for an operation, and what is said of them where nobody told a number."""

    seconds: float | Timed
    note: str = ""


def host_of(asked: float | str | Timed | None, card: GPU | None) -> Host:
    """The host that is asked for.

    Args:
        asked: its seconds for an operation, one of `SPEEDS`, what a step took, or None: what was
            found of this machine where the card is its own, else what is assumed.
        card: for which it issues work; None stands for a CPU.

    Raises:
        ValueError: it is none of these.
    """
    if asked is None:
        return kept(card) or Host(HOST_SECONDS)
    if isinstance(asked, str) and asked in SPEEDS:
        seconds = SPEEDS[asked]
        return Host(seconds, f"A {asked} host: {us(seconds)} for an operation.")
    if not isinstance(asked, float | int) or isinstance(asked, bool) or not asked >= 0:
        words = ", ".join(SPEEDS)
        raise ValueError(f"host={asked!r} is not {words} or a number of seconds, such as 2e-05")
    if not isinstance(asked, Timed) and asked > MOST_OF_A_HOST:
        raise ValueError(
            f"host={asked!r} is more than the {us(MOST_OF_A_HOST)} that any machine takes for an "
            "operation: it is told in seconds, and 20 microseconds are 2e-05"
        )
    return Host(asked)


def us(seconds: float) -> str:
    """Seconds as microseconds, in three digits.

    >>> us(2.612e-05), us(1e-3)
    ('26.1 us', '1,000 us')
    """
    return f"{float(f'{1e6 * seconds:.3g}'):,g} us"


def kept(card: GPU | None) -> Host | None:
    """What was found of this machine, if the card is its own."""
    found = _read()
    if not (card and found) or device().type != "cuda":
        return None
    own = this_gpu()
    row = found.get(own.name)
    if row is None or (card.name != own.name and card.facts != own.facts):
        return None
    note = f"{us(row['host'])} for an operation, found on {row['date']} by onegpu calibrate."
    return Host(row["host"], f"This machine's host: {note}")


def keep(seconds: float) -> None:
    """Keep what was found of this machine, beside the name of its card."""
    path = _path()
    path.parent.mkdir(parents=True, exist_ok=True)
    row = {"host": seconds, "date": datetime.date.today().isoformat()}
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(_read() | {this_gpu().name: row}, indent=1), encoding="utf-8")
    os.replace(unfinished, path)


def _path() -> Path:
    return own_file("hosts.json")


def _read() -> dict[str, dict]:
    """The rows by the card's name; none of a file that is not there or damaged."""
    with suppress(OSError, ValueError, AttributeError):
        rows = json.loads(_path().read_text(encoding="utf-8"))
        return {name: row for name, row in rows.items() if _sound(row)}
    return {}


def _sound(row: object) -> bool:
    if not (isinstance(row, dict) and isinstance(row.get("date"), str)):
        return False
    seconds = row.get("host")
    return isinstance(seconds, float) and 0 < seconds <= MOST_OF_A_HOST
