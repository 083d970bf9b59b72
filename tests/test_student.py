"""`make student`: the course without its answers."""

import nbformat
import pytest

import student


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    target = tmp_path_factory.mktemp("student") / "course"
    assert student.main(target=target) == 0
    return target


def test_every_lesson_is_there_and_no_solution(copy):
    lessons = {path.name for path in (student.ROOT / "notebooks").glob("*.ipynb")}
    assert {path.name for path in (copy / "notebooks").glob("*.ipynb")} == lessons
    assert not (copy / "notebooks" / "solutions").exists()
    assert not list(copy.glob("**/answers")) and (copy / "data" / "gpus.csv").is_file()


def test_nothing_leads_to_a_solution(copy):
    for path in [*copy.glob("notebooks/*.ipynb"), copy / "README.md"]:
        assert "solutions/" not in path.read_text(encoding="utf-8"), path.name


def test_outputs_below_a_guess_are_gone_and_others_stay(copy):
    guesses = kept = 0
    for path in sorted((student.ROOT / "notebooks").glob("*.ipynb")):
        theirs = {c.id: c for c in nbformat.read(copy / "notebooks" / path.name, 4).cells}
        for cell in nbformat.read(path, 4).cells:
            if cell.cell_type == "code" and cell.outputs:
                hidden = cell.metadata.get("jupyter", {}).get("outputs_hidden", False)
                assert bool(theirs[cell.id].outputs) != hidden, (path.name, cell.id)
                assert "outputs_hidden" not in theirs[cell.id].metadata.get("jupyter", {})
                guesses, kept = guesses + hidden, kept + (not hidden)
    assert guesses > 20 and kept > 200


def test_without_git_one_sentence(tmp_path, capsys):
    assert student.main(root=tmp_path, target=tmp_path / "out") == 2
    assert "clone the course" in capsys.readouterr().err
