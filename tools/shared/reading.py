"""The pages of the reading site, read over for what a reader should not meet."""

import html.parser
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urldefrag

from tools.shared import address


class Page(html.parser.HTMLParser):
    """The links and names of a page, and the headings and pictures of its article."""

    def __init__(self, path: Path):
        super().__init__()
        self.links, self.names, self.levels, self.alts = [], set(), [], []
        self.fetched = []  # by the browser, without a click
        self.inside = False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.inside |= tag == "article"
        self.names |= {given[key] for key in ("id", "name") if given.get(key)}
        if tag in ("a", "img", "link", "script"):
            self.links += [given[key] for key in ("href", "src") if given.get(key)]
        if given.get("src") or given.get("rel") in ("stylesheet", "preload"):
            self.fetched.append(given.get("src") or given.get("href", ""))
        if self.inside and re.fullmatch("h[1-6]", tag):
            self.levels.append(int(tag[1]))
        if self.inside and tag == "img":
            self.alts.append((given.get("alt") or "").strip())

    def handle_endtag(self, tag):
        self.inside &= tag != "article"


def faults(site: Path) -> Iterator[str]:
    """What a reader should not meet, page by page."""
    files = [path for path in sorted(site.glob("**/*.html")) if "_static" not in path.parts]
    pages = {path: Page(path) for path in files}
    for path, page in pages.items():
        name = path.relative_to(site)
        yield from (f"{name}: {link} leads nowhere" for link in dead_links(path, pages))
        for above, below in zip([0, *page.levels], page.levels, strict=False):
            if below > above + 1 or (below == 1 and above):
                yield f"{name}: a heading of level {below} follows one of level {above}"
        for source in page.fetched:
            if re.match(r"https?:|//", source):
                yield f"{name}: {source} is fetched from elsewhere"
        if "" in page.alts:
            yield f"{name}: a picture without alternative text"
        if name.parts[0] == "notebooks":
            badge = address.badge_for(name.with_suffix(".ipynb").as_posix())
            wanted, found = [badge[:-1].split("](")[-1]], page.links
            if [link for link in found if link.startswith(f"{address.COLAB}/github")] != wanted:
                yield f"{name}: not one button that opens this notebook on Colab"


def dead_links(path: Path, pages: dict[Path, Page]) -> Iterator[str]:
    """The links of a page that lead to no file of the site, or to no place in it."""
    for link in pages[path].links:
        file, anchor = urldefrag(unquote(link))
        if re.match(r"[a-z]+:|//", file):
            continue
        target = (path.parent / file.split("?")[0]).resolve() if file else path
        target = target / "index.html" if target.is_dir() else target
        nowhere = anchor and target in pages and anchor not in pages[target].names
        if nowhere or not target.exists():
            yield link
