"""Run the lessons on this machine and write one page with what they predicted and measured.

    python -m tools.run [--lessons "01 02"] [--output build]

Executed copies go to build/notebooks/, the page to build/report.html. It is written anew after each
lesson, so it can be open in a browser while it grows. The exit status is 1 if a lesson failed, 2 if
the lessons asked for do not exist.

Writes: build/report.html, build/notebooks/, build/runs/
"""

import argparse
import csv
import datetime
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import nbformat
from tqdm import tqdm

from tools import ROOT
from tools.shared.execution import (
    LIMIT,
    LessonError,
    choose_lessons,
    execute,
    read_notebook,
    runnable,
)
from tools.shared.report import (
    Outcome,
    as_text,
    figures,
    recorded,
    summary,
    title_of,
    warnings_in,
    write_report,
)


class Remaining:
    """How long the lessons not yet run will take here.

    `data/minutes.csv` says how long each took on two quiet cores; this machine is slower or faster
    by what the lessons so far have shown.
    """

    def __init__(self, paths: list[Path], table: Path):
        usual = {}
        if table.is_file():
            with table.open(encoding="utf-8", newline="") as file:
                usual = {row["lesson"]: float(row["seconds"]) for row in csv.DictReader(file)}
        middle = statistics.median(usual.values()) if usual else 40.0
        self.usual = {path.stem: usual.get(path.stem, middle) for path in paths}
        self.ran = self.expected = 0.0

    def add(self, outcome: Outcome) -> None:
        """Take note of a lesson that has run; one that failed says nothing of the pace."""
        usual = self.usual.pop(outcome.stem)
        if not outcome.problem:
            self.ran, self.expected = self.ran + outcome.seconds, self.expected + usual

    def __str__(self) -> str:
        pace = self.ran / self.expected if self.expected else 1.0
        minutes = math.ceil(pace * sum(self.usual.values()) / 60)
        return f"about {minutes} minute{'s' * (minutes > 1)}"


def run_lesson(path: Path, copy: Path, bar: tqdm, limit: float) -> Outcome:
    """Execute one lesson, keep the executed copy whatever happens."""
    notebook = read_notebook(path)
    start, problem = time.perf_counter(), ""
    last = bar.n + len(runnable(notebook))
    bar.set_postfix_str(path.stem)
    try:
        execute(notebook, path.parent, after_cell=bar.update, limit=limit)
    except LessonError as error:
        problem = str(error)
    bar.update(last - bar.n)  # the cells after a failure will not run
    nbformat.write(notebook, copy)
    seconds = time.perf_counter() - start
    shown = [*figures(notebook)], [*warnings_in(notebook)]
    return Outcome(path.stem, title_of(notebook, path.stem), seconds, problem, *shown)


def run_all(
    paths: list[Path], copies: Path, remaining: Remaining, limit: float, write: Callable
) -> list[Outcome]:
    """Run lessons until the last one or Ctrl-C; `write` is given what is still to come."""
    outcomes = []
    cells = sum(len(runnable(read_notebook(path))) for path in paths)
    # disable=None: a bar on a terminal, silence in a log.
    with tqdm(total=cells, unit="cell", disable=None) as bar:
        for number, path in enumerate(paths, start=1):
            write(outcomes, f"{number - 1} of {len(paths)} lessons ran, {remaining} to go")
            try:
                outcome = run_lesson(path, copies / path.name, bar, limit)
            except KeyboardInterrupt:
                if not outcomes:
                    raise
                tqdm.write(f"Stopped in {path.stem}; the report has what ran before.")
                break
            outcomes.append(outcome)
            remaining.add(outcome)
            place = f"{number} of {len(paths)}" + f", {remaining} to go" * (number < len(paths))
            tqdm.write(f"{outcome.stem}: {outcome.status} in {outcome.seconds:.0f} s ({place})")
            for line in filter(None, (outcome.problem, *outcome.warnings)):
                tqdm.write(f"  {line}")
            sys.stdout.flush()  # whoever follows a log sees it now
    return outcomes


def main(arguments: list[str] | None = None, root: Path = ROOT, machine: str | None = None) -> int:
    """Run lessons; `machine` describes the computer in one line (default: ask helpers)."""
    parser = argparse.ArgumentParser(description="Run the lessons and write one report.")
    parser.add_argument("--lessons", default="", help='numbers such as "01 02"; all without it')
    parser.add_argument("--output", type=Path, default=root / "build", help="default: build")
    parser.add_argument("--limit", type=float, default=LIMIT, help="minutes a cell, default 30")
    options = parser.parse_args(arguments)
    try:
        paths = choose_lessons(options.lessons, root)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2

    copies, report = options.output / "notebooks", options.output / "report.html"
    copies.mkdir(parents=True, exist_ok=True)
    started = datetime.datetime.now().astimezone()
    remaining = Remaining(paths, root / "data" / "minutes.csv")
    print(
        f"{len(paths)} lessons: {remaining} on two cores. The report grows in {report}", flush=True
    )

    def write(outcomes: list[Outcome], growing: str = "", told: str = "") -> list[tuple[str, ...]]:
        table = summary(recorded(root / "build" / "runs", started))
        write_report(report, outcomes, table, told, started, growing)
        return table

    outcomes = run_all(paths, copies, remaining, options.limit, write)
    if machine is None:
        # After the lessons: asking a GPU about itself takes some of its memory.
        from helpers import describe

        machine = str(describe())
    table = write(outcomes, told=machine)
    print()
    print(as_text(table) if table else "No lesson recorded a run.")
    failed = [outcome.stem for outcome in outcomes if outcome.problem]
    print(f"\n{len(outcomes) - len(failed)} of {len(paths)} lessons ran. Report: {report}")
    if failed:
        print(f"Failed: {', '.join(failed)}")
    return 1 if failed or len(outcomes) < len(paths) else 0


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a pipe on Windows has no arrow for the losses
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("Stopped.")
