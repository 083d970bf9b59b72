"""Say what still keeps the course from being released, and build the wheel that would be.

    python -m tools.release_check [--tag v0.1.0] [--no-build-isolation]

Named are placeholders, versions that do not agree, and files of `data/` and `examples/` that the
wheel lacks. The wheel is of the last commit, in dist/. Exit status 1 while anything is named.

Writes: dist/
"""

import argparse
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

from fake_cuda.files import WHEEL
from tools import ROOT

DIST = "dist"
OWNER = "OWNER"  # stands in an address for whoever will hold the repository
UNRELEASED = "not released yet"
WITH_ADDRESS = ("CITATION.cff", "README.md")  # make outputs writes README.md, the other is by hand
# What a wheel does without: texts and pictures for readers, logs that tests alone read, and what is
# copied from a clone.
LEFT_OUT = re.compile(r"data/(README\.md|[^/]*\.png|cuda_logs/.*)|examples/launch/.*")


def project(root: Path) -> dict:
    """The table [project] of pyproject.toml."""
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def placeholders(root: Path = ROOT) -> Iterator[str]:
    """A sentence for each thing that only whoever releases the course can say."""
    address = project(root)["urls"]["Repository"]
    if f"/{OWNER}/" in address:
        yield f"pyproject.toml: {OWNER} stands for the repository's owner in {address}"
    for name in WITH_ADDRESS:
        text = (root / name).read_text(encoding="utf-8")
        if f"/{OWNER}/" in text:
            yield f"{name}: {OWNER} stands for the repository's owner"
        elif address not in text:
            yield f"{name}: it does not have the address {address}"
    if UNRELEASED in first_heading(root):
        yield f"CHANGELOG.md: its first heading says {UNRELEASED!r} in place of a date"


def first_heading(root: Path) -> str:
    """The newest version's heading in CHANGELOG.md."""
    lines = (root / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    return next((line for line in lines if line.startswith("## ")), "")


def versions(root: Path = ROOT, tag: str | None = None) -> Iterator[str]:
    """A sentence for each place whose version is not that of pyproject.toml."""
    ours = project(root)["version"]
    cited = re.search(r"^version: (\S+)$", (root / "CITATION.cff").read_text("utf-8"), re.MULTILINE)
    told = {
        "CITATION.cff": cited and cited[1],
        "CHANGELOG.md": (first_heading(root)[3:].split() or ["-"])[0].rstrip(","),
    }
    if tag is not None:
        told[f"the tag {tag}"] = tag.removeprefix("v")
    for place, version in told.items():
        if version != ours:
            yield f"{place} has the version {version}, pyproject.toml has {ours}"


def build(target: Path, root: Path = ROOT, options: tuple[str, ...] = ()) -> Path:
    """The wheel of the last commit, built in a folder that holds nothing else.

    A folder in which something was built before would put its files of then into the wheel.
    """
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as copy:
        archive = subprocess.run(["git", "-C", root, "archive", "HEAD"], stdout=-1, check=True)
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            tar.extractall(copy, filter="data")
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *options]
        subprocess.run([*pip, "--wheel-dir", target, copy], check=True)
    return max(target.glob("*.whl"), key=lambda path: path.stat().st_mtime)


def missing(wheel: Path, root: Path = ROOT) -> list[str]:
    """Files of data/ and examples/ that the last commit has, and the wheel has not."""
    asked = ["git", "-C", root, "ls-tree", "-r", "--name-only", "HEAD", "data", "examples"]
    there = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()
    with zipfile.ZipFile(wheel) as opened:
        brought = set(opened.namelist())
    wanted = (name for name in there if not LEFT_OUT.fullmatch(name))
    return [name for name in wanted if f"{WHEEL}/{name}" not in brought]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tag", help="which has to be that of the version")
    told = "build with the setuptools that is here, without a network"
    parser.add_argument("--no-build-isolation", action="store_true", help=told)
    options = parser.parse_args(arguments)
    wheel = build(ROOT / DIST, options=("--no-build-isolation",) * options.no_build_isolation)
    print(f"{DIST}/{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB")
    found = [*placeholders(), *versions(tag=options.tag)]
    found += [f"the wheel lacks {name}: see pyproject.toml" for name in missing(wheel)]
    for sentence in found:
        print("still:", sentence)
    if not found:
        print("nothing is missing")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
