"""Write `data/speeds.csv`: how long steps took on other people's cards, beside what is predicted.

    python tools/record_speeds.py                  every set of data/measurements/speeds.csv
    python tools/record_speeds.py fms t5-base-a100  some sets; the predictions of the others stay

With every set it also writes `data/speed_constants.csv`: what half of each constant does to the
errors. A quarter of an hour. Both files are replaced when all is done; never edit them by hand.
"""

import argparse
import datetime
import sys
from pathlib import Path
from unittest import mock

import pandas as pd
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import blind_speeds  # noqa: E402  (after the path is set)
import speeds  # noqa: E402
from fake_cuda import cost  # noqa: E402
from helpers.hardware import gpu, suggest, versions  # noqa: E402
from record_predictions import replace_file  # noqa: E402

MEASURED = ROOT / "data" / "measurements" / "speeds.csv"
PREDICTED = ROOT / "data" / "speeds.csv"
HALVED = ROOT / "data" / "speed_constants.csv"
SETS = speeds.SETS | blind_speeds.SETS
COLUMNS = "set run card seconds limited torch model settings role reason remark source".split()
OURS = "predicted low high limited_by host_share roofline fused host".split()
OURS += "told told_limited_by predicted_with date".split()
ROLES = ("judged", "calibrates", "excluded")
KEY = ["set", "run"]
APART = 0.05  # times that differ by less have no order


def checked(rows: pd.DataFrame, name: str) -> pd.DataFrame:
    """The rows as they are; ValueError, in one sentence, if the table cannot be right."""
    for column in COLUMNS:
        if column not in rows:
            raise ValueError(f"{name} lacks the column {column}: data/README.md describes the file")
    for card in rows["card"].unique():
        gpu(card)
    seconds = pd.to_numeric(rows["seconds"], errors="coerce")
    wrong = {
        f"the role is none of {', '.join(ROLES)}": ~rows["role"].isin(ROLES),
        "set and run stand there twice": rows[KEY].duplicated(),
        "a row that does not judge needs a reason": rows["reason"].isna()
        & (rows["role"] != "judged"),
        "seconds is not a positive number": ~(seconds > 0),
    }
    for why, at in wrong.items():
        for k in rows.index[at]:
            raise ValueError(f"{name}, row {k + 2}: {why}")
    return rows


def traced(job) -> tuple:
    """The operations of a run's last step, their phases, the card and the other keywords."""
    seen, real = [], cost.step_time

    def step_time(operations, phases, card, **options):
        seen.append((operations, phases, card, options))
        return real(operations, phases, card, **options)

    with mock.patch.object(cost, "step_time", step_time):
        job()
    return seen[-1]


def timed(step: tuple, host: float) -> cost.Time:
    operations, phases, card, options = step
    return cost.step_time(operations, phases, card, **options | {"host": host})


def host_of(step: tuple, seconds: float) -> float:
    """The host's seconds for an operation with which a step that waits for it takes so long."""
    low, high = 1e-6, 1e-4
    for _ in range(12):
        middle = (low * high) ** 0.5
        slow = timed(step, middle).step_seconds > seconds
        low, high = (low, middle) if slow else (middle, high)
    return (low * high) ** 0.5


def roofline(step: tuple) -> float:
    """Seconds by the plain roofline: 75 % of the peak or all of the bandwidth, and no host."""
    operations, phases, card, options = step
    kernels, seconds = cost.Kernels(card), 0.0
    for op in operations:
        if op.kind in ("view", "wait"):
            continue
        kind = op.flops and (op.work[0][4] if op.kind == "product" else op.work[3])
        needed = op.flops / (0.75 * kernels.rate(kind)) if op.flops else 0.0
        passes = options.get("repeat", 1) if phases[op.phase] in ("forward", "backward") else 1
        seconds += max(needed, op.moved / card.bandwidth) * passes
    return seconds


def errors(rows: pd.DataFrame, column: str = "predicted") -> dict[str, float]:
    """Of a table's rows: errors of the times, errors of ratios within a set, pairs in order."""
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


def halved(steps: dict[tuple, tuple], rows: pd.DataFrame, hosts: dict) -> pd.DataFrame:
    """What half of each constant does to the errors, by the three shortest steps of each set."""
    length = [len(steps[k][0]) for k in zip(rows["set"], rows["run"], strict=True)]
    rows = rows.assign(length=length).sort_values("length").groupby("set", sort=False).head(3)

    def host(name: str) -> float:
        """A machine that no step told has the assumed host, which is a constant, too."""
        return cost.VALUES["host"] if hosts[name] == cost.HOST_SECONDS else hosts[name]

    def found(label: str) -> dict:
        times = [
            timed(steps[k], host(k[0])).step_seconds
            for k in zip(rows["set"], rows["run"], strict=True)
        ]
        moved = errors(rows.assign(predicted=times))
        return {"constant": label} | moved | {"seconds in all": sum(times)}

    table = [found("as it is")]
    for name, constant in cost.CONSTANTS.items():
        with mock.patch.dict(cost.VALUES, {name: constant.value / 2}):
            table.append(found(name) | constant._asdict())
    return pd.DataFrame(table)


def record(names: list[str], measured: Path = MEASURED, path: Path = PREDICTED) -> None:
    """Predict the named sets and write them to `path` beside what was measured."""
    rows = checked(pd.read_csv(measured), measured.name)
    wanted = rows[rows["set"].isin(names) & (rows["role"] != "excluded")]
    asked = set(zip(wanted["set"], wanted["run"], strict=True))
    jobs = [(name, run, job) for name in names for run, job in SETS[name]()]
    steps = {(n, r): traced(job) for n, r, job in tqdm(jobs, unit="run") if (n, r) in asked}
    if missing := asked - steps.keys():
        raise ValueError(
            f"tools/speeds.py and tools/blind_speeds.py have no run {' / '.join(min(missing))}"
        )
    hosts = dict.fromkeys(names, cost.HOST_SECONDS)
    waits = wanted[wanted["limited"] == "host"]
    for row in waits[waits["role"] == "calibrates"].itertuples():
        hosts[row.set] = host_of(steps[row.set, row.run], row.seconds)
    # As if one step that waits for its host had been timed on each machine: the first of its set.
    first = waits.drop_duplicates("set")
    told = {r.set: (r.run, host_of(steps[r.set, r.run], r.seconds)) for r in first.itertuples()}
    made = f"torch {versions()['torch']}, transformers {versions()['transformers']}"
    today = datetime.date.today().isoformat()
    new = []
    for (name, run), step in steps.items():
        time = timed(step, hosts[name])
        known = [time.step_seconds, time.low, time.high, time.limited_by, time.shares["host"]]
        known += [roofline(step), time.fused_seconds]
        teller, host = told.get(name, (None, hosts[name]))
        better = timed(step, host) if run != teller else cost.Time(limited_by=pd.NA)
        known += [hosts[name], better.step_seconds, better.limited_by]
        new.append([name, run, *known, made, today])
    old = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=KEY + OURS)
    new = pd.DataFrame(new, columns=KEY + OURS)
    table = rows.merge(
        pd.concat([old[~old["set"].isin(names)].reindex(columns=KEY + OURS), new]),
        on=KEY,
        how="left",
    )
    table.loc[table["role"] == "excluded", OURS] = pd.NA
    files = {
        path: table.round(
            {name: 6 for name in [*OURS[:3], "roofline", "fused", "told"]} | {"host_share": 3}
        )
    }
    if set(names) == set(SETS):
        predicted = table.dropna(subset="predicted")
        table = halved(steps, predicted, hosts)
        files[HALVED] = table.round({name: 4 for name in table if name != "value"})
    for file, found in files.items():
        replace_file(file, found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sets", nargs="*", metavar="SET", help=", ".join(SETS))
    names = list(dict.fromkeys(parser.parse_args().sets)) or list(SETS)
    try:
        for name in names:
            if name not in SETS:
                raise ValueError(suggest(name, sorted(SETS), "set of timed runs"))
        record(names)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
