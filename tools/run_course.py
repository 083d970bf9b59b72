"""Run the lessons on this machine and write one page with what they predicted and measured.

    python tools/run_course.py [--lessons "01 02"] [--output build]

Executed copies go to build/notebooks/, the page to build/report.html. It is written anew after each
lesson, so it can be open in a browser while it grows. The exit status is 1 if a lesson failed, 2 if
the lessons asked for do not exist.
"""

import argparse
import csv
import datetime
import math
import re
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import jinja2
import nbformat
from tqdm import tqdm

from execution import LIMIT, ROOT, LessonError, choose_lessons, execute, read_notebook, runnable

TEMPLATE = Path(__file__).with_name("report.html")
COLUMNS = (
    "lesson",
    "run",
    "device",
    "predicted",
    "measured",
    "error",
    "time (s)",
    "samples/s",
    "loss",
)
NOT_KNOWN = "-"


@dataclass
class Figure:
    png: str  # base64, as the notebook stores it
    alt: str
    heading: str


@dataclass
class Outcome:
    """What became of one lesson."""

    stem: str
    title: str
    seconds: float
    problem: str = ""
    figures: list[Figure] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def status(self) -> str:
        return "failed" if self.problem else "ran"


def headings(source: str) -> list[tuple[int, str]]:
    """Level and text of each heading in a Markdown cell, code blocks left out."""
    text = re.sub(r"^(```|~~~).*?^\1", "", source, flags=re.MULTILINE | re.DOTALL)
    return [(len(marks), title) for marks, title in re.findall(r"^(#{1,6}) +(.+?)\s*$", text, re.M)]


def title_of(notebook: nbformat.NotebookNode, stem: str) -> str:
    markdown = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    return next((text for source in markdown for _, text in headings(source)), stem)


def figures(notebook: nbformat.NotebookNode) -> Iterator[Figure]:
    """The stored pictures in order, each with its alternative text and the heading above it."""
    heading = ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            heading = next((text for _, text in reversed(headings(cell.source))), heading)
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                alt = output.get("metadata", {}).get("image/png", {}).get("alt", "")
                png = "".join(output.data["image/png"]).replace("\n", "")
                yield Figure(png, alt or "A figure without a description", heading)


def warnings_in(notebook: nbformat.NotebookNode) -> Iterator[str]:
    """What a reader meets on a red ground: the cell and the last line but code."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr":
                lines = [line for line in output.text.splitlines() if line and line[0] != " "]
                yield f"cell {cell.id}: {lines[-1] if lines else output.text}"


def recorded(folder: Path, since: datetime.datetime) -> list[dict[str, str]]:
    """Rows that lessons wrote to build/runs/*.csv since a moment, the oldest first."""
    rows = []
    for path in sorted(folder.glob("*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                # A date without a zone is local time; astimezone() makes both kinds comparable.
                try:
                    date = datetime.datetime.fromisoformat(row["date"]).astimezone()
                except (KeyError, TypeError, ValueError):
                    continue  # cut short by a crash: it must not cost the report
                if date >= since.astimezone().replace(microsecond=0):
                    rows.append({key: (value or "").strip() for key, value in row.items() if key})
    return rows


def number(text: str | None, digits: int) -> str:
    return f"{float(text):,.{digits}f}" if text else NOT_KNOWN


def losses(row: dict[str, str]) -> str:
    if not row.get("first_loss"):
        return NOT_KNOWN
    return f"{number(row['first_loss'], 3)} → {number(row.get('last_loss'), 3)}"


def summary(rows: list[dict[str, str]]) -> list[tuple[str, ...]]:
    """One line per run. A prediction and a measurement of the same thing share theirs.

    The same thing: the same lesson, workload and device, and the same name or the same settings.
    Without the workload and the device, a prediction for a big card would be compared with a tiny
    run on this machine.
    """
    keys = ("lesson", "name", "kind", "device", "workload", "settings")
    latest: dict[tuple[str | None, ...], dict[str, str]] = {}
    for row in rows:  # a cell that ran twice counts once
        latest[tuple(row.get(k) for k in keys)] = row

    from helpers import gib  # it imports torch: not before there is something to show

    lines: list[dict[str, dict[str, str]]] = []
    for row in latest.values():
        other = {"predicted": "measured", "measured": "predicted"}.get(row["kind"], "")
        partners = [
            line
            for line in lines
            if other in line
            and row["kind"] not in line
            and all(line[other].get(k) == row.get(k) for k in ("lesson", "workload", "device"))
            and any(row.get(k) and line[other].get(k) == row[k] for k in ("name", "settings"))
        ]
        partners.sort(key=lambda line: line[other].get("name") != row.get("name"))
        if partners:
            partners[0][row["kind"]] = row
        else:
            lines.append({row["kind"]: row})

    table = []
    for line in lines:
        predicted, measured = line.get("predicted", {}), line.get("measured", {})
        known, sizes = measured or predicted, [predicted.get("peak_allocated")]
        sizes.append(measured.get("peak_allocated"))
        error = NOT_KNOWN
        if all(sizes) and float(sizes[1]):
            error = f"{100 * (float(sizes[0]) / float(sizes[1]) - 1):+.2f} %"
        table.append(
            (
                known.get("lesson", ""),
                known.get("name", ""),
                known.get("device", ""),
                *(gib(float(size) if size else None) for size in sizes),
                error,
                number(measured.get("seconds"), 2),
                number(measured.get("samples_per_second"), 2),
                losses(measured),
            )
        )
    return table


def as_text(table: list[tuple[str, ...]]) -> str:
    """The summary for a terminal: texts to the left, numbers to the right."""
    lines = [COLUMNS, *table]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]

    def cells(line: tuple[str, ...]) -> Iterator[str]:
        for column, (text, width) in enumerate(zip(line, widths, strict=True)):
            yield text.ljust(width) if column < 3 else text.rjust(width)

    return "\n".join("  ".join(cells(line)).rstrip() for line in lines)


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


def write_report(
    path: Path,
    outcomes: list[Outcome],
    table: list[tuple[str, ...]],
    machine: str,
    started: datetime.datetime,
    growing: str = "",
) -> None:
    """One page that needs nothing but itself; `growing` says what is still to come."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        columns=COLUMNS,
        table=table,
        outcomes=outcomes,
        machine=machine,
        date=started.strftime("%Y-%m-%d %H:%M"),
        growing=growing,
    )
    whole = path.with_suffix(".new")  # a browser never reads half a page
    whole.write_text(page, encoding="utf-8")
    whole.replace(path)


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
    outcomes = []
    cells = sum(len(runnable(read_notebook(path))) for path in paths)
    print(
        f"{len(paths)} lessons: {remaining} on two cores. The report grows in {report}", flush=True
    )

    def write(growing: str = "", told: str = "") -> list[tuple[str, ...]]:
        table = summary(recorded(root / "build" / "runs", started))
        write_report(report, outcomes, table, told, started, growing)
        return table

    # disable=None: a bar on a terminal, silence in a log.
    with tqdm(total=cells, unit="cell", disable=None) as bar:
        for number, path in enumerate(paths, start=1):
            write(f"{number - 1} of {len(paths)} lessons ran, {remaining} to go")
            try:
                outcome = run_lesson(path, copies / path.name, bar, options.limit)
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

    if machine is None:
        # After the lessons: asking a GPU about itself takes some of its memory.
        from helpers import describe

        machine = str(describe())
    table = write(told=machine)
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
