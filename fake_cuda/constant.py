"""A number of the model of time, with its status and source."""

from dataclasses import field
from functools import partial
from typing import Any, NamedTuple

SOURCED, CALIBRATED, ASSUMED = "sourced", "calibrated", "assumed"


class Constant(NamedTuple):
    """A number of the model of time, as tables tell of it.

    `status`: *sourced*, somebody measured or documented it; *calibrated*, chosen so that the named
    rows come out; *assumed*, neither. `source` names the measurement, the rows, or what is known.
    """

    name: str
    value: float
    status: str
    source: str


def _field(status: str, name: str, value: float, source: str) -> Any:
    return field(default=value, metadata={"name": name, "status": status, "source": source})


sourced, calibrated, assumed = (partial(_field, s) for s in (SOURCED, CALIBRATED, ASSUMED))
