"""Build the reading site: every lesson with its stored outputs, to be read without installing.

Sphinx with MyST-NB and its book theme, because they build without a network (MyST's own site
builder fetches its theme at each first build). Pages show the last commit: what a reader ran or
wrote since stays out. The lessons are laid out anew in build/site-source:
the cell for Colab is left out, what is folded in JupyterLab is folded, links lead to pages of the
site or to files of the repository, badges are links of our own. At the end each page is read over:
links inside the site, headings, alternative texts, the button for Colab, and that a browser fetches
nothing from elsewhere.

Writes: build/site/, build/site-source/
"""

import importlib.util
import io
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urldefrag

import nbformat
import pandas as pd

from tools import ROOT
from tools.shared import address, committed, fit_page
from tools.shared.reading import faults

SOURCE, SITE = ROOT / "build" / "site-source", ROOT / "build" / "site"
LINK = re.compile(r"\]\(([^)\s]+)\)")  # of Markdown
HREF = re.compile(r'href="([^"]+)"')  # of a table that a cell shows
BADGE = re.compile(r"\[!\[Open in Colab\]\([^)]*\)\]\(([^)]+)\)")
PACKAGES = ("sphinx", "myst_nb", "sphinx_book_theme", "sphinx_copybutton")
FOLD = re.compile(r"^# @title (.+)\n", re.MULTILINE)  # what a folded cell shows
CELL = re.compile(r"(\d\d)_\w+\.ipynb#cell-id=([\w-]+)")
PARTS = {
    "The baseline": range(0, 3),
    "One switch at a time": range(3, 12),
    "Smaller training": range(12, 15),
    "Put together": range(15, 18),
    "Beyond": range(18, 100),
}


def with_links(text: str, page: Path) -> str:
    """Markdown with the links of the site; a badge, which others would serve, is one of them."""
    text = LINK.sub(lambda m: f"]({translate(m[1], page)})", text)
    return BADGE.sub(r"[Open in Colab](\1){.colab}", text)


def label(lesson: str, cell: str) -> str:
    """The name of a cell that a link leads to."""
    return f"cell-{lesson[:2]}-{cell}".lower()


def translate(link: str, page: Path) -> str:
    """A link of a file of the course, as it is written on the site."""
    path, anchor = urldefrag(link)
    slug = re.sub(r"[^\w\- ]", "", unquote(anchor).lower()).replace(" ", "-")
    if re.match(r"[a-z]+:", link):
        return link
    if not path:
        return f"#{slug}"
    target = (page.parent / unquote(path)).resolve().relative_to(ROOT)
    if target == Path("README.md"):
        return ("../" * (len(page.relative_to(ROOT).parts) - 1)) + "index.md"
    if target.suffix == ".ipynb":
        if anchor.startswith("cell-id="):
            return f"#{label(target.stem, anchor.removeprefix('cell-id='))}"
        return path + (f"#{slug}" if slug else "")
    if target.parts[0] == "docs":
        return ("../" * (len(page.relative_to(ROOT).parts) - 1)) + target.as_posix()
    return f"{address.repository()}/blob/main/{target.as_posix()}"


def text_of(path: Path) -> str:
    """A file as it is committed."""
    return committed.text(ROOT, path.relative_to(ROOT))


def notebooks() -> list[Path]:
    found = [ROOT / path for path in committed.files(ROOT) if path.suffix == ".ipynb"]
    return sorted(path for path in found if path.relative_to(ROOT).parts[0] == "notebooks")


def documents() -> list[Path]:
    return sorted(ROOT / path for path in committed.files(ROOT) if path.match("docs/*.md"))


def linked_cells() -> set[str]:
    """The labels of cells that some page links to."""
    texts = map(text_of, [*notebooks(), *documents()])
    return {label(*found) for text in texts for found in CELL.findall(text)}


def in_page(link: str, page: Path) -> str:
    """A link of an output, which Sphinx takes as it is."""
    if found := CELL.search(link):
        return link.split(".ipynb")[0] + f".html#{label(*found.groups())}"
    return translate(link, page).replace(".ipynb", ".html")


def lay_out(path: Path, linked: set[str]) -> None:
    """One lesson as the site shows it."""
    notebook, cells = nbformat.reads(text_of(path), as_version=4), []
    for cell in notebook.cells:
        name = label(path.stem, cell.id)
        if name in linked:
            cells.append(nbformat.v4.new_markdown_cell(f"({name})="))
        if cell.cell_type == "markdown":
            cell.source = with_links(cell.source, path)
            cells.append(cell)
            continue
        if cell.source.startswith(address.COLAB_COMMENT):
            continue
        folded = cell.metadata.get("jupyter", {})
        tags = ["hide-output"] * bool(folded.get("outputs_hidden"))
        tags += ["hide-input"] * bool(folded.get("source_hidden"))
        told = [output.get("metadata", {}).get("image/png", {}) for output in cell.outputs]
        alts = [facts["alt"] for facts in told if "alt" in facts]
        for output in cell.outputs:
            data = output.get("data", {})
            if "text/html" in data:
                found = "".join(data["text/html"])
                data["text/html"] = HREF.sub(lambda m: f'href="{in_page(m[1], path)}"', found)
            if "text/markdown" in data:
                found = "".join(data["text/markdown"])
                data["text/markdown"] = LINK.sub(lambda m: f"]({in_page(m[1], path)})", found)
        facts = {"image": {"alt": alts[0]}} if alts else {}
        if folded.get("source_hidden") and (shows := FOLD.search(cell.source)):
            facts["code_prompt_show"] = f"Show the {{type}}: {shows[1]}"
        cell.metadata = {"tags": tags, "mystnb": facts}
        cells.append(cell)
    notebook.cells = cells
    target = SOURCE / path.relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, target)


def board() -> str:
    """The scoreboard of lesson 16, as tables."""
    table = pd.read_csv(io.StringIO(text_of(ROOT / "data" / "board.csv")), dtype=str)
    columns = ["method", "claimed", "judged", "predicted", "recorded"]
    numbered = {path.stem[:2]: path.stem for path in notebooks() if path.parent.name == "notebooks"}
    lines = []
    for question, title in {"speed": "Faster: above 1", "memory": "Lighter: below 1"}.items():
        lines += [f"### {title}", "", "| " + " | ".join(columns) + " |", "|---" * 5 + "|"]
        rows = table.loc[table["question"] == question, columns].itertuples(index=False)
        lines += ["| " + " | ".join(row) + " |" for row in rows] + [""]
    linked = (lambda m: f"[lesson {m[1]}](notebooks/{numbered[m[1]]}.ipynb)", "\n".join(lines))
    return re.sub(r"lesson (\d\d)", *linked)


def front_page() -> str:
    """The README with the scoreboard, and the course's contents at its end."""
    page = ROOT / "README.md"
    text = with_links(text_of(page), page)
    text = re.sub(rf"(!\[[^]]*\]\(){address.repository()}/blob/main/data/", r"\1", text)
    board_text = "## What the guides claim, judged\n\nA table in the guides says of ten methods "
    board_text += "whether each trains faster, and whether it needs less memory. Here is every "
    board_text += "answer with our verdict, and the factor that was predicted and that others "
    board_text += "measured. [Lesson 16](notebooks/16_all_together.ipynb) tells how.\n\n" + board()
    before, after = text.split("\n## Predict your own run\n")
    text = f"{before}\n{board_text}\n## Predict your own run\n{after}"
    trees = []
    names = [p.stem for p in notebooks() if p.parent.name == "notebooks"]
    for part, numbers in PARTS.items():
        lessons = [f"notebooks/{n}" for n in names if n[:2].isdigit() and int(n[:2]) in numbers]
        trees.append(tree(part, lessons))
    more = [f"notebooks/{name}" for name in names if not name[:2].isdigit()]
    more += [f"docs/{path.stem}" for path in documents()]
    trees.append(tree("Use it", more))
    solved = [f"notebooks/solutions/{p.stem}" for p in notebooks() if p.parent.name == "solutions"]
    trees.append(tree("Worked solutions", solved))
    return "\n\n".join([text, *trees]) + "\n"


def tree(caption: str, files: list[str]) -> str:
    """A part of the contents."""
    options = f":caption: {caption}\n:hidden:\n:maxdepth: 1\n"
    return "```{toctree}\n" + options + "\n" + "\n".join(files) + "\n```" if files else ""


def lay_out_all() -> None:
    """All pages of the site, as Sphinx reads them; what a page fetches goes into the site."""
    for folder in (SOURCE, SITE):
        shutil.rmtree(folder, ignore_errors=True)
    linked = linked_cells()
    for path in notebooks():
        lay_out(path, linked)
    atlas = fit_page.contents()
    fit_page.write(atlas, SITE / "_static" / "atlas")
    for path in documents():
        text = with_links(text_of(path), path)
        if path.stem == fit_page.NAME:
            text = fit_page.filled(text, atlas)
        (SOURCE / "docs").mkdir(exist_ok=True)
        (SOURCE / "docs" / path.name).write_text(text, encoding="utf-8")
    page = front_page()
    (SOURCE / "index.md").write_text(page, encoding="utf-8")
    for name in re.findall(r"!\[[^]]*\]\((\w+\.png)\)", page):
        (SOURCE / name).write_bytes(committed.content(ROOT, Path("data", name)))


# What Sphinx leaves out of an excerpt, and what this theme puts above an article. Then how Sphinx
# takes a page's text, whose blank lines would fill an excerpt.
SEARCH = {
    '[".headerlink", "script", "style"]': '[".headerlink", "script", "style", '
    '".bd-header-article", "#jb-print-docs-body", ".colab"]',
    "return docContent.textContent;": 'return docContent.textContent.replace(/\\s+/g, " ");',
}


def search_articles_only(script: Path) -> None:
    """An excerpt is of the text, and not of the theme's buttons above it.

    Raises:
        LookupError: this Sphinx searches otherwise.
    """
    text = script.read_text(encoding="utf-8")
    for theirs, ours in SEARCH.items():
        if theirs not in text:
            raise LookupError(f"{script.name} has changed: {theirs} is not in it")
        text = text.replace(theirs, ours)
    script.write_text(text, encoding="utf-8")


def main() -> int:
    if not all(map(importlib.util.find_spec, PACKAGES)):
        print("The site needs Sphinx: python -m pip install -e '.[site]'", file=sys.stderr)
        return 2
    try:
        if own := committed.changed(ROOT, "notebooks"):
            print(f"As committed, so without your changes in {', '.join(own)}")
        lay_out_all()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"build cannot be written, {error.strerror}: {error.filename}", file=sys.stderr)
        return 2
    command = [sys.executable, "-m", "sphinx", "-q", "-n", "-j", "auto", "-c", "docs"]
    if status := subprocess.run([*command, str(SOURCE), str(SITE)], cwd=ROOT).returncode:
        return status
    search_articles_only(SITE / "_static" / "searchtools.js")
    for path in SITE.glob("**/*.html"):  # the name of a fold is what it shows
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(' aria-label="Toggle hidden content"', ""), encoding="utf-8")
    if found := list(faults(SITE)):
        print("To be mended:", *found, sep="\n  ", file=sys.stderr)
        return 1
    print(f"{len(list(SITE.glob('**/*.html')))} pages in build/site; no dead link inside")
    return 0


if __name__ == "__main__":
    sys.exit(main())
