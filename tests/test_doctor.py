"""`make doctor`: what a bug report needs."""

import importlib.metadata
import shutil
from types import SimpleNamespace

import pytest

from tools import doctor


def test_it_prints_machine_versions_and_checks(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "CHECKS", (doctor.writable, doctor.room))
    assert doctor.main() == 0
    text = capsys.readouterr().out
    assert "\ntorch " in text and "ok     cpu:" in text.replace("cuda:", "cpu:")
    assert str(doctor.ROOT) not in text


def test_a_failed_check_is_one_line_and_the_status(monkeypatch, capsys):
    def broken():
        raise RuntimeError("the reason\nand more")

    monkeypatch.setattr(doctor, "CHECKS", (broken, doctor.writable))
    assert doctor.main() == 1
    text = capsys.readouterr().out
    assert "FAILED RuntimeError: the reason\nok     build/" in text


def test_another_version_is_told_beside_the_tested_one(monkeypatch):
    monkeypatch.setattr(doctor, "tested", lambda: {"torch": "1.0"})
    line = next(line for line in doctor.versions() if line.startswith("torch "))
    assert line.endswith("(tested: 1.0)")


def test_a_missing_library_says_how_to_get_it(monkeypatch):
    def none(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", none)
    assert doctor.versions()[0] == "torch is missing: run make install"


def test_a_full_disk_and_a_folder_that_is_read_only(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**29))
    with pytest.raises(ValueError, match="0.5 GiB are free"):
        doctor.room()
    (tmp_path / "data").touch()
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    with pytest.raises(ValueError, match="data/cache/ cannot be written"):
        doctor.writable()


def test_helpers_of_another_are_told(monkeypatch, tmp_path):
    assert doctor.importable() == "a notebook finds this course's helpers"
    (tmp_path / "helpers.py").touch()  # a reader's own
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ValueError, match="finds another helpers"):
        doctor.importable()
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="None\n"))
    with pytest.raises(ValueError, match="does not find helpers"):
        doctor.importable()
