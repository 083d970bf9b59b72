"""What is released: one version, files that a wheel brings, caches outside of it."""

import importlib.metadata
import importlib.util
import re
import shlex
import shutil
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from fake_cuda import files
from planner import doctor
from planner.command import main, parsed
from planner.terminal import setting
from tools import release_check

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


# -------------------------------------------------------------------------------------- the version
def test_the_command_says_the_version_of_the_project_file(capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["--version"])
    assert leaving.value.code == 0
    version = importlib.metadata.version("one-gpu-measured")
    assert capsys.readouterr().out == f"onegpu {version}\n"
    assert version == PROJECT["version"], "pyproject.toml has another version: run make install"


# ---------------------------------------------------------------------- an installation, as it lies
@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The packages and their files as a wheel brings them, and an empty folder to work in."""
    site, empty = tmp_path / "site-packages", tmp_path / "empty"
    for name in ("data", "examples"):
        shutil.copytree(ROOT / name, site / files.WHEEL / name, ignore=lambda *_: ["cache"])
    (site / "fake_cuda").mkdir()
    monkeypatch.setattr(files, "__file__", str(site / "fake_cuda" / "files.py"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(sys, "platform", "linux")
    empty.mkdir()
    monkeypatch.chdir(empty)
    return site


def test_a_wheel_keeps_nothing_in_its_own_folder(installed, tmp_path):
    assert files.data_file("gpus.csv") == installed / files.WHEEL / "data" / "gpus.csv"
    assert files.example_file("rank.jinja").is_file() and files.is_installed()
    kept = tmp_path / "caches" / files.CACHE
    assert files.own_file("predictions", "x") == kept / "predictions" / "x"
    assert files.own_file("tiny", folder="data/cache") == kept / "tiny"
    assert doctor.caches() and kept.is_dir()


def test_in_a_clone_what_is_made_stays_in_it(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT / "notebooks")
    assert files.own_file("hosts.json") == ROOT / "build" / "hosts.json"
    assert files.own_file("x", folder="data/cache") == ROOT / "data" / "cache" / "x"


@pytest.mark.parametrize(
    "platform, told, expected",
    [
        ("linux", {"XDG_CACHE_HOME": "/kept"}, "/kept/one-gpu-measured"),
        ("linux", {}, "/me/.cache/one-gpu-measured"),
        ("linux", {"XDG_CACHE_HOME": "caches"}, "/me/.cache/one-gpu-measured"),
        ("darwin", {"XDG_CACHE_HOME": "/kept"}, "/me/Library/Caches/one-gpu-measured"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/one-gpu-measured"),
        ("win32", {}, "/me/AppData/Local/one-gpu-measured"),
    ],
)
def test_caches_are_where_the_system_has_them(platform, told, expected, monkeypatch):
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(Path, "home", lambda: Path("/me"))
    monkeypatch.setattr(sys, "platform", platform)
    assert files.user_cache() == Path(expected)


def test_a_user_without_a_home_has_a_folder_too(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert files.user_cache() == Path(tempfile.gettempdir()) / files.CACHE


def test_a_clone_of_any_name_is_no_wheel(tmp_path, monkeypatch):
    (tmp_path / files.WHEEL / "data").mkdir(parents=True)
    (tmp_path / files.WHEEL / "data" / "gpus.csv").touch()
    monkeypatch.chdir(tmp_path / files.WHEEL)
    assert not files.is_installed()


def test_a_wheel_without_its_data_is_one_sentence(installed, capsys):
    shutil.rmtree(installed / files.WHEEL / "data" / "configs")
    assert main(["predict", "--gpu", "T4", "--model", "gpt2"]) == 2
    (installed / files.WHEEL / "data" / "gpus.csv").unlink()
    for asked in (["predict", "--gpu", "T4"], ["fit", "--model", "gpt2"]):
        capsys.readouterr()
        assert main(asked) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("error: data/gpus.csv was not found in this folder")
        assert "install it again" in err and err.count("\n") == 1


def test_the_doctor_names_what_is_missing(installed, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "CHECKS", (doctor.data, doctor.caches, doctor.room))
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"one-gpu-measured {PROJECT['version']}\nPython ")
    assert "\ntorch 2" in out and "models and templates are in the installed package" in out
    (installed / files.WHEEL / "examples" / "rank.jinja").unlink()
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "FAILED FileNotFoundError: examples/rank.jinja is missing beside data/gpus.csv" in out


def test_the_doctor_names_a_library_that_is_too_old(monkeypatch):
    versions = {"torch": "1.0", "numpy": "2.1"}
    wanted = ["torch>=2.11,<3", "numpy>=2,<3", "absent>=1", 'extra>=1; extra == "lab"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: wanted)

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    lines = "\n".join(doctor.libraries())
    assert lines == "torch 1.0 (needed: <3,>=2.11)\nnumpy 2.1\nabsent is missing (needed: >=1)"


# ---------------------------------------------------------------------------------------- the check
@pytest.fixture
def released(tmp_path):
    """A repository with nothing left to say before its release."""
    address = "https://github.com/somebody/one-gpu-measured"
    urls = f'[project.urls]\nRepository = "{address}"\n'
    (tmp_path / "pyproject.toml").write_text(f'[project]\nversion = "1.2.0"\n{urls}')
    (tmp_path / "CITATION.cff").write_text(f'version: 1.2.0\nrepository-code: "{address}"\n')
    (tmp_path / "README.md").write_text(f"git clone {address}\n")
    (tmp_path / "CHANGELOG.md").write_text("# Changes\n\n## 1.2.0, 2026-12-01\n\n- One.\n")
    return tmp_path


def test_nothing_is_named_where_nothing_is_left(released):
    assert not [*release_check.placeholders(released), *release_check.versions(released, "v1.2.0")]


@pytest.mark.parametrize(
    "file, old, new, said",
    [
        ("pyproject.toml", "somebody", "OWNER", "pyproject.toml: OWNER stands for the repository"),
        ("CITATION.cff", "somebody", "OWNER", "CITATION.cff: OWNER stands for the repository"),
        ("README.md", "somebody", "another", "README.md: it does not have the address https"),
        ("CHANGELOG.md", "2026-12-01", "(not released yet)", "CHANGELOG.md: its first heading"),
        ("CITATION.cff", "1.2.0", "1.1.0", "CITATION.cff has the version 1.1.0, pyproject.toml"),
        ("CHANGELOG.md", "1.2.0", "1.1.0", "CHANGELOG.md has the version 1.1.0, pyproject.toml"),
    ],
)
def test_what_is_left_is_named(file, old, new, said, released):
    path = released / file
    path.write_text(path.read_text().replace(old, new))
    found = [*release_check.placeholders(released), *release_check.versions(released)]
    assert any(sentence.startswith(said) for sentence in found), found


def test_a_tag_of_another_version_is_named(released):
    (found,) = release_check.versions(released, "v1.3.0")
    assert found == "the tag v1.3.0 has the version 1.3.0, pyproject.toml has 1.2.0"


def test_the_versions_of_this_repository_agree():
    assert not [*release_check.versions()]


@pytest.mark.skipif(
    not importlib.util.find_spec("setuptools") or not (ROOT / ".git").exists(),
    reason="builds a wheel of a checkout with the setuptools that is here",
)
def test_the_wheel_brings_what_the_command_reads(tmp_path):
    wheel = release_check.build(tmp_path, options=("--no-build-isolation",))
    assert release_check.missing(wheel) == []
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
    assert {"planner/command.py", "fake_cuda/files.py", "helpers/tiny.py"} <= names
    assert not [name for name in names if re.match("(tests|tools|evidence|notebooks)/", name)]
    less = tmp_path / "less.whl"
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(less, "w") as part:
        for name in names - {"one_gpu_measured/data/gpus.csv"}:
            part.writestr(name, whole.read(name))
    assert release_check.missing(less) == ["data/gpus.csv"]


def test_each_step_of_the_workflow_names_what_exists():
    """Its modules, its jobs, and commands that the command reads."""
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    modules = re.findall(r"python -m (tools\.\w+)", text)
    assert modules and all((ROOT / f"{m.replace('.', '/')}.py").is_file() for m in modules)
    jobs = yaml.safe_load(text)["jobs"]
    assert set(jobs["publish"]["needs"]) == set(jobs) - {"publish"}
    asked = re.findall(r"^ +onegpu (?!--version)(.+)$", text, re.MULTILINE)
    options = [parsed(shlex.split(line)) for line in asked]
    assert {one.command for one in options} == {"doctor", "predict", "fit"}
    assert all(setting(text) for one in options for text in one.settings)


@pytest.mark.parametrize("name", ["release", "site"])
def test_a_workflow_that_builds_the_site_installs_the_course(name):
    """A page of it is the planner's answers, so it takes more than Sphinx."""
    text = (ROOT / ".github" / "workflows" / f"{name}.yml").read_text(encoding="utf-8")
    steps = yaml.safe_load(text)["jobs"]["site"]["steps"]
    runs = [step.get("run", "") for step in steps]
    before = runs[: runs.index("python -m tools.site")]
    assert any('-c constraints.txt -e ".[site]"' in run for run in before)
