"""The page and the table of what lessons predicted and measured: build/report.html."""

import csv
import datetime
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import jinja2
import nbformat

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
Line = dict[str, dict[str, str]]  # "predicted", "measured": a recorded row of each


@dataclass
class Figure:
    """A picture that a lesson shows."""

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


def latest(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """The rows without those that a later one repeats: a cell that ran twice counts once."""
    keys = ("lesson", "name", "kind", "device", "workload", "settings")
    return list({tuple(row.get(key) for key in keys): row for row in rows}.values())


def partner(row: dict[str, str], lines: list[Line]) -> Line | None:
    """The line whose run is the other side of this one: predicted beside measured.

    Both are of the same lesson, workload and device, and have the same name or the same settings.
    Without the workload and the device, a prediction for a big card would be compared with a tiny
    run on this machine.
    """
    other = {"predicted": "measured", "measured": "predicted"}.get(row["kind"], "")
    found = [
        line
        for line in lines
        if other in line
        and row["kind"] not in line
        and all(line[other].get(k) == row.get(k) for k in ("lesson", "workload", "device"))
        and any(row.get(k) and line[other].get(k) == row[k] for k in ("name", "settings"))
    ]
    found.sort(key=lambda line: line[other].get("name") != row.get("name"))
    return found[0] if found else None


def cells_of(line: Line) -> tuple[str, ...]:
    """The texts of one line, in the order of `COLUMNS`."""
    from helpers import gib  # it imports torch: not before there is something to show

    predicted, measured = line.get("predicted", {}), line.get("measured", {})
    known, sizes = measured or predicted, [predicted.get("peak_allocated")]
    sizes.append(measured.get("peak_allocated"))
    error = NOT_KNOWN
    if all(sizes) and float(sizes[1]):
        error = f"{100 * (float(sizes[0]) / float(sizes[1]) - 1):+.2f} %"
    return (
        known.get("lesson", ""),
        known.get("name", ""),
        known.get("device", ""),
        *(gib(float(size) if size else None) for size in sizes),
        error,
        number(measured.get("seconds"), 2),
        number(measured.get("samples_per_second"), 2),
        losses(measured),
    )


def summary(rows: list[dict[str, str]]) -> list[tuple[str, ...]]:
    """One line per run. A prediction and a measurement of the same thing share theirs."""
    lines: list[Line] = []
    for row in latest(rows):
        line = partner(row, lines)
        if line is None:
            lines.append({row["kind"]: row})
        else:
            line[row["kind"]] = row
    return [cells_of(line) for line in lines]


def as_text(table: list[tuple[str, ...]]) -> str:
    """The summary for a terminal: texts to the left, numbers to the right."""
    lines = [COLUMNS, *table]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]

    def cells(line: tuple[str, ...]) -> Iterator[str]:
        for column, (text, width) in enumerate(zip(line, widths, strict=True)):
            yield text.ljust(width) if column < 3 else text.rjust(width)

    return "\n".join("  ".join(cells(line)).rstrip() for line in lines)


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
