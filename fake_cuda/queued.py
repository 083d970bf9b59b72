"""The host issues operation after operation into a queue, and the card does them one by one."""

from typing import NamedTuple

from .constants import Host


class Row(NamedTuple):
    """One operation, as the queue between host and card sees it."""

    phase: str
    kind: str  # of `cost.KINDS`; "wait" where the host waits, "" where nothing is asked of the card
    seconds: float  # on the card
    issue: float  # seconds of the host


def run(rows: list[Row], known: Host, card: float, host: float) -> tuple[dict, list[float]]:
    """Seconds by (phase, kind) of a step among others like it, and when the card has done each row
    of it; both factors stretch a side."""
    now = queue = 0.0  # the host's clock; when the card will have done what it was given
    latency = known.wait
    start_up = latency * known.idle_start
    spent: dict[tuple[str, str], float] = {}
    ends: list[float] = []
    for _ in range(2):  # the host runs ahead into the next step: the second one counts
        spent, ends, began = {}, [], queue
        for phase, kind, seconds, issue in rows:
            if kind == "wait":
                now = max(now, queue) + latency
            else:
                now += issue * host
            if kind in ("", "wait"):  # nothing for the card
                ends.append(queue - began)
                continue
            start = max(queue, now + start_up)
            key = phase, "host"
            spent[key] = spent.get(key, 0.0) + start - queue
            queue = start + seconds * card
            key = phase, kind
            spent[key] = spent.get(key, 0.0) + seconds * card
            ends.append(queue - began)
        if now > queue and rows:  # what the host still does when the card is done
            key = rows[-1][0], "host"
            spent[key] = spent.get(key, 0.0) + now - queue
            queue = now
    return spent, ends
