"""Predictions on disk: read again, and made anew where a file is damaged or foreign."""

import pytest

from planner import cache
from planner.facts import Facts


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(cache, "own_file", lambda *parts: tmp_path.joinpath("build", *parts))
    return tmp_path / "build" / "predictions"


def test_a_second_call_is_read_and_damage_is_ignored(folder):
    facts, calls = Facts(3, 4, {"parameters": 2}, {"forward": 1}, 0.5), []

    def ask(what="a question"):
        return cache.kept(what, lambda: calls.append(1) or facts)

    assert ask() == ask() == facts and len(calls) == 1
    (path,) = folder.iterdir()
    whole = path.read_text()
    ask("another")
    (foreign,) = set(folder.iterdir()) - {path}
    for text in ("", "{", "[]", "{}\n{}", whole[:-1], whole.replace("4", "5"), foreign.read_text()):
        path.write_text(text)
        assert ask() == facts
    path.write_bytes(b"\xff\xfe\n\x00")
    assert ask() == facts and len(calls) == 10


def test_a_folder_that_cannot_be_written_is_no_error(folder):
    folder.parent.write_text("a file in its place")
    facts = Facts(1, 1, {"parameters": 1}, {})
    assert cache.kept("k", lambda: facts) == facts


def test_all_code_that_a_prediction_depends_on_is_hashed(monkeypatch, tmp_path):
    """Packages inside of packages, too."""
    (tmp_path / "planner").mkdir()
    inner = tmp_path / "fake_cuda" / "choices" / "attention.py"
    inner.parent.mkdir(parents=True)
    monkeypatch.setattr(cache, "__file__", str(tmp_path / "planner" / "cache.py"))
    hashes = set()
    for text in ("x = 1", "x = 2", "x = 1"):
        inner.write_text(text)
        hashes.add(cache.code.__wrapped__())
    assert len(hashes) == 2
