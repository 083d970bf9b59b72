"""Every stored notebook keeps to every rule, and every rule sees the defect it is there for."""

import base64
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from nbval.plugin import get_sanitize_patterns

import notebook_rules as rules
from tools.shared import address, folds

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = [
    *sorted((ROOT / "notebooks").glob("*.ipynb")),
    *sorted((ROOT / "notebooks" / "solutions").glob("*.ipynb")),
]
PNG = base64.b64encode(b"not a real picture").decode()

read = cache(rules.read)


def name(path: Path) -> str:
    return f"solutions-{path.stem}" if rules.is_solution(path) else path.stem


REAL = [
    pytest.param(rule, path, id=f"{name(path)}-{rule.__name__}")
    for path in NOTEBOOKS
    for rule in rules.rules_for(path)
]


@pytest.mark.parametrize("rule, path", REAL)
def test_notebook(rule: rules.Rule, path: Path) -> None:
    problems = rule(read(path), path)
    assert not problems, f"{name(path)}: " + "; ".join(problems)


def test_no_cell_waits_for_cards_that_helpers_hide() -> None:
    """`helpers` shows a process the first card alone; `describe().cards` tells of the others."""
    for path in NOTEBOOKS:
        for cell in rules.code(read(path)):
            assert "device_count()" not in cell.source, f"{name(path)}: cell {cell.id}"


def test_the_course_has_begun() -> None:
    numbers = {path.name[:2] for path in NOTEBOOKS if not rules.is_solution(path)}
    assert {"00", "01", "02"} <= numbers, f"the first three lessons are needed, found {numbers}"


def test_readme_lists_every_lesson_and_links_only_what_exists() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = set(rules.links(text))
    lessons = {f"notebooks/{p.name}" for p in NOTEBOOKS if not rules.is_solution(p)}
    assert lessons <= links, f"README.md does not link {sorted(lessons - links)}"
    broken = sorted(t for t in links if not (ROOT / t.split("#")[0]).exists())
    assert not broken, f"README.md links {broken}, which do not exist"
    assert text == address.rewrite_readme(text), "README.md is out of date: run make outputs"


def ruff(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ruff", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [("check",), ("format", "--check")], ids=" ".join)
def test_ruff_is_content(arguments: tuple[str, ...]) -> None:
    result = ruff(*arguments, ".")
    assert result.returncode == 0, f"ruff {' '.join(arguments)}:\n{result.stdout}{result.stderr}"


def test_pytest_alone_runs_the_notebooks(pytestconfig: pytest.Config) -> None:
    option = pytestconfig.option
    assert "notebooks" in pytestconfig.getini("testpaths")
    assert option.nbval_lax and option.nbval_current_env
    assert Path(option.nbval_sanitize_with).resolve() == ROOT / "tests" / "nbval_sanitize.cfg"


def test_nbval_reads_both_sanitize_rules() -> None:
    """It drops a rule in silence: for a missing space, a comment in between, a CRLF."""
    text = (ROOT / "tests" / "nbval_sanitize.cfg").read_bytes().decode()
    assert "\r" not in text
    assert dict(get_sanitize_patterns(text)) == {
        "0x[0-9a-fA-F]+": "0xADDRESS",
        r"<Figure size \d+x\d+ with": "<Figure size WxH with",
    }


# A small good course, and one planted defect after another.

STEMS = ("00_start_here", "01_batch_size", "02_precision")
TITLES = ("Start here", "Batch size", "Precision")
PYPROJECT = '[project.urls]\nRepository = "https://github.com/someone/a-course"\n[project]\n'
WORDS = "Every word of this sentence counts towards the length of a lesson. " * 4
FOLDED = {"collapsed": True, "jupyter": {"outputs_hidden": True}}
HIDDEN = {"cellView": "form", "jupyter": {"source_hidden": True}}
VERDICTS = "| what the guide says | verdict | guide |\n|---|---|---|\n"
DRAW = 'draw()\nshow.figure(fig, show.words("01.cell-9"))'
CHECKING = "# @title Check of it\nprint(check(answer))"
CHECKED_CELL, FIGURE_CELL = 8, 9  # places in the good lesson, used by the defects


def stream(text: str, name: str = "stdout") -> NotebookNode:
    return new_output("stream", name=name, text=text)


def figure(alt: str = "Memory grows with the batch") -> NotebookNode:
    data = {"image/png": PNG, "text/plain": "<Figure size 700x300 with 1 Axes>"}
    return new_output("display_data", data=data, metadata={"image/png": {"alt": alt}})


error = new_output("error", ename="E", evalue="no", traceback=["no"])


def finish(cells: list[NotebookNode]) -> NotebookNode:
    nb = new_notebook(cells=cells)
    nb.nbformat, nb.nbformat_minor = 4, 5
    nb.metadata.update(
        accelerator="GPU",
        colab={"gpuType": "T4"},
        kernelspec={"display_name": "Python 3", "language": "python", "name": "python3"},
    )
    number = 0
    for place, cell in enumerate(nb.cells):
        if not cell.id.startswith(("answer-", "check-")):
            cell.id = f"cell-{place}"
        if cell.cell_type == "code":
            cell.execution_count = number = number + 1
    return nb


def check(value: int, before: str = "import math", **options) -> NotebookNode:
    source = f"{rules.CHECK}\n{before}\nprint({value})"
    return new_code_cell(source, outputs=[stream(f"{value}\n")], **options)


def good_lesson(number: int, root: Path) -> NotebookNode:
    stem = STEMS[number]
    md, title = new_markdown_cell, f"# {number:02}. {TITLES[number]}"
    links = [f"[before]({STEMS[number - 1]}.ipynb)"] * (number > 0)
    links += ["[Contents](../README.md)"]
    links += [f"[after]({s}.ipynb)" for s in STEMS[number + 1 : number + 2]]
    cells = [
        md(f"{title}\n\n{address.badge(stem, root=root)}\n\nHow much, and why?"),
        md("**You will** measure. **You need** nothing, and one minute."),
        new_code_cell(address.colab_cell(root)),
        new_code_cell("%matplotlib inline\nimport math"),
        md("## Predict\n\n![A curve](picture.png), see [it](https://example.org/home/page)"),
        md(f"```python\n# not a heading\n```\n\n{WORDS}"),
        md(f"### In detail {number}\n\n~~~\n![](in-a-fence.png)\n~~~"),
        md("## Measure\n\n**Before you run it, guess:** which?"),
        check(42, metadata=FOLDED),
        new_code_cell(DRAW, outputs=[figure()], metadata=FOLDED),
        md(f"{rules.REVEAL}The second.\n\n</details>\n\n## Judge"),
        check(43),
        new_code_cell("1 / 0", outputs=[error], metadata={"tags": ["raises-exception"]}),
        md("## When not to"),
        check(44, "plt.style.use('petroff10')"),
        md(f"## What the guides say\n\n{VERDICTS}| it helps | [yes](#In-detail-{number}) | S1-2 |"),
        md(f"## Exercises\n\nWorked answers: [solutions](solutions/{stem}.ipynb)"),
    ]
    for n in (1, 2):
        cells.append(md(f"### Exercise {number}.{n}: try it"))
        cells.append(new_code_cell("answer = ...", id=f"answer-{n}"))
        cells.append(new_code_cell(CHECKING, id=f"check-{n}", metadata=HIDDEN))
    cells += [md(WORDS) for _ in range(18)]
    cells += [md("## In this lesson"), md("## References\n\n[a page](https://example.org)")]
    return finish([*cells, md(" · ".join(links))])


def good_solution(number: int, root: Path) -> NotebookNode:
    stem = STEMS[number]
    badge = address.badge(stem, solutions=True, root=root)
    cells = [
        new_markdown_cell(f"# {number:02}. {TITLES[number]}: solutions\n\n{badge}"),
        new_code_cell(address.colab_cell(root)),
        new_markdown_cell("## Exercises"),
        new_markdown_cell(f"### Exercise {number}.1: try it"),
        check(number),
        new_markdown_cell(f"### Exercise {number}.2: try it"),
        new_code_cell("answer = 2"),
    ]
    return finish(cells)


@pytest.fixture(scope="module")
def good_course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("course")
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "README.md").write_text("# A course\n")
    (root / "notebooks" / "solutions").mkdir(parents=True)
    (root / "notebooks" / "picture.png").write_bytes(b"")
    for number, stem in enumerate(STEMS):
        nbformat.write(good_lesson(number, root), root / "notebooks" / f"{stem}.ipynb")
        file = root / "notebooks" / "solutions" / f"{stem}.ipynb"
        nbformat.write(good_solution(number, root), file)
    return root


def test_a_good_course_has_no_problems(good_course: Path) -> None:
    for path in sorted(good_course.glob("notebooks/**/*.ipynb")):
        nb = rules.read(path)
        found = {rule.__name__: rule(nb, path) for rule in rules.rules_for(path)}
        assert not any(found.values()), found


Plant = Callable[[NotebookNode, Path], object]
DEFECTS: list[tuple[rules.Rule, str, Plant]] = []


def defect(rule: rules.Rule, seen: str, plant: Plant) -> None:
    """`plant` damages lesson 01; the rule must then report a problem with the text `seen`."""
    DEFECTS.append((rule, seen, plant))


def source(place: int, old: str, new: str) -> Plant:
    def plant(nb: NotebookNode, path: Path) -> None:
        assert old in nb.cells[place].source
        nb.cells[place].source = nb.cells[place].source.replace(old, new)

    return plant


def append(place: int, text: str) -> Plant:
    def plant(nb: NotebookNode, path: Path) -> None:
        nb.cells[place].source += text

    return plant


def outputs(place: int, *new: NotebookNode) -> Plant:
    return lambda nb, path: nb.cells[place].update(outputs=list(new))


def first_solution(path: Path) -> Path:
    return path.parent / "solutions" / path.name


def rewrite_solution(old: str, new: str) -> Plant:
    def plant(nb: NotebookNode, path: Path) -> None:
        text = first_solution(path).read_text()
        assert old in text
        first_solution(path).write_text(text.replace(old, new))

    return plant


def html(text: str) -> NotebookNode:
    return new_output("display_data", data={"text/html": text})


widget = new_output("display_data", data={rules.WIDGET: {}, "text/plain": "Box()"})
svg = new_output("display_data", data={"image/svg+xml": "<svg/>"})
C, F = CHECKED_CELL, FIGURE_CELL

r = rules
defect(r.valid_format, "two cells", lambda nb, path: nb.cells[3].update(id=nb.cells[4].id))
defect(r.valid_format, "no id", lambda nb, path: nb.cells[3].pop("id"))
defect(r.valid_format, "not a valid", lambda nb, path: nb.cells[3].update(id="a b"))
defect(r.run_in_order, "count 9", lambda nb, path: nb.cells[C].update(execution_count=9))
defect(r.run_in_order, "count None", lambda nb, path: nb.cells[C].update(execution_count=None))
defect(
    r.run_in_order,
    "another run",
    outputs(C, new_output("execute_result", execution_count=9, data={"text/plain": "1"})),
)
defect(r.enough_checked_cells, "2 checked", source(C, rules.CHECK, "#"))
defect(r.checked_cells_can_fail, "no text", outputs(C))
defect(r.checked_cells_can_fail, "no text", outputs(C, figure()))
defect(r.checked_cells_are_stable, "';'", append(C, ";"))
defect(r.checked_cells_are_stable, "Styler", append(C, "\ntable.style.bar()"))
defect(r.checked_cells_are_stable, "tqdm", append(C, "\nfrom tqdm.auto import tqdm"))
defect(r.checked_cells_are_stable, "trains", append(C, "\ntrainer.train(resume=False)"))
defect(r.checked_cells_are_stable, "a time", append(C, "\n%time f()"))
defect(r.checked_cells_are_stable, "progress", outputs(C, html("<progress value=1>")))
defect(r.markers_are_exact, "alone", source(C, rules.CHECK, rules.CHECK + " (exact)"))
defect(r.markers_are_exact, "alone", source(C, rules.CHECK, "#NBVAL_CHECK_OUTPUT"))
defect(r.markers_are_exact, "alone", source(C, rules.CHECK, "# NVBAL_CHECK_OUTPUT"))
defect(r.markers_are_exact, "alone", append(F, "\n# NBVAL_SKIP"))
defect(r.markers_are_exact, "twice", append(C, f"\n{rules.CHECK}"))
defect(
    r.markers_are_exact, "tag", lambda nb, path: nb.cells[C].metadata.update(tags=["nbval-skip"])
)
defect(r.no_stderr, "stderr", outputs(F, stream("careful\n", "stderr")))
defect(
    r.no_log_lines, "log", outputs(F, stream("[WARNING] Setting accelerator to CPU\n", "stdout"))
)
defect(r.no_errors, "error", outputs(F, error))
defect(r.no_widgets, "widget state", lambda nb, path: nb.metadata.update(widgets={}))
defect(r.no_widgets, "stores a widget", outputs(F, widget))
defect(r.images_have_alt_text, "picture", outputs(F, figure(alt=" ")))
defect(r.images_have_alt_text, "an image", source(4, "![A curve]", "![ ]"))
defect(r.images_have_alt_text, "<img>", append(4, '\n<img src="picture.png" alt="">'))
defect(r.images_have_alt_text, "<img>", outputs(F, html('<img src="x.png">')))
defect(
    r.alt_text_states_a_finding, "shows", outputs(F, figure(alt="A plot of memory over batches"))
)
defect(
    r.alt_text_states_a_finding, "shows", outputs(F, figure(alt="Bar chart: memory by category"))
)
defect(r.alt_text_states_a_finding, "shows", outputs(F, figure(alt="Memory and batch")))
defect(r.texts_of_pictures_are_readable, "of 7 points", append(F, "\nax.legend(fontsize=7)"))
defect(r.texts_of_pictures_are_readable, "of 6.5", append(F, '\nx = {"font.size": 6.5}'))
defect(r.texts_of_pictures_are_readable, "x-small", append(F, "\nax.legend(fontsize='x-small')"))
defect(r.links_say_where_they_lead, "'here'", append(5, "It is [here](https://example.org)."))
defect(r.links_say_where_they_lead, "https", append(5, "[https://a.org](https://a.org)"))
defect(r.links_say_where_they_lead, "name the link", append(5, "See https://example.org/x."))
defect(r.links_say_where_they_lead, "name the link", append(5, "See <https://example.org/x>."))
defect(r.no_svg_or_attachments, "SVG", outputs(F, svg))
defect(
    r.no_svg_or_attachments,
    "attachment",
    lambda nb, path: nb.cells[4].update(attachments={"a.png": {"image/png": PNG}}),
)
defect(r.title_matches_file, "first line", source(0, "# 01.", "# 02."))
defect(r.title_matches_file, "2 headings", source(10, "## Judge", "# Judge"))
defect(r.badge_opens_this_file, "badge", source(0, "01_batch_size", "02_precision"))
defect(r.badge_opens_this_file, "badge", source(0, "someone", "someone-else"))
defect(r.badge_opens_this_file, "badge", append(4, "![Open](https://x.org/colab-badge.svg)"))
defect(r.colab_cell_is_the_generated_one, "first code", source(2, "install -q", "install"))
defect(r.colab_cell_is_the_generated_one, "second", append(3, "\n!git clone x"))
defect(r.metadata_is_standard, "GPU", lambda nb, path: nb.metadata.pop("accelerator"))
defect(r.metadata_is_standard, "T4", lambda nb, path: nb.metadata.colab.pop("gpuType"))
defect(r.metadata_is_standard, "python3", lambda nb, path: nb.metadata.kernelspec.update(name="x"))
defect(
    r.metadata_is_standard,
    "version",
    lambda nb, path: nb.metadata.update(language_info={"name": "python", "version": "3.11.0"}),
)
defect(
    r.metadata_is_standard,
    "timestamps",
    lambda nb, path: nb.cells[C].metadata.update(execution={"start": "now"}),
)
defect(r.heading_levels_never_skip, "level 4", source(6, "### In", "#### In"))
defect(r.heading_levels_never_skip, "without text", append(6, "\n\n###\n"))
defect(r.code_cells_are_short, "26 lines", append(F, "\nx = 1" * 24))
defect(r.code_cells_are_short, "empty", source(F, DRAW, " "))
defect(r.code_parses, "not Python", append(F, "\nif x:"))
defect(r.helpers_come_first, "peft", append(C, "\nfrom peft import LoraConfig\nimport helpers"))
defect(r.file_is_small, "bytes", append(5, "`" + "x" * 300_000 + "`"))
defect(r.relative_links_exist, "nothing.ipynb", append(5, "[gone](nothing.ipynb#here)"))
defect(r.relative_links_exist, "gone.png", append(5, '\n<img alt="x" src="gone.png">'))
PRIVATE = [f"/{folder}/x" for folder in ("home", "root", "work", "Users")]
for text in (*PRIVATE, "C:" + r"\\Users", "file:" + "///x"):
    defect(r.nothing_private, "path", append(C, f"\nprint('{text}')"))
    defect(r.nothing_private, "path", outputs(C, stream(f"\x1b[32m{text}\x1b[0m")))
defect(r.nothing_private, "token", append(C, f"\ntoken = 'hf_{'a' * 30}'"))
defect(r.nothing_private, "token", outputs(C, html(f"ghp_{'a1' * 15}")))
defect(
    r.lessons_are_contiguous,
    "used twice",
    lambda nb, path: (path.parent / f"{STEMS[0]}.ipynb").unlink(),
)
for section in rules.SECTIONS:
    defect(
        r.sections_in_order,
        "is missing",
        lambda nb, path, title=f"## {section}": [
            cell.update(source=cell.source.replace(title, "## Elsewhere")) for cell in nb.cells
        ],
    )
defect(
    r.sections_in_order,
    "'## Measure' comes too early",
    lambda nb, path: nb.cells.insert(4, nb.cells.pop(7)),
)
defect(r.says_what_it_needs, "You need", source(1, "You need", "Needed"))
defect(r.says_what_it_needs, "You will", lambda nb, path: nb.cells.insert(9, nb.cells.pop(1)))
defect(r.last_cell_links_the_neighbours, "should link", source(-1, "00_start_here", "02_precision"))
defect(r.last_cell_links_the_neighbours, "should link", source(-1, "../README.md", "../LICENSE"))
defect(
    r.last_cell_links_the_neighbours, "links none", lambda nb, path: nb.cells[-1].update(source="")
)
defect(r.length_is_right, "34 cells", lambda nb, path: nb.update(cells=nb.cells[:36]))  # 2 checks
defect(r.length_is_right, "62 cells", lambda nb, path: nb.cells.extend(nb.cells[4:14] * 2))
defect(r.length_is_right, "words", append(5, WORDS * 25))
defect(
    r.code_is_light,
    "the median is 9",
    lambda nb, path: [c.update(source="x = 1\n\n" * 9) for c in r.code(nb)],
)
defect(r.length_is_right, "words", lambda nb, path: [c.update(source="") for c in nb.cells[21:35]])
defect(
    r.shows_the_code_it_teaches,
    "120 are the most",
    lambda nb, path: nb.cells[C].update(source="x = 1\n\n" * 121),
)
defect(r.folds_say_what_they_show, "no title", source(19, rules.TITLE, "# "))
defect(r.folds_say_what_they_show, "no title", source(19, "Check of it", "Check"))
defect(r.folds_say_what_they_show, "alike", lambda nb, path: nb.cells[19].metadata.pop("cellView"))
defect(
    r.folds_say_what_they_show,
    "alike",
    lambda nb, path: nb.cells[F].metadata.update(cellView="form"),
)
defect(r.guesses_are_folded, "asks the reader", source(7, "guess", "think"))
defect(
    r.guesses_are_folded, "shows the answer", lambda nb, path: nb.cells[F].metadata.pop("collapsed")
)
defect(
    r.guesses_are_folded, "without a guess", lambda nb, path: nb.cells[11].update(metadata=FOLDED)
)
for plant in (
    source(10, rules.REVEAL, ""),
    source(10, "<details>", "<details open>"),
    source(10, "</details>", ""),
):
    defect(r.answers_to_guesses_are_folded, "answers a guess", plant)
defect(r.pictures_keep_the_answer, "tells", source(F, 'show.words("01.cell-9")', '"It falls."'))
defect(r.pictures_keep_the_answer, "tells", append(F, '\nshow.timeline(run, alt=f"{name} falls.")'))
defect(r.pictures_keep_the_answer, "tells", append(F, '\nshow.bars(rows, "It falls.", title)'))
defect(r.intro_ends_with_the_question, "does not end", append(0, " It saves half."))
defect(r.answers_come_first, "no cell answer-1", lambda nb, path: nb.cells.pop(18))
defect(r.answers_come_first, "no ... to", source(18, "...", "4"))
defect(r.answers_come_first, "directly below", lambda nb, path: nb.cells.pop(19))
defect(r.answers_come_first, "not folded", lambda nb, path: nb.cells[19].metadata.clear())
defect(r.links_go_to_unique_headings, "no heading", append(5, "[gone](#Gone)"))
defect(r.links_go_to_unique_headings, "3 headings", append(5, "[often](#Judge)"))
defect(r.links_go_to_unique_headings, "3 headings", append(5, f"[often]({STEMS[0]}.ipynb#Judge)"))
defect(r.verdicts_are_readable, "no table", source(15, "verdict |", "truth |"))
defect(r.verdicts_are_readable, "columns", source(15, "what the guide says", "claim"))
defect(r.verdicts_are_readable, "no guide's number", source(15, "S1-2", "HF"))
defect(r.verdicts_are_readable, "no guide's number", source(15, "it helps", "S1-2: it helps"))
defect(r.verdicts_are_readable, "11 verdicts", append(15, "\n| a | b | S1-3 |" * 10))
defect(r.exercises_have_solutions, "not the same", rewrite_solution("1.2: try it", "1.2: or not"))
defect(r.exercises_have_solutions, "not exist", lambda nb, path: first_solution(path).unlink())
defect(r.exercises_have_solutions, "should read", source(17, "1.1", "1.3"))
defect(r.exercises_have_solutions, "level 3", source(17, "### Exercise", "## Exercise"))
defect(r.exercises_have_solutions, "1 exercises", source(17, "Exercise", "Task"))
defect(r.exercises_have_solutions, "no link", source(16, "solutions/", "other/"))


@pytest.mark.parametrize(
    "rule, seen, plant",
    [
        pytest.param(*planted, id=f"{planted[0].__name__}-{number}")
        for number, planted in enumerate(DEFECTS)
    ],
)
def test_rule_sees_its_defect(
    rule: rules.Rule, seen: str, plant: Plant, good_course: Path, tmp_path: Path
) -> None:
    root = Path(shutil.copytree(good_course, tmp_path / "course"))
    path = root / "notebooks" / f"{STEMS[1]}.ipynb"
    nb = rules.read(path)
    plant(nb, path)
    path.write_text(nbformat.v4.writes(nb))  # nbformat.write would repair some of the damage
    problems = rule(rules.read(path), path)
    assert any(seen in problem for problem in problems), problems


def test_a_solution_belongs_to_a_lesson(good_course: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(good_course, tmp_path / "course"))
    path = root / "notebooks" / "solutions" / f"{STEMS[1]}.ipynb"
    (root / "notebooks" / path.name).unlink()
    assert rules.belongs_to_a_lesson(rules.read(path), path)


def test_a_solution_checks_something(good_course: Path) -> None:
    path = good_course / "notebooks" / "solutions" / f"{STEMS[1]}.ipynb"
    nb = rules.read(path)
    nb.cells[4].source = "print(1)"
    assert rules.enough_checked_cells(nb, path) == ["0 checked cells, 1 are needed"]


def test_a_file_name_has_two_digits_and_words(good_course: Path) -> None:
    path = good_course / "notebooks" / f"{STEMS[1]}.ipynb"
    problems = rules.title_matches_file(rules.read(path), path.with_name("01-Batch.ipynb"))
    assert problems == ["the file name is not two digits and words_in_lower_case"]


def test_every_rule_has_a_planted_defect() -> None:
    every = {*rules.EVERYWHERE, *rules.NUMBERED, *rules.LESSONS}
    assert every == {rule for rule, _, _ in DEFECTS}


def test_ruff_sees_notebooks(good_course: Path, tmp_path: Path) -> None:
    """The Colab cell is clean; an unused import is not."""
    arguments = ("check", "--config", str(ROOT / "pyproject.toml"), "--select", "E,F,I,UP,B")
    cell = new_code_cell(address.colab_cell(good_course))
    for extra, status in ("print(1)", 0), ("import json", 1):
        nbformat.write(new_notebook(cells=[cell, new_code_cell(extra)]), tmp_path / "x.ipynb")
        assert ruff(*arguments, "x.ipynb", folder=tmp_path).returncode == status
    assert ruff("format", "--check", "x.ipynb", folder=tmp_path).returncode == 0


def test_address_writes_what_the_rules_want(good_course: Path, tmp_path: Path) -> None:
    """Another address in pyproject.toml, one run, and nothing else has changed."""
    root = Path(shutil.copytree(good_course, tmp_path / "course"))
    readme = root / "README.md"
    readme.write_text(
        f"{address.badge(STEMS[1], root=root)}\ngit clone {address.repository(root)}\n"
    )
    before = {path: path.read_text() for path in root.glob("**/*.ipynb")}
    assert address.rewrite(root) == []

    (root / "pyproject.toml").write_text(PYPROJECT.replace("someone/a-course", "one/gpu"))
    path = root / "notebooks" / f"{STEMS[1]}.ipynb"
    assert rules.badge_opens_this_file(rules.read(path), path)
    assert sorted(address.rewrite(root)) == sorted([*before, readme])
    assert readme.read_text() == (
        f"{address.badge(STEMS[1], root=root)}\ngit clone https://github.com/one/gpu\n"
    )
    for path, text in before.items():
        assert path.read_text() == text.replace("someone/a-course", "one/gpu").replace(
            "a-course", "gpu"
        )
    assert address.rewrite(root) == []


def test_address_adds_a_missing_badge_and_colab_cell(good_course: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(good_course, tmp_path / "course"))
    path = root / "notebooks" / f"{STEMS[1]}.ipynb"
    nb = rules.read(path)
    nb.cells[0].source = "# 01. Batch size\n\nHow much, and why?"
    del nb.cells[2]
    nbformat.write(nb, path)
    address.rewrite(root)
    nb = rules.read(path)
    assert nb.cells[0].source.endswith("\n\nHow much, and why?")
    assert not rules.badge_opens_this_file(nb, path)
    assert not rules.colab_cell_is_the_generated_one(nb, path)


def test_folds_writes_what_the_rule_wants(good_course: Path, tmp_path: Path) -> None:
    """Whoever folds a cell has it folded on Colab too, by its comment; nothing else moves."""
    root = Path(shutil.copytree(good_course, tmp_path / "course"))
    path = root / "notebooks" / f"{STEMS[1]}.ipynb"
    good = path.read_text()
    folds.main(root)
    assert path.read_text() == good

    nb = rules.read(path)
    nb.cells[C].source = f"{rules.CHECK}\n# What it costs\nprint(43)"
    nb.cells[C].metadata["jupyter"] = {"source_hidden": True}
    nb.cells[19].source = "print(check(answer))"
    nb.cells[19].metadata.pop("cellView")
    nb.cells[22].metadata["jupyter"]["source_hidden"] = False  # unfolded again
    path.write_text(nbformat.v4.writes(nb))
    assert len(rules.folds_say_what_they_show(nb, path)) == 5
    folds.main(root)
    nb = rules.read(path)
    assert rules.folds_say_what_they_show(nb, path) == []
    assert nb.cells[C].source == f"{rules.CHECK}\n# @title What it costs\nprint(43)"
    assert nb.cells[19].source == "# @title Check of exercise 1.1\nprint(check(answer))"
    assert "cellView" not in nb.cells[22].metadata


def test_address_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    with pytest.raises(LookupError, match="Repository"):
        address.repository(tmp_path)
