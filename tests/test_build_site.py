"""How the reading site is laid out, and that a dead link is seen. `make site` builds it."""

import nbformat
import pytest

import build_site

LESSON = build_site.ROOT / "notebooks" / "05_gradient_checkpointing.ipynb"
SOLUTION = build_site.ROOT / "notebooks" / "solutions" / LESSON.name
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
    assert build_site.translate(link, page) == LINKS[page, link]


def test_a_link_to_a_file_leads_to_the_repository():
    found = build_site.translate("../data/claims.csv", LESSON)
    assert found == f"{build_site.address.repository()}/blob/main/data/claims.csv"


def test_a_lesson_is_folded_as_in_jupyterlab_and_has_no_cell_for_colab(tmp_path, monkeypatch):
    monkeypatch.setattr(build_site, "SOURCE", tmp_path)
    linked = build_site.linked_cells()
    build_site.lay_out(LESSON, linked)
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
    alts = [cell.metadata["mystnb"] for cell in laid_out.cells if cell.metadata.get("mystnb")]
    assert alts and all(facts["image"]["alt"] for facts in alts)


def test_every_lesson_has_a_place_in_the_contents():
    page = build_site.front_page()
    for path in build_site.notebooks():
        assert f"\n{path.relative_to(build_site.ROOT).with_suffix('').as_posix()}\n" in page


def test_a_dead_link_is_seen(tmp_path):
    (tmp_path / "a.html").write_text('<a href="b.html#here">x</a> <a id="top" href="#top">y</a>')
    (tmp_path / "b.html").write_text('<p id="here"> <img src="none.png"> <a href="a.html#gone">')
    assert list(build_site.dead_links(tmp_path)) == ["b.html: none.png", "b.html: a.html#gone"]
