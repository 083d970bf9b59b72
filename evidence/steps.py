"""`data/speeds.csv`: how long steps took on other people's cards, beside what is predicted.

`data/measurements/speeds.csv` has what was measured. A set is one machine, whose host a step may
tell, so a set is predicted whole. With all sets `data/speed_constants.csv` is written, too: what
half of each constant does to the errors.
"""

from pathlib import Path
from typing import NamedTuple

import pandas as pd

from evidence import runs, schemas
from evidence.compare import errors
from evidence.runs import Job
from evidence.tables import DATA, MADE, libraries, old_rows, replace_file, today, unchanged
from evidence.tables import MEASURED as FOLDER
from evidence.traces import Predicted, Step
from fake_cuda import cost
from fake_cuda.constants import CONSTANTS, Constants, listed

MEASURED, PREDICTED = FOLDER / "speeds.csv", DATA / "speeds.csv"
HALVED = DATA / "speed_constants.csv"
COLUMNS = "set run card seconds limited torch model settings role reason remark source".split()
SECONDS = ["predicted", "low", "high"]
OURS = [*SECONDS, *"limited_by host_share roofline fused host told told_limited_by".split(), *MADE]
KEY = ["set", "run"]
DIGITS = {name: 6 for name in [*SECONDS, "roofline", "fused", "told"]} | {"host_share": 3}


class Hosts(NamedTuple):
    """Seconds of the host for an operation on a set's machine.

    `assumed` is the default, or follows from a row that calibrates; `told` is what the first row
    that waits for its host would tell, and `teller` that row's run.
    """

    assumed: float
    told: float
    teller: str | None


def timed(step: Step, host: float, constants: Constants = CONSTANTS) -> cost.Time:
    """The time of a step under a host; by other constants, if they are told."""
    options = step.options | {"host": host, "constants": constants}
    return cost.step_time(step.operations, step.phases, step.card, **options)


def host_of(step: Step, seconds: float) -> float:
    """The host's seconds for an operation with which a step that waits for it takes so long."""
    low, high = 1e-6, 1e-4
    for _ in range(12):
        middle = (low * high) ** 0.5
        slow = timed(step, middle).step_seconds > seconds
        low, high = (low, middle) if slow else (middle, high)
    return (low * high) ** 0.5


def roofline(step: Step) -> float:
    """Seconds by the plain roofline: 75 % of the peak or all of the bandwidth, and no host."""
    kernels, seconds = cost.Kernels(step.card), 0.0
    for op in step.operations:
        if op.kind in ("view", "wait"):
            continue
        needed = 0.0
        if op.flops:
            work = op.work[0] if op.kind == "product" else op.work
            needed = op.flops / (0.75 * kernels.rate(work.type))
        in_pass = step.phases[op.phase] in ("forward", "backward")
        passes = step.options.get("repeat", 1) if in_pass else 1
        seconds += max(needed, op.moved / step.card.bandwidth) * passes
    return seconds


def hosts(rows: pd.DataFrame, steps: dict[tuple, Step]) -> dict[str, Hosts]:
    """The hosts of each set; `rows` are those measured ones that are predicted."""
    found = {name: Hosts(cost.HOST_SECONDS, cost.HOST_SECONDS, None) for name in rows["set"]}
    waits = rows[rows["limited"] == "host"]
    for row in waits[waits["role"] == "calibrates"].itertuples():
        host = host_of(steps[row.set, row.run], row.seconds)
        found[row.set] = Hosts(host, host, None)
    # As if one step that waits for its host had been timed on each machine: the first of its set.
    for row in waits.drop_duplicates("set").itertuples():
        told = host_of(steps[row.set, row.run], row.seconds)
        found[row.set] = Hosts(found[row.set].assumed, told, row.run)
    return found


def facts(step: Step, hosts: Hosts, run: str) -> dict:
    """What is predicted of a step, in full digits."""
    time = timed(step, hosts.assumed)
    found = {"predicted": time.step_seconds, "low": time.low, "high": time.high}
    found |= {"limited_by": time.limited_by, "host_share": time.shares["host"]}
    found |= {"roofline": roofline(step), "fused": time.fused_seconds, "host": hosts.assumed}
    better = timed(step, hosts.told) if run != hosts.teller else cost.Time(limited_by=pd.NA)
    return found | {"told": better.step_seconds, "told_limited_by": better.limited_by}


def wanted(names: list[str], measured: Path = MEASURED) -> pd.DataFrame:
    """The measured rows of the named sets that get a prediction."""
    rows = schemas.read("measurements/speeds", measured)
    return rows[rows["set"].isin(names) & (rows["role"] != "excluded")]


def to_make(names: list[str], again: bool = False) -> set[tuple[str, str]]:
    """The runs (set, run) of each set with a row that other code made, or that changed."""
    names = [name for name in names if name in runs.of_steps()]
    rows = wanted(names)
    code = rows["set"].map({name: runs.hash_of(runs.of_steps()[name]) for name in names})
    stands = unchanged(rows, old_rows(PREDICTED, COLUMNS + OURS), COLUMNS, KEY, code)
    left = rows if again else rows[rows["set"].isin(rows["set"][~stands])]
    return set(left[KEY].itertuples(index=False, name=None))


def write(results: dict[Job, Predicted], measured: Path = MEASURED, path: Path = PREDICTED) -> None:
    """Put predictions beside what was measured; rows of other sets keep theirs.

    Raises:
        ValueError: a measured row of these sets has no run, or is wrong.
    """
    rows = schemas.read("measurements/speeds", measured)
    names = {job.set for job in results}
    asked = wanted(list(names), measured)
    steps = {job.key[:2]: found.step for job, found in results.items()}
    if missing := set(asked[KEY].itertuples(index=False, name=None)) - steps.keys():
        raise ValueError(f"evidence/sources has no run {' / '.join(min(missing))}")
    machines, code = hosts(asked, steps), {job.key[:2]: job.code for job in results}
    new = [
        {"set": name, "run": run}
        | facts(steps[name, run], machines[name], run)
        | {"predicted_with": libraries(), "date": today(), "code_hash": code[name, run]}
        for name, run in asked[KEY].itertuples(index=False, name=None)
    ]
    old = old_rows(path, KEY + OURS)
    both = pd.concat([old[~old["set"].isin(names)], pd.DataFrame(new, columns=KEY + OURS)])
    table = rows.merge(both, on=KEY, how="left")
    table.loc[table["role"] == "excluded", OURS] = pd.NA
    replace_file(path, table.round(DIGITS))


def write_constants(results: dict[Job, Predicted]) -> None:
    """Write what half of each constant does; `results` are the runs of all sets."""
    steps = {job.key[:2]: found.step for job, found in results.items()}
    rows = wanted(list(runs.of_steps()))
    table = halved(steps, rows, hosts(rows, steps))
    replace_file(HALVED, table.round({name: 4 for name in table if name != "value"}))


def halved(steps: dict[tuple, Step], rows: pd.DataFrame, hosts: dict[str, Hosts]) -> pd.DataFrame:
    """What half of each constant does to the errors, by the three shortest steps of each set."""
    length = [len(steps[k].operations) for k in zip(rows["set"], rows["run"], strict=True)]
    rows = rows.assign(length=length).sort_values("length").groupby("set", sort=False).head(3)

    def host(name: str, constants: Constants) -> float:
        """A machine that no step told has the assumed host, which is a constant, too."""
        known = hosts[name].assumed
        return constants.host.operation if known == cost.HOST_SECONDS else known

    def found(label: str, constants: Constants) -> dict:
        times = [
            timed(steps[k], host(k[0], constants), constants).step_seconds
            for k in zip(rows["set"], rows["run"], strict=True)
        ]
        moved = errors(rows.assign(predicted=times))
        return {"constant": label} | moved | {"seconds in all": sum(times)}

    table = [found("as it is", CONSTANTS)]
    for name, value, status, source in listed(CONSTANTS):
        moved = found(name, CONSTANTS.with_value(name, value / 2))
        table.append(moved | {"value": value, "status": status, "source": source})
    return pd.DataFrame(table)
