"""Build the reading site: every lesson with its stored outputs, to be read without installing.

    python tools/build_site.py        # or make site; the pages go to build/site

Sphinx with MyST-NB and its book theme, because they build without a network (MyST's own site
builder fetches its theme at each first build). The lessons are laid out anew in build/site-source:
the cell for Colab is left out, what is folded in JupyterLab is folded, links lead to pages of the
site or to files of the repository. At the end each link inside the site is looked up.
"""

import html.parser
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urldefrag

import nbformat
import pandas as pd

import address

ROOT = Path(__file__).resolve().parents[1]
SOURCE, SITE = ROOT / "build" / "site-source", ROOT / "build" / "site"
LINK = re.compile(r"\]\(([^)\s]+)\)")  # of Markdown
HREF = re.compile(r'href="([^"]+)"')  # of a table that a cell shows
CELL = re.compile(r"(\d\d)_\w+\.ipynb#cell-id=([\w-]+)")
PARTS = {
    "The baseline": range(0, 3),
    "One switch at a time": range(3, 12),
    "Smaller training": range(12, 15),
    "Put together": range(15, 18),
    "Beyond": range(18, 100),
}


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


def notebooks() -> list[Path]:
    folder = ROOT / "notebooks"
    return sorted([*folder.glob("*.ipynb"), *folder.glob("solutions/*.ipynb")])


def linked_cells() -> set[str]:
    """The labels of cells that some page links to."""
    pages = [*notebooks(), *sorted((ROOT / "docs").glob("*.md"))]
    texts = (path.read_text(encoding="utf-8") for path in pages)
    return {label(*found) for text in texts for found in CELL.findall(text)}


def in_page(link: str, page: Path) -> str:
    """A link of an output, which Sphinx takes as it is."""
    if found := CELL.search(link):
        return link.split(".ipynb")[0] + f".html#{label(*found.groups())}"
    return translate(link, page).replace(".ipynb", ".html")


def lay_out(path: Path, linked: set[str]) -> None:
    """One lesson as the site shows it."""
    notebook, cells = nbformat.read(path, as_version=4), []
    for cell in notebook.cells:
        name = label(path.stem, cell.id)
        if name in linked:
            cells.append(nbformat.v4.new_markdown_cell(f"({name})="))
        if cell.cell_type == "markdown":
            cell.source = LINK.sub(lambda m: f"]({translate(m[1], path)})", cell.source)
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
        cell.metadata = {"tags": tags, "mystnb": {"image": {"alt": alts[0]}} if alts else {}}
        cells.append(cell)
    notebook.cells = cells
    target = SOURCE / path.relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, target)


def board() -> str:
    """The scoreboard of lesson 16 as a table."""
    table = pd.read_csv(ROOT / "data" / "board.csv").fillna("")
    table = table[["question", "method", "claimed", "predicted", "recorded", "judged"]]
    lines = ["| " + " | ".join(table) + " |", "|" + "---|" * len(table.columns)]
    rows = table.astype(str).itertuples(index=False)
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def front_page() -> str:
    """The README with the course's contents in place of its table, and the scoreboard."""
    page = ROOT / "README.md"
    text = page.read_text(encoding="utf-8")
    text = LINK.sub(lambda m: f"]({translate(m[1], page)})", text)
    text = text.replace(f"{address.repository()}/blob/main/data/real_cards.png", "real_cards.png")
    board_text = "## What the guides claim, judged\n\n"
    board_text += "How each row is found and judged is told in "
    board_text += "[lesson 16](notebooks/16_all_together.ipynb).\n\n" + board()
    trees = []
    names = [p.stem for p in notebooks() if p.parent.name == "notebooks"]
    for part, numbers in PARTS.items():
        lessons = [f"notebooks/{n}" for n in names if n[:2].isdigit() and int(n[:2]) in numbers]
        trees.append(tree(part, lessons))
    more = [f"notebooks/{name}" for name in names if not name[:2].isdigit()]
    more += [f"docs/{path.stem}" for path in sorted((ROOT / "docs").glob("*.md"))]
    trees.append(tree("Use it", more))
    solved = [f"notebooks/solutions/{p.stem}" for p in notebooks() if p.parent.name == "solutions"]
    trees.append(tree("Worked solutions", solved))
    return "\n\n".join([text, board_text, *trees]) + "\n"


def tree(caption: str, files: list[str]) -> str:
    """A part of the contents."""
    options = f":caption: {caption}\n:hidden:\n:maxdepth: 1\n"
    return "```{toctree}\n" + options + "\n" + "\n".join(files) + "\n```" if files else ""


class Page(html.parser.HTMLParser):
    """The links and the names of a page."""

    def __init__(self, path: Path):
        super().__init__()
        self.links, self.names = [], set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.names |= {given[key] for key in ("id", "name") if given.get(key)}
        if tag in ("a", "img", "link", "script"):
            self.links += [given[key] for key in ("href", "src") if given.get(key)]


def dead_links(site: Path) -> Iterator[str]:
    """Links inside the site that lead nowhere."""
    files = [path for path in sorted(site.glob("**/*.html")) if "_static" not in path.parts]
    pages = {path: Page(path) for path in files}
    for path, page in pages.items():
        for link in page.links:
            file, anchor = urldefrag(unquote(link))
            if re.match(r"[a-z]+:|//", file):
                continue
            target = (path.parent / file.split("?")[0]).resolve() if file else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                yield f"{path.relative_to(site)}: {link}"
            elif anchor and target in pages and anchor not in pages[target].names:
                yield f"{path.relative_to(site)}: {link}"


def main() -> int:
    try:
        import sphinx  # noqa: F401  (so that one sentence says what is missing)
    except ImportError:
        print("The site needs Sphinx: python -m pip install -e '.[site]'", file=sys.stderr)
        return 2
    for folder in (SOURCE, SITE):
        shutil.rmtree(folder, ignore_errors=True)
    linked = linked_cells()
    for path in notebooks():
        lay_out(path, linked)
    for path in sorted((ROOT / "docs").glob("*.md")):
        text = LINK.sub(lambda m, page=path: f"]({translate(m[1], page)})", path.read_text())
        (SOURCE / "docs").mkdir(exist_ok=True)
        (SOURCE / "docs" / path.name).write_text(text, encoding="utf-8")
    shutil.copy(ROOT / "data" / "real_cards.png", SOURCE)
    (SOURCE / "index.md").write_text(front_page(), encoding="utf-8")
    command = [sys.executable, "-m", "sphinx", "-q", "-n", "-j", "auto", "-c", "docs"]
    if status := subprocess.run([*command, str(SOURCE), str(SITE)], cwd=ROOT).returncode:
        return status
    if dead := list(dead_links(SITE)):
        print("Links that lead nowhere:", *dead, sep="\n  ", file=sys.stderr)
        return 1
    print(f"{len(list(SITE.glob('**/*.html')))} pages in build/site, and no dead link inside")
    return 0


if __name__ == "__main__":
    sys.exit(main())
