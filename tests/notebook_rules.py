"""What every stored notebook of the course must keep to.

A rule is a function of a notebook and its path; it returns one sentence per problem.
"""

import ast
import re
import statistics
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import nbformat
from IPython.core.inputtransformer2 import TransformerManager
from nbformat import NotebookNode

from tools.shared import address
from tools.shared.folds import TITLE

Rule = Callable[[NotebookNode, Path], list[str]]

CHECK = "# NBVAL_CHECK_OUTPUT"
WIDGET = "application/vnd.jupyter.widget-view+json"
PICTURES = ("image/png", "image/jpeg", "image/gif", "image/webp")
SECTIONS = (
    "Predict",
    "Measure",
    "Judge",
    "What the guides say",
    "Exercises",
    "In this lesson",
    "References",
)
PAGES = ("measure_your_card",)  # no lesson: a page to work with
CELLS = range(35, 56)  # without the folded checks of the exercises
VERDICTS = 10  # rows of the table of verdicts
WORDS = range(900, 1_801)
CODE_LINES = 25
USUAL_LINES = 8  # half of the code cells have no more
VISIBLE = 120  # lines of a lesson's code that are read without a click
SIZE = 300_000  # bytes
# A path that follows a letter or a slash is part of a web address.
MACHINE_PATH = re.compile(
    r"(?<![\w./:-])/(?:home|root|work|Users)/[^\s'\"]*"
    r"|file:///\S*|/tmp/ipykernel\S*|\b[A-Z]:\\{1,2}\w\S*"
)
TOKEN = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}"
    r"|\bsk-[\w-]{20,}|\bAKIA[0-9A-Z]{16}\b|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
ANSI = re.compile(r"\x1b\[[0-9;]*m")


# What the rules look at.


def read(path: Path) -> NotebookNode:
    """The notebook as it is stored: unlike nbformat.read, nothing is repaired."""
    return nbformat.v4.reads(path.read_text(encoding="utf-8"))


def root_of(path: Path) -> Path:
    return next(folder for folder in path.parents if (folder / "pyproject.toml").exists())


def is_solution(path: Path) -> bool:
    return path.parent.name == "solutions"


def lessons_beside(path: Path) -> list[Path]:
    folder = path.parent.parent if is_solution(path) else path.parent
    return sorted(folder.glob("[0-9][0-9]_*.ipynb"))


def where(nb: NotebookNode, cell: NotebookNode) -> str:
    """The cell as a reader finds it: its number in JupyterLab, or its place, and its first line."""
    first = next((line for line in cell.source.splitlines() if line.strip() and line != CHECK), "")
    place = 1 + next(i for i, other in enumerate(nb.cells) if other is cell)
    return f"cell {place} of {len(nb.cells)} ({first[:60]!r})"


def code(nb: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in nb.cells if cell.cell_type == "code"]


def markdown(nb: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in nb.cells if cell.cell_type == "markdown"]


def checked(nb: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in code(nb) if CHECK in cell.source.splitlines()]


def without_fences(source: str) -> str:
    """Markdown without its fenced code blocks."""
    kept, fence = [], ""
    for line in source.splitlines():
        mark = re.match(r"\s*(```+|~~~+)", line)
        if fence:
            fence = "" if mark and mark[1].startswith(fence) else fence
        elif mark:
            fence = mark[1]
        else:
            kept.append(line)
    return "\n".join(kept)


def prose(source: str) -> str:
    """Markdown without any code."""
    return re.sub(r"`[^`\n]*`", "", without_fences(source))


def headings(nb: NotebookNode) -> list[tuple[int, str, int]]:
    """Level, text and cell index of each heading."""
    return [
        (len(marks), text, index)
        for index, cell in enumerate(nb.cells)
        if cell.cell_type == "markdown"
        for marks, text in re.findall(r"^(#+) *(.*?)\s*$", without_fences(cell.source), re.M)
    ]


def texts(output: NotebookNode) -> Iterator[tuple[str, str]]:
    """MIME type or stream name, and text, of all that an output holds except pictures."""
    if output.output_type == "stream":
        yield output.name, output.text
    elif output.output_type == "error":
        yield "error", "\n".join([output.ename, output.evalue, *output.traceback])
    else:
        yield from ((m, str(value)) for m, value in output.data.items() if m not in PICTURES)


def links(source: str) -> list[str]:
    """Targets of links and images that are neither web addresses nor places in the same page."""
    targets = re.findall(r"\]\(<?([^)\s>]+)", source)
    targets += re.findall(r"<(?:a|img)\b[^>]*\b(?:href|src)\s*=\s*[\"']([^\"']+)", source)
    return [t for t in targets if not re.match(r"[a-z][a-z0-9+.-]*:|#", t, re.IGNORECASE)]


def is_check(cell: NotebookNode) -> bool:
    """The folded cell that checks the answer in the cell before it."""
    return bool(re.fullmatch(r"check-\d", cell.get("id") or ""))


def is_closed(cell: NotebookNode) -> bool:
    """Whether the source stays hidden until a click, in JupyterLab."""
    return cell.metadata.get("jupyter", {}).get("source_hidden") is True


def is_folded(cell: NotebookNode) -> bool:
    """Whether an output stays hidden until a click, in JupyterLab and in Colab."""
    jupyter = cell.metadata.get("jupyter", {})
    return jupyter.get("outputs_hidden") is True and cell.metadata.get("collapsed") is True


def exercises(nb: NotebookNode) -> list[str]:
    return [text for _, text, _ in headings(nb) if text.lower().startswith("exercise ")]


# Rules for every notebook.


def valid_format(nb: NotebookNode, path: Path) -> list[str]:
    """Each cell has an id of its own, and the file keeps to the notebook format."""
    problems = []
    ids = [cell.get("id") for cell in nb.cells]
    if None in ids:
        problems.append("some cells have no id: the file is older than notebook format 4.5")
    problems += [
        f"two cells have the id {i!r}" for i in sorted({i for i in ids if ids.count(i) > 1 and i})
    ]
    if not problems:
        try:
            nbformat.validate(nb)
        except nbformat.ValidationError as error:
            problems.append(f"not a valid notebook: {str(error).splitlines()[0]}")
    return problems


def run_in_order(nb: NotebookNode, path: Path) -> list[str]:
    """A missing count also switches nbval's comparison off, without a word."""
    problems = []
    for number, cell in enumerate(code(nb), start=1):
        if cell.execution_count != number:
            problems.append(
                f"{where(nb, cell)} is code cell {number} but has count {cell.execution_count}: "
                "run all cells once, in order, in a fresh kernel"
            )
        elif any(o.get("execution_count", number) != number for o in cell.outputs):
            problems.append(f"{where(nb, cell)} shows a result of another run")
    return problems


def enough_checked_cells(nb: NotebookNode, path: Path) -> list[str]:
    wanted, found = 1 if is_solution(path) else 3, len(checked(nb))
    return [f"{found} checked cells, {wanted} are needed"] if found < wanted else []


def checked_cells_can_fail(nb: NotebookNode, path: Path) -> list[str]:
    """There is a stored text to compare with; pictures are not compared."""
    problems = []
    for cell in checked(nb):
        stored = [
            text
            for output in cell.outputs
            for _, text in texts(output)
            if not text.startswith("<Figure size") and text.strip()
        ]
        if not stored:
            problems.append(f"{where(nb, cell)} is checked but stores no text to compare")
    return problems


def checked_cells_are_stable(nb: NotebookNode, path: Path) -> list[str]:
    """Nothing in a checked cell that never prints the same twice."""
    unstable = {
        r";\s*\Z": "ends with ';', which nbval does not honour",
        r"(?<!plt)(?<!pyplot)\.style\b|\bStyler\b": "uses a pandas Styler, whose ids are random",
        r"\btqdm\b": "uses tqdm, whose updates are never the same",
        r"\.train\(": "trains, which prints a table of its own",
        r"^\s*%{1,2}(time|timeit)\b": "prints a time",
    }
    problems = [
        f"{where(nb, cell)} is checked and {reason}"
        for cell in checked(nb)
        for pattern, reason in unstable.items()
        if re.search(pattern, cell.source, re.MULTILINE if "^" in pattern else 0)
    ]
    for cell in checked(nb):
        shown = "\n".join(text for output in cell.outputs for _, text in texts(output))
        if re.search(r"<progress\b|#T_[0-9a-f]{5}", shown):
            problems.append(f"{where(nb, cell)} is checked and shows a progress bar or a Styler")
    return problems


def markers_are_exact(nb: NotebookNode, path: Path) -> list[str]:
    """nbval overlooks a marker with anything beside it, and readers overlook tags."""
    problems = []
    for cell in code(nb):
        for line in cell.source.splitlines():
            if line != CHECK and re.search(r"nbval|#.*check[ _-]?output", line, re.IGNORECASE):
                problems.append(f"{where(nb, cell)} has {line.strip()!r}: write {CHECK!r} alone")
        if cell.source.splitlines().count(CHECK) > 1:
            problems.append(f"{where(nb, cell)} has the marker twice")
        tags = [tag for tag in cell.metadata.get("tags", []) if "nbval" in tag.lower()]
        problems += [f"{where(nb, cell)} has the tag {tag!r}: use {CHECK!r}" for tag in tags]
    return problems


def no_stderr(nb: NotebookNode, path: Path) -> list[str]:
    return [
        f"{where(nb, cell)} stores a warning or another message on stderr"
        for cell in code(nb)
        if any(output.get("name") == "stderr" for output in cell.outputs)
    ]


def no_log_lines(nb: NotebookNode, path: Path) -> list[str]:
    """Some libraries log on stdout: DeepSpeed, once it is installed."""
    return [
        f"{where(nb, cell)} stores a line of a library's log"
        for cell in code(nb)
        for output in cell.outputs
        if re.search(r"\[(INFO|WARNING|ERROR)\]", "".join(output.get("text", "")))
    ]


def no_errors(nb: NotebookNode, path: Path) -> list[str]:
    return [
        f"{where(nb, cell)} stores an error; tag it raises-exception if that is its lesson"
        for cell in code(nb)
        if any(output.output_type == "error" for output in cell.outputs)
        and "raises-exception" not in cell.metadata.get("tags", [])
    ]


def no_widgets(nb: NotebookNode, path: Path) -> list[str]:
    problems, mend = [], f"save it from make lab, or make outputs LESSONS={path.name[:2]}"
    if "widgets" in nb.metadata:
        problems.append(f"widget state is stored, so GitHub shows no page: {mend}")
    for cell in code(nb):
        if any(WIDGET in output.get("data", {}) for output in cell.outputs):
            problems.append(f"{where(nb, cell)} stores a widget, which GitHub cannot show: {mend}")
    return problems


def images_have_alt_text(nb: NotebookNode, path: Path) -> list[str]:
    problems = []
    shown = [(cell, without_fences(cell.source)) for cell in markdown(nb)]
    for cell in code(nb):
        for output in cell.outputs:
            data = output.get("data", {})
            shown.append((cell, data.get("text/html", "")))
            shown.append((cell, data.get("text/markdown", "")))
            for kind in PICTURES:
                alt = str(output.get("metadata", {}).get(kind, {}).get("alt", ""))
                if kind in data and not alt.strip():
                    problems.append(f"{where(nb, cell)} stores a picture without alternative text")
    for cell, text in shown:
        if re.search(r"!\[\s*\]", text):
            problems.append(f"{where(nb, cell)} has an image without alternative text")
        for tag in re.findall(r"<img\b[^>]*>", text, re.IGNORECASE):
            if not re.search(r"\balt\s*=\s*(\"[^\"]*\S[^\"]*\"|'[^']*\S[^']*')", tag, re.I):
                problems.append(f"{where(nb, cell)} has an <img> without alternative text")
    return problems


def alt_text_states_a_finding(nb: NotebookNode, path: Path) -> list[str]:
    """A sentence of some words about what is seen, not the kind of the picture."""
    kind = r"(an? |the )?(\w+ )?(plot|figure|chart|graph|picture|image|diagram|histogram)s?\b"
    problems = []
    for cell in code(nb):
        for output in cell.outputs:
            alt = str(output.get("metadata", {}).get("image/png", {}).get("alt", "")).strip()
            if alt and (re.match(kind, alt, re.IGNORECASE) or len(alt.split()) < 5):
                problems.append(f"{where(nb, cell)} has {alt[:40]!r}: state what the picture shows")
    return problems


def texts_of_pictures_are_readable(nb: NotebookNode, path: Path) -> list[str]:
    sizes = r"(?:fontsize|labelsize|font\.size|titlesize)\W{1,4}(\d+(?:\.\d+)?|'?x+-small'?)"
    return [
        f"{where(nb, cell)} draws a text of {size} points, 8 are the least"
        for cell in code(nb)
        for size in re.findall(sizes, cell.source)
        if not size[0].isdigit() or float(size) < 8
    ]


def links_say_where_they_lead(nb: NotebookNode, path: Path) -> list[str]:
    """Whoever hears only the links of a page must be able to choose one."""
    empty = {"", "here", "click here", "link", "this", "this link", "this page", "more", "see"}
    problems = []
    for cell in markdown(nb):
        named = without_fences(cell.source).replace("`", "")  # `code` can be a name
        for text in re.findall(r"(?<!!)\[([^\[\]]*)\]\([^)]+\)", named):
            if text.strip(" .,*_").lower() in empty or re.match(r"(https?:|www\.)", text):
                problems.append(f"{where(nb, cell)} has a link named {text!r}: say where it leads")
        bare = re.findall(r"(?<![\w(<\"'])https?://\S+|<https?:[^>]+>", prose(cell.source))
        problems += [
            f"{where(nb, cell)} shows the address {found[:40]}: name the link" for found in bare
        ]
    return problems


def no_svg_or_attachments(nb: NotebookNode, path: Path) -> list[str]:
    """SVG is compared and never the same; attachments vanish in many viewers."""
    problems = []
    for cell in nb.cells:
        stored = "".join(t for output in cell.get("outputs", []) for _, t in texts(output))
        kinds = [kind for output in cell.get("outputs", []) for kind in output.get("data", {})]
        if "image/svg+xml" in kinds or "<svg" in stored or "<svg" in cell.source:
            problems.append(f"{where(nb, cell)} has an SVG picture: use PNG")
        if cell.get("attachments"):
            problems.append(f"{where(nb, cell)} has an attachment: draw the picture in a cell")
    return problems


def title_matches_file(nb: NotebookNode, path: Path) -> list[str]:
    problems = []
    if not re.fullmatch(r"\d\d_[a-z0-9]+(_[a-z0-9]+)*", path.stem):
        problems.append("the file name is not two digits and words_in_lower_case")
    titles = [(text, index) for level, text, index in headings(nb) if level == 1]
    if len(titles) != 1:
        problems.append(f"{len(titles)} headings of the first level instead of one")
    if not nb.cells or not re.match(rf"# {path.stem[:2]}\. \S", nb.cells[0].source):
        problems.append(f"the first line is not '# {path.stem[:2]}. Title'")
    return problems


def badge_opens_this_file(nb: NotebookNode, path: Path) -> list[str]:
    wanted = address.badge(path.stem, is_solution(path), root_of(path))
    found = "\n".join(cell.source for cell in markdown(nb)).count("colab-badge.svg")
    if nb.cells and wanted in nb.cells[0].source and found == 1:
        return []
    return ["the first cell has not exactly the badge of this file: run make outputs"]


def colab_cell_is_the_generated_one(nb: NotebookNode, path: Path) -> list[str]:
    wanted = address.colab_cell(root_of(path))
    problems = []
    if not code(nb) or code(nb)[0].source != wanted:
        problems.append("the first code cell is not the Colab cell: run make outputs")
    for cell in code(nb)[1:]:
        if "google.colab" in cell.source or "git clone" in cell.source:
            problems.append(f"{where(nb, cell)} is a second Colab cell")
    return problems


def metadata_is_standard(nb: NotebookNode, path: Path) -> list[str]:
    found = {
        "accelerator GPU": nb.metadata.get("accelerator") == "GPU",
        "colab gpuType T4": nb.metadata.get("colab", {}).get("gpuType") == "T4",
        "kernelspec python3": nb.metadata.get("kernelspec", {}).get("name") == "python3",
        "no language version": "version" not in nb.metadata.get("language_info", {}),
        "no cell timestamps": not any("execution" in cell.metadata for cell in nb.cells),
    }
    return [
        f"the metadata should have {what}: run make outputs" for what, ok in found.items() if not ok
    ]


def heading_levels_never_skip(nb: NotebookNode, path: Path) -> list[str]:
    problems, last = [], 0
    for level, text, index in headings(nb):
        if not text:
            problems.append(f"{where(nb, nb.cells[index])} has a heading without text")
        if level > last + 1:
            problems.append(f"heading {text!r} is of level {level} below one of level {last}")
        last = level
    return problems


def code_cells_are_short(nb: NotebookNode, path: Path) -> list[str]:
    problems = []
    for cell in code(nb):
        lines = len(cell.source.splitlines())
        if not cell.source.strip():
            problems.append(f"{where(nb, cell)} is an empty code cell")
        if lines > CODE_LINES:
            problems.append(f"{where(nb, cell)} has {lines} lines, {CODE_LINES} are the most")
    return problems


def code_parses(nb: NotebookNode, path: Path) -> list[str]:
    """IPython's own translation turns % and ! lines into Python first."""
    problems = []
    for cell in code(nb):
        try:
            ast.parse(TransformerManager().transform_cell(cell.source))
        except SyntaxError as error:
            problems.append(f"{where(nb, cell)} is not Python: {error.msg}")
    return problems


def helpers_come_first(nb: NotebookNode, path: Path) -> list[str]:
    """Some libraries warn when they are imported, in red, and are quiet after helpers."""
    noisy = {"accelerate", "bitsandbytes", "peft", "torchao", "transformers"}
    lines = (line.split() for cell in code(nb) for line in cell.source.splitlines())
    for line in lines:
        if line[:1] in (["from"], ["import"]):
            library = line[1].split(".")[0]
            if library == "helpers":
                break
            if library in noisy:
                return [f"{library} is imported before helpers"]
    return []


def file_is_small(nb: NotebookNode, path: Path) -> list[str]:
    size = path.stat().st_size
    return [f"the file has {size:,} bytes, {SIZE:,} are the most"] if size >= SIZE else []


def relative_links_exist(nb: NotebookNode, path: Path) -> list[str]:
    return [
        f"{where(nb, cell)} links to {target}, which does not exist"
        for cell in markdown(nb)
        for target in links(prose(cell.source))
        if not (path.parent / unquote(target.split("#")[0])).exists()
    ]


def nothing_private(nb: NotebookNode, path: Path) -> list[str]:
    """No path of anyone's machine and nothing like an access token, in sources or outputs."""
    problems = []
    for cell in nb.cells:
        parts = [text for output in cell.get("outputs", []) for _, text in texts(output)]
        for text in [cell.source, *parts]:
            text = ANSI.sub("", text)
            if found := MACHINE_PATH.search(text):
                problems.append(f"{where(nb, cell)} shows a path of one machine: {found[0]}")
            if found := TOKEN.search(text):
                problems.append(f"{where(nb, cell)} holds an access token: {found[0][:6]}...")
    return problems


# Rules for lessons.


def lessons_are_contiguous(nb: NotebookNode, path: Path) -> list[str]:
    place = lessons_beside(path).index(path)
    if int(path.name[:2]) == place:
        return []
    return [f"this is lesson {place:02} by its place: a number is missing or used twice"]


def sections_in_order(nb: NotebookNode, path: Path) -> list[str]:
    titles = [text for level, text, _ in headings(nb) if level == 2]
    problems, last = [], -1
    for section in SECTIONS:
        places = [place for place, title in enumerate(titles) if title == section]
        later = [place for place in places if place > last]
        if later:
            last = later[0]
        else:
            fault = "comes too early" if places else "is missing"
            problems.append(f"the section '## {section}' {fault}")
    return problems


def says_what_it_needs(nb: NotebookNode, path: Path) -> list[str]:
    opening = "\n".join(cell.source for cell in nb.cells[:3] if cell.cell_type == "markdown")
    return [
        f"'{words}' is not in the first three cells"
        for words in ("You will", "You need")
        if words not in opening
    ]


def last_cell_links_the_neighbours(nb: NotebookNode, path: Path) -> list[str]:
    lessons = lessons_beside(path)
    place = lessons.index(path)
    before = [lessons[place - 1].name] if place else []
    wanted = [*before, "../README.md", *(lesson.name for lesson in lessons[place + 1 : place + 2])]
    found = [target.split("#")[0] for target in links(prose(nb.cells[-1].source))]
    found = [target for target in found if target.endswith((".ipynb", "README.md"))]
    if found == wanted:
        return []
    return [f"the last cell should link {', '.join(wanted)} and links {', '.join(found) or 'none'}"]


def length_is_right(nb: NotebookNode, path: Path) -> list[str]:
    """Words that are read: no code, no link targets."""
    text = "\n".join(prose(cell.source) for cell in markdown(nb))
    text = re.sub(r"\]\([^)]*\)", "]", text)
    words = sum(1 for word in text.split() if re.search(r"[^\W_]", word))
    problems = []
    cells = sum(not is_check(cell) for cell in nb.cells)
    for count, limits, what in ((cells, CELLS, "cells"), (words, WORDS, "words")):
        if count not in limits:
            problems.append(f"{count} {what}, a lesson has {limits.start} to {limits.stop - 1}")
    return problems


def code_is_light(nb: NotebookNode, path: Path) -> list[str]:
    """The median of the code cells, in lines that are read: not the Colab cell, nothing folded."""
    lines = [
        sum(1 for line in cell.source.splitlines() if line.strip() not in ("", CHECK))
        for cell in code(nb)[1:]
        if not re.match(r"(answer|check)-\d", cell.get("id") or "") and not is_closed(cell)
    ]
    usual = statistics.median(lines or [0])
    if usual <= USUAL_LINES:
        return []
    return [f"half of the code cells have more than {USUAL_LINES} lines: the median is {usual:g}"]


def shows_the_code_it_teaches(nb: NotebookNode, path: Path) -> list[str]:
    """The lines that are read without a click; tables, plots and recorded rows are folded."""
    lines = sum(
        1
        for cell in code(nb)
        if not is_closed(cell)
        for line in cell.source.splitlines()
        if line.strip()
    )
    return [f"{lines} lines of code are visible, {VISIBLE} are the most"] * (lines > VISIBLE)


def folds_say_what_they_show(nb: NotebookNode, path: Path) -> list[str]:
    """A folded cell is folded on Colab too, and its first line is a title; tools/site.py folds it
    on the site."""
    problems, mend = [], "run python -m tools.shared.folds"
    for cell in code(nb):
        first = next((line for line in cell.source.splitlines() if line != CHECK), "")
        if is_closed(cell) and not re.match(rf"{re.escape(TITLE)}\S+ \S", first):
            problems.append(f"{where(nb, cell)} is folded and has no title of some words: {mend}")
        if is_closed(cell) != (cell.metadata.get("cellView") == "form"):
            problems.append(f"{where(nb, cell)} is not folded alike on Colab: {mend}")
    return problems


def guesses_are_folded(nb: NotebookNode, path: Path) -> list[str]:
    """Below a question in bold, "guess", the stored outputs stay hidden up to the next text."""
    problems, asked, guesses = [], False, 0
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            asked = bool(re.search(r"\*\*[^*]*\bguess\b[^*]*\*\*", cell.source))
            guesses += asked
        elif cell.cell_type == "code" and asked != is_folded(cell):
            state = "shows the answer to a guess" if asked else "hides an output without a guess"
            problems.append(f"{where(nb, cell)} {state}")
    return problems if guesses else ["no question asks the reader to guess before a cell is run"]


REVEAL = "<details>\n<summary>After you have run it</summary>\n\n"
DRAWN = ("figure", "bars", "timeline")  # of helpers.show; their second argument is the text


def answers_to_guesses_are_folded(nb: NotebookNode, path: Path) -> list[str]:
    """The next visible thing after a question is never its answer: it waits for a click."""
    problems = []
    for cell, after in zip(nb.cells, nb.cells[1:], strict=False):
        if cell.cell_type == "code" and is_folded(cell) and after.cell_type == "markdown":
            folded = after.source.startswith(REVEAL) and "\n\n</details>" in after.source
            if not folded and not after.source.startswith("#"):
                problems.append(f"{where(nb, after)} answers a guess and is not folded")
    return problems


def pictures_keep_the_answer(nb: NotebookNode, path: Path) -> list[str]:
    """Below a guess the alternative text of a figure is a row of data/alt.csv."""
    problems = []
    for cell in filter(is_folded, code(nb)):
        for call in ast.walk(ast.parse(TransformerManager().transform_cell(cell.source))):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            if ast.unparse(call.func) not in [f"show.{name}" for name in DRAWN]:
                continue
            texts = [*call.args[1:2], *(k.value for k in call.keywords if k.arg == "alt")]
            if not all(ast.unparse(text).startswith("show.words(") for text in texts):
                problems.append(f"{where(nb, cell)} tells the answer in its alternative text")
    return problems


def intro_ends_with_the_question(nb: NotebookNode, path: Path) -> list[str]:
    """What a lesson asks, it answers further down."""
    asks = nb.cells[0].source.rstrip().endswith("?")
    return [] if asks else ["the first cell does not end with the lesson's question"]


def answers_come_first(nb: NotebookNode, path: Path) -> list[str]:
    """Each exercise is a cell for the answer, and directly below it the folded check."""
    problems = []
    for n in range(1, len(exercises(nb)) + 1):
        places = [i for i, cell in enumerate(nb.cells) if cell.get("id") == f"answer-{n}"]
        if not places:
            problems.append(f"exercise {n} has no cell answer-{n}")
            continue
        answer, check = nb.cells[places[0]], nb.cells[places[0] + 1]
        if not re.search(r"(?<!\.)\.\.\.(?!\.)", answer.source):
            problems.append(f"{where(nb, answer)} has no ... to replace")
        if check.get("id") != f"check-{n}":
            problems.append(f"check-{n} does not stand directly below answer-{n}")
        elif not is_closed(check):
            problems.append(f"{where(nb, check)} is a check and not folded")
    return problems


@cache
def anchors(path: Path) -> list[str]:
    """The headings of a stored notebook as the ends of links."""
    return [text.replace(" ", "-") for _, text, _ in headings(read(path))]


def links_go_to_unique_headings(nb: NotebookNode, path: Path) -> list[str]:
    """JupyterLab goes to the first heading of that name in any lesson that is open."""
    lessons = lessons_beside(path)
    others = [anchor for lesson in lessons if lesson != path for anchor in anchors(lesson)]
    known = others + [text.replace(" ", "-") for _, text, _ in headings(nb)]
    problems = []
    for cell in markdown(nb):
        for target in re.findall(r"\]\([^)#\s]*#([^)\s]+)\)", without_fences(cell.source)):
            count = known.count(unquote(target))
            if count != 1 and not re.search(rf"\]\(https?:[^)]*#{re.escape(target)}", cell.source):
                found = f"{count} headings" if count else "no heading"
                problems.append(f"{where(nb, cell)} links to #{target}, and {found} of that name")
    return problems


def verdicts_are_readable(nb: NotebookNode, path: Path) -> list[str]:
    """The guide's sentence comes first, its number last, and there are not too many."""
    places = [index for _, text, index in headings(nb) if text == "What the guides say"]
    tables = [cell for cell in nb.cells[places[0] :] if "| verdict |" in cell.source]
    if not tables:
        return ["no table with a column 'verdict' below 'What the guides say'"]
    head, _, *rows = [row for row in tables[0].source.splitlines() if row.startswith("|")]
    problems = []
    if head != "| what the guide says | verdict | guide |":
        problems.append("the verdicts' columns are not: what the guide says, verdict, guide")
    for row in rows:
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
        if not re.search(r"\bS\d-\d+", cells[-1]) or re.search(r"\bS\d-\d+", cells[0]):
            problems.append(f"the verdict {cells[0][:40]!r} has no guide's number at its end")
    if len(rows) > VERDICTS:
        problems.append(f"{len(rows)} verdicts, {VERDICTS} are the most")
    return problems


def exercises_have_solutions(nb: NotebookNode, path: Path) -> list[str]:
    """Two or three, with the same headings in the solutions."""
    problems = []
    number, found = int(path.name[:2]), exercises(nb)
    wanted = [f"Exercise {number}.{n}:" for n in range(1, len(found) + 1)]
    if len(found) not in (2, 3):
        problems.append(f"{len(found)} exercises, a lesson has two or three")
    for text, start in zip(found, wanted, strict=True):
        if not re.match(re.escape(start) + r" \S", text):
            problems.append(f"the heading {text!r} should read '{start} title'")
    for level, text, _ in headings(nb):
        if text.lower().startswith("exercise ") and level != 3:
            problems.append(f"the heading {text!r} should be of level 3")
    solutions = path.parent / "solutions" / path.name
    if not solutions.exists():
        problems.append(f"solutions/{path.name} does not exist")
    elif exercises(read(solutions)) != found:
        problems.append(f"the exercise headings in solutions/{path.name} are not the same")
    if f"solutions/{path.name}" not in [t for cell in markdown(nb) for t in links(cell.source)]:
        problems.append(f"no link to solutions/{path.name}")
    return problems


# Rules for solutions.


def belongs_to_a_lesson(nb: NotebookNode, path: Path) -> list[str]:
    lesson = path.parent.parent / path.name
    return [] if lesson.exists() else [f"there is no lesson {path.name}"]


EVERYWHERE: tuple[Rule, ...] = (
    valid_format,
    run_in_order,
    checked_cells_can_fail,
    checked_cells_are_stable,
    markers_are_exact,
    no_stderr,
    no_log_lines,
    no_errors,
    no_widgets,
    images_have_alt_text,
    alt_text_states_a_finding,
    texts_of_pictures_are_readable,
    links_say_where_they_lead,
    no_svg_or_attachments,
    badge_opens_this_file,
    colab_cell_is_the_generated_one,
    metadata_is_standard,
    folds_say_what_they_show,
    heading_levels_never_skip,
    code_cells_are_short,
    code_parses,
    helpers_come_first,
    file_is_small,
    relative_links_exist,
    nothing_private,
)
NUMBERED: tuple[Rule, ...] = (enough_checked_cells, title_matches_file)
LESSONS: tuple[Rule, ...] = (
    lessons_are_contiguous,
    sections_in_order,
    says_what_it_needs,
    last_cell_links_the_neighbours,
    length_is_right,
    code_is_light,
    shows_the_code_it_teaches,
    guesses_are_folded,
    answers_to_guesses_are_folded,
    pictures_keep_the_answer,
    intro_ends_with_the_question,
    answers_come_first,
    links_go_to_unique_headings,
    verdicts_are_readable,
    exercises_have_solutions,
)
SOLUTIONS: tuple[Rule, ...] = (belongs_to_a_lesson,)


def rules_for(path: Path) -> tuple[Rule, ...]:
    if path.stem in PAGES:
        return EVERYWHERE
    return EVERYWHERE + NUMBERED + (SOLUTIONS if is_solution(path) else LESSONS)
