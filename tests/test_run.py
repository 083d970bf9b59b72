"""A course of two tiny lessons, one of which fails, run as `make run` runs the real one."""

import base64
import contextlib
import datetime
import io
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib.figure
import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from tools import run
from tools.shared import execution, report
from tools.shared.environment import VARIABLES

HEADER = "lesson,name,kind,device,workload,settings,peak_allocated,seconds,samples_per_second,"
HEADER += "first_loss,last_loss,date"
ALT = 'Memory < time & "more"'


def png() -> str:
    file = io.BytesIO()
    matplotlib.figure.Figure(figsize=(1, 1)).savefig(file, format="png", dpi=20)
    return base64.b64encode(file.getvalue()).decode()


def now(**difference: int) -> str:
    moment = datetime.datetime.now() + datetime.timedelta(**difference)
    return moment.isoformat(timespec="seconds")


def row(kind: str, size: int, date: str, name: str = "plain", **other: str) -> str:
    values = {"lesson": "00_good", "name": name, "kind": kind, "device": "cpu", "workload": "tiny"}
    values |= {"settings": "a=1", "peak_allocated": str(size), "date": date}
    if kind == "measured":
        values |= {"seconds": "2.5", "samples_per_second": "16", "first_loss": "5.5"}
        values |= {"last_loss": "2.25"}
    values |= other
    return ",".join(values.get(column, "") for column in HEADER.split(","))


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The good lesson records two runs and shows a figure; the failing one stops in its middle."""
    root = tmp_path_factory.mktemp("course")
    (root / "notebooks").mkdir()
    runs = root / "build" / "runs"
    runs.mkdir(parents=True)
    (runs / "00_good.csv").write_text(
        f"{HEADER}\n{row('measured', 9 * 2**30, now(days=-1), 'yesterday')}\n"
    )
    rows = [row("predicted", 2**30 * 99 // 100, now(hours=1)), row("measured", 2**30, now(hours=1))]
    record = f"""\
with open("../build/runs/00_good.csv", "a") as file:
    file.write({chr(10).join(rows) + chr(10)!r})"""
    show = f"""\
from IPython.display import publish_display_data

publish_display_data({{"image/png": {png()!r}}}, {{"image/png": {{"alt": {ALT!r}}}}})"""
    environment = f"""\
import os
import sys

print({{name: os.environ[name] for name in {list(VARIABLES)}}})
print(sys.executable)"""
    good = [
        new_markdown_cell("# 00. A good lesson"),
        new_code_cell(record),
        new_markdown_cell("## The picture\n\n```\n# no heading\n```"),
        new_code_cell(show),
        new_code_cell("import warnings\n\nwarnings.warn('a thing is outdated')", id="red"),
        new_code_cell(environment),
    ]
    bad = [
        new_markdown_cell("# 01. A bad lesson"),
        new_code_cell("before = 1"),
        new_code_cell("\nsize = 0\nratio = 1 / size\nprint(ratio)"),
        new_code_cell("after = 1"),
    ]
    for stem, cells in ("00_bad", bad), ("01_good", good):  # the failure comes first
        nbformat.write(new_notebook(cells=cells), root / "notebooks" / f"{stem}.ipynb")
    return root


@dataclass
class Finished:
    status: int
    out: str
    err: str


@pytest.fixture(scope="module")
def finished(course: Path) -> Finished:
    """Both lessons run once; what the terminal would have shown."""
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        for name in VARIABLES:  # conftest has set them for this process already
            patch.delenv(name)
        patch.setenv("HF_HUB_OFFLINE", "0")  # what a user has set is kept
        status = run.main([], root=course, machine="a machine of <tests>")
    return Finished(status, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def page(course: Path, finished: Finished) -> str:
    return (course / "build" / "report.html").read_text(encoding="utf-8")


def test_a_warning_is_told_with_its_cell(finished: Finished) -> None:
    assert "  cell red: " in finished.out and "UserWarning: a thing is outdated" in finished.out


def test_a_failing_lesson_is_the_exit_status(finished: Finished) -> None:
    assert finished.status == 1


def test_the_failure_is_named_and_the_rest_still_runs(finished: Finished) -> None:
    message = "cell [2] (size = 0 / ratio = 1 / size) failed: ZeroDivisionError: division by zero"
    assert message in finished.out
    assert "Failed: 00_bad" in finished.out
    assert "01_good: ran" in finished.out


def test_the_table_is_printed(finished: Finished) -> None:
    lines = [line.split() for line in finished.out.splitlines()]
    numbers = "0.990 GiB 1.00 GiB -1.00 % 2.50 16.00 5.500 → 2.250".split()
    assert ["00_good", "plain", "cpu", *numbers] in lines
    assert "yesterday" not in finished.out  # a row of an earlier run of the course


def test_no_progress_bar_where_nobody_watches(finished: Finished) -> None:
    assert finished.err == ""


def test_both_executed_copies_are_written(course: Path, finished: Finished) -> None:
    copies = {path.stem: path for path in (course / "build" / "notebooks").iterdir()}
    assert sorted(copies) == ["00_bad", "01_good"]
    counts = [c.execution_count for c in nbformat.read(copies["00_bad"], 4).cells[1:]]
    assert counts == [1, 2, None]
    original = nbformat.read(course / "notebooks" / "01_good.ipynb", 4)
    assert not any(cell.get("outputs") for cell in original.cells)


def test_kernels_get_the_variables_and_this_interpreter(course: Path, finished: Finished) -> None:
    cell = nbformat.read(course / "build" / "notebooks" / "01_good.ipynb", 4).cells[-1]
    variables, interpreter = cell.outputs[0].text.splitlines()
    assert variables == str(VARIABLES | {"HF_HUB_OFFLINE": "0"})
    assert interpreter == sys.executable


def test_the_report_has_the_row(page: str) -> None:
    cells = ["00_good", "plain", "cpu", "0.990 GiB", "1.00 GiB", "-1.00 %", "2.50", "16.00"]
    assert "".join(f"<td>{cell}</td>" for cell in [*cells, "5.500 → 2.250"]) in page
    assert "yesterday" not in page


def test_the_report_has_the_figure_its_text_and_its_heading(page: str) -> None:
    alt = "Memory &lt; time &amp; &#34;more&#34;"
    assert f'<img src="data:image/png;base64,{png()}" alt="{alt}">' in page
    assert f"<b>The picture</b> {alt}" in page


def test_the_report_names_machine_lessons_and_failure(page: str) -> None:
    assert "a machine of &lt;tests&gt;" in page
    assert "00. A good lesson" in page and "01. A bad lesson" in page
    assert "ZeroDivisionError: division by zero" in page


def test_the_report_needs_no_other_file(page: str) -> None:
    assert "http" not in page and "<script" not in page and "<link" not in page


def test_an_unknown_lesson_is_one_sentence(
    course: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(["--lessons", "1 42"], root=course, machine="here") == 2
    assert capsys.readouterr().err == "No lesson 42: the lessons are 00 01.\n"


def test_no_lessons_at_all_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main([], root=tmp_path, machine="here") == 2
    assert capsys.readouterr().err == "There are no lessons in the notebooks folder.\n"


def test_lessons_can_be_chosen(course: Path) -> None:
    chosen = [path.stem for path in execution.choose_lessons("1, 00 01", course)]
    assert chosen == ["00_bad", "01_good"]
    assert [path.stem for path in execution.choose_lessons("1", course)] == ["01_good"]


def table(folder: Path, *rows: str) -> list[tuple[str, ...]]:
    (folder / "x.csv").write_text("\n".join([HEADER, *rows]) + "\n")
    since = datetime.datetime.now() - datetime.timedelta(minutes=1)
    return report.summary(report.recorded(folder, since))


def test_prediction_and_measurement_share_a_line_by_name_or_settings(tmp_path: Path) -> None:
    lines = table(
        tmp_path,
        row("predicted", 2**30, now(), "guess", settings="a=2"),
        row("predicted", 2**30, now(), "plain"),
        row("measured", 2**31, now(), "plain", settings="a=3"),
        row("measured", 2**29, now(), "seen", settings="a=2"),
    )
    assert [line[1:6] for line in lines] == [
        ("seen", "cpu", "1.00 GiB", "0.500 GiB", "+100.00 %"),
        ("plain", "cpu", "1.00 GiB", "2.00 GiB", "-50.00 %"),
    ]


@pytest.mark.parametrize("other", [{"device": "T4"}, {"workload": "large"}, {"lesson": "02_x"}])
def test_what_is_not_the_same_run_is_not_compared(tmp_path: Path, other: dict[str, str]) -> None:
    lines = table(tmp_path, row("predicted", 2**30, now(), **other), row("measured", 2**30, now()))
    assert [line[5] for line in lines] == ["-", "-"]


def test_a_run_repeated_counts_once(tmp_path: Path) -> None:
    lines = table(tmp_path, row("measured", 2**30, now()), row("measured", 2**31, now()))
    assert [line[4] for line in lines] == ["2.00 GiB"]


def test_a_row_cut_short_does_not_cost_the_report(tmp_path: Path) -> None:
    (tmp_path / "01.csv").write_text("name,date\nwhole,2100-01-01T00:00:00\ncut\n")
    rows = report.recorded(tmp_path, datetime.datetime(2000, 1, 1))
    assert [row["name"] for row in rows] == ["whole"]


def test_missing_numbers_and_dates_with_a_zone_are_read(tmp_path: Path) -> None:
    zone = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    empty = {"peak_allocated": "", "seconds": "", "first_loss": "", "last_loss": ""}
    lines = table(tmp_path, row("measured", 0, zone, **empty))
    assert lines == [("00_good", "plain", "cpu", "-", "-", "-", "-", "16.00", "-")]


def test_a_kernel_that_dies_is_one_sentence(tmp_path: Path) -> None:
    nb = new_notebook(cells=[new_code_cell("import os"), new_code_cell("os._exit(1)")])
    with pytest.raises(execution.LessonError) as failure:
        execution.execute(nb, tmp_path)
    assert str(failure.value).startswith("cell [2] (os._exit(1)) failed: the kernel died")


def test_what_ran_before_ctrl_c_is_reported(course: Path, tmp_path: Path, monkeypatch, capsys):
    def run_lesson(path, copy, bar, limit):
        if path.name.startswith("01"):
            raise KeyboardInterrupt
        return report.Outcome(path.stem, "the first", 1.0)

    monkeypatch.setattr(run, "run_lesson", run_lesson)
    first = sorted(course.glob("notebooks/[0-9]*.ipynb"))[0]
    monkeypatch.setattr(run, "choose_lessons", lambda *_: [first, first.with_stem("01_b")])
    monkeypatch.setattr(run, "read_notebook", lambda _: new_notebook())
    assert run.main(["--output", str(tmp_path)], course, "a machine") == 1
    assert "Stopped in 01_b" in (text := capsys.readouterr().out) and "1 of 2 lessons ran" in text
    assert "the first" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_it_says_how_far_it_is_and_how_long_it_will_take(finished: Finished) -> None:
    first, *rest = finished.out.splitlines()
    assert first.startswith("2 lessons: about 2 minutes on two cores. The report grows in ")
    assert any(
        re.match(r"00_bad: failed in \d+ s \(1 of 2, about 1 minute to go\)", x) for x in rest
    )
    assert any(re.match(r"01_good: ran in \d+ s \(2 of 2\)", line) for line in rest)


def test_what_remains_follows_this_machines_pace(tmp_path: Path) -> None:
    table = tmp_path / "minutes.csv"
    table.write_text("lesson,seconds\n00_a,30\n01_b,60\n02_c,120\n")
    paths = [tmp_path / f"{stem}.ipynb" for stem in ("00_a", "01_b", "02_c", "03_new")]
    remaining = run.Remaining(paths, table)
    assert str(remaining) == "about 5 minutes"  # 30 + 60 + 120, and the median for the new one
    remaining.add(report.Outcome("00_a", "a", 60.0))  # twice as slow as the table's machine
    assert str(remaining) == "about 8 minutes"
    remaining.add(report.Outcome("01_b", "b", 5.0, problem="it failed at once"))
    assert str(remaining) == "about 6 minutes"


def test_the_report_can_be_opened_while_it_grows(course: Path, tmp_path: Path, monkeypatch) -> None:
    pages = []

    def run_lesson(path, copy, bar, limit):
        pages.append((tmp_path / "report.html").read_text(encoding="utf-8"))
        return report.Outcome(path.stem, f"the lesson {path.stem}", 1.0)

    monkeypatch.setattr(run, "run_lesson", run_lesson)
    assert run.main(["--output", str(tmp_path)], course, "a machine") == 0
    assert "0 of 2 lessons ran" in pages[0] and "1 of 2 lessons ran" in pages[1]
    assert "the lesson 00_bad" in pages[1] and all('http-equiv="refresh"' in p for p in pages)
    last = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "lessons ran" not in last and "refresh" not in last and "a machine" in last
    assert not list(tmp_path.glob("*.new"))
