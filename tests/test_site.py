"""How the reading site is laid out, and that a dead link is seen. `make site` builds it."""

import re
from pathlib import Path

import nbformat
import pandas as pd
import pytest

from notebook_rules import prose
from tools import site

LESSON = site.ROOT / "notebooks" / "05_gradient_checkpointing.ipynb"
SOLUTION = site.ROOT / "notebooks" / "solutions" / LESSON.name
LINKS = {
    (LESSON, "../README.md"): "../index.md",
    (SOLUTION, "../../README.md"): "../../index.md",
    (LESSON, "06_mixed_precision.ipynb"): "06_mixed_precision.ipynb",
    (LESSON, "06_mixed_precision.ipynb#cell-id=Cards-Table"): "#cell-06-cards-table",
    (LESSON, "#Not-the-same:-offloading"): "#not-the-same-offloading",
    (LESSON, "https://arxiv.org/abs/1604.06174"): "https://arxiv.org/abs/1604.06174",
}


@pytest.mark.parametrize(("page", "link"), LINKS)
def test_a_link_leads_to_a_page_of_the_site(page, link):
    assert site.translate(link, page) == LINKS[page, link]


def test_a_link_to_a_file_leads_to_the_repository():
    found = site.translate("../data/claims.csv", LESSON)
    assert found == f"{site.address.repository()}/blob/main/data/claims.csv"


def test_a_lesson_is_folded_as_in_jupyterlab_and_has_no_cell_for_colab(tmp_path, monkeypatch):
    monkeypatch.setattr(site, "SOURCE", tmp_path)
    linked = site.linked_cells()
    site.lay_out(LESSON, linked)
    before = nbformat.read(LESSON, as_version=4)
    laid_out = nbformat.read(tmp_path / "notebooks" / LESSON.name, as_version=4)
    tags = {cell.id: cell.metadata.get("tags", []) for cell in laid_out.cells}
    for cell in before.cells:
        folded = cell.metadata.get("jupyter", {})
        assert ("hide-output" in tags.get(cell.id, [])) == bool(folded.get("outputs_hidden"))
        assert ("hide-input" in tags.get(cell.id, [])) == bool(folded.get("source_hidden"))
    assert "colab-setup" not in tags and any("hide-output" in found for found in tags.values())
    anchors = [c.source for c in laid_out.cells if c.source.startswith("(cell-05-")]
    assert sorted(anchors) == [
        f"({name})=" for name in sorted(linked) if name.startswith("cell-05-")
    ]
    told = [cell.metadata.get("mystnb", {}) for cell in laid_out.cells]
    alts = [facts["image"]["alt"] for facts in told if "image" in facts]
    assert alts and all(alts)
    closed = sum("hide-input" in found for found in tags.values())
    shown = [facts["code_prompt_show"] for facts in told if "code_prompt_show" in facts]
    assert len(shown) == closed and "Show the {type}: What this lesson imports" in shown


@pytest.mark.parametrize("page", site.notebooks(), ids=lambda page: page.stem)
def test_formulas_can_be_written_without_a_network(page):
    """`docs/conf.py` writes them as MathML, by a library that does not know all of LaTeX."""
    reason = "needs docutils: pip install -e '.[site]'"
    write = pytest.importorskip("docutils.utils.math.latex2mathml", reason=reason).tex2mathml
    for cell in nbformat.read(page, as_version=4).cells:
        if cell.cell_type == "markdown":
            for formula in re.findall(r"\$\$?([^$]+)\$\$?", prose(cell.source)):
                assert "<math" in write(formula), formula


def test_every_lesson_has_a_place_in_the_contents():
    page = site.front_page()
    for path in site.notebooks():
        assert f"\n{path.relative_to(site.ROOT).with_suffix('').as_posix()}\n" in page


def test_the_front_page_shows_the_evidence_and_every_row_of_the_scoreboard():
    page = site.front_page()
    assert re.search(r"!\[[^\]]{40,}\]\(real_cards.png\)", page)
    rows = pd.read_csv(site.ROOT / "data" / "board.csv", dtype=str)
    shown = re.sub(r"\[(lesson \d\d)\]\([^)]+\)", r"\1", page)
    for row in rows.itertuples():
        columns = row.method, row.claimed, row.judged, row.predicted, row.recorded
        assert shown.count("| " + " | ".join(columns) + " |") == 1
    assert page.index("## Lessons") < page.index("### Faster") < page.index("## Predict your own")


def test_a_badge_becomes_a_link_of_our_own():
    text = site.with_links(site.address.badge(LESSON.stem), LESSON)
    assert "colab-badge" not in text and "](http" in text and text.endswith("{.colab}")
    assert site.front_page().count("[Open in Colab](") >= 23


SOUND = '<article><h1>A</h1><h2>B</h2><img alt="It falls." src="a.png"></article><h4>C</h4>'
COLAB = site.address.badge_for("notebooks/a.ipynb")[:-1].split("](")[-1]
FAULTS = {
    '<article><h1>A</h1><h3 id="x">B</h3></article>': "level 3 follows one of level 1",
    "<article><h2>A</h2></article>": "level 2 follows one of level 0",
    "<article><h1>A</h1><h1>B</h1></article>": "level 1 follows one of level 1",
    '<article><h1>A</h1><img src="a.png"></article>': "without alternative text",
    '<article><h1>A</h1><img alt=" " src="a.png"></article>': "without alternative text",
    '<a href="b.html">': "b.html leads nowhere",
    '<a href="#gone">': "#gone leads nowhere",
    '<a id="top" href="a.html#gone">': "a.html#gone leads nowhere",
    '<script src="https://example.org/a.js"></script>': "a.js is fetched from elsewhere",
    '<link rel="stylesheet" href="//example.org/a.css">': "a.css is fetched from elsewhere",
}


@pytest.mark.parametrize("text", FAULTS)
def test_a_fault_of_a_page_is_seen(tmp_path, text):
    (tmp_path / "a.png").write_bytes(b"")
    (tmp_path / "a.html").write_text(SOUND)
    assert list(site.faults(tmp_path)) == []
    (tmp_path / "a.html").write_text(text)
    (fault,) = site.faults(tmp_path)
    assert fault.startswith("a.html: ") and FAULTS[text] in fault


@pytest.mark.parametrize("links", [[], [COLAB, COLAB], [COLAB.replace("a.ipynb", "b.ipynb")]])
def test_a_notebook_has_one_button_and_it_opens_this_notebook(tmp_path, links):
    (tmp_path / "notebooks").mkdir()
    page = tmp_path / "notebooks" / "a.html"
    page.write_text(f'<a href="{COLAB}">')
    assert list(site.faults(tmp_path)) == []
    page.write_text("".join(f'<a href="{link}">' for link in links))
    assert "button" in next(site.faults(tmp_path))


def test_colours_of_the_site_are_those_of_the_theme():
    """They have enough contrast in light and dark; `make test-browser` lets axe measure them."""
    own = (site.ROOT / "docs" / "site.css").read_text(encoding="utf-8")
    assert re.findall(r"#[0-9a-fA-F]{3,8}\b(?=[^{}]*;)|rgba?\(|hsl", own) == ["#fff"]
    assert "color: inherit" in own and not re.search(r"(?<!-)color: (?!inherit)", own)


def test_what_cannot_be_written_is_one_sentence(tmp_path, monkeypatch, capsys):
    (tmp_path / "build").write_text("a file where the folder should be")
    monkeypatch.setattr(site.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(site, "SOURCE", tmp_path / "build" / "site-source")
    monkeypatch.setattr(site, "SITE", tmp_path / "build" / "site")
    assert site.main() == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_without_sphinx_one_sentence_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr(site.importlib.util, "find_spec", lambda name: None)
    assert site.main() == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_pages_are_of_the_last_commit(tmp_path, monkeypatch):
    """What a reader ran, answered or saved since is on no page."""
    monkeypatch.setattr(site, "SOURCE", tmp_path)
    monkeypatch.setattr(site.nbformat, "read", lambda *_, **__: pytest.fail("read from disk"))
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: pytest.fail("read from disk"))
    site.lay_out(LESSON, site.linked_cells())
    assert (tmp_path / "notebooks" / LESSON.name).is_file()


def test_an_excerpt_begins_with_the_text(tmp_path):
    script = tmp_path / "searchtools.js"
    script.write_text("\n".join(site.SEARCH))
    site.search_articles_only(script)
    assert script.read_text() == "\n".join(site.SEARCH.values())
    with pytest.raises(LookupError, match="has changed"):
        site.search_articles_only(script)
