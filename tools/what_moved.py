"""Say which lessons new versions have moved, from the results that pytest wrote.

    python -m pytest --junitxml=build/tests.xml
    python -m tools.what_moved build/tests.xml

The weekly run against the latest versions shows this page: the packages that are no longer those of
`constraints.txt`, and by lesson the cells whose checked output has changed or that fail.

Writes: nothing
"""

import re
import sys
import xml.etree.ElementTree as xml
from importlib import metadata
from pathlib import Path

from tools import ROOT

ANSI = re.compile(r"(?:\x1b|#x1B)\[[0-9;]*m")


def versions(constraints: str) -> list[tuple[str, str, str]]:
    """Package, version last tested and version here, where the two differ."""
    moved = []
    for name, tested in re.findall(r"^([\w.-]+)==([^\s;]+)", constraints, re.MULTILINE):
        try:
            here = metadata.version(name).split("+")[0]
        except metadata.PackageNotFoundError:
            continue  # belongs to an extra
        if here != tested:
            moved.append((name, tested, here))
    return moved


def failures(results: Path) -> list[tuple[str, str, str]]:
    """Place, test and reason of each failure; the cells of notebooks as JupyterLab numbers them."""
    found = []
    for case in xml.parse(results).iter("testcase"):
        for fault in [*case.iter("failure"), *case.iter("error")]:
            place, name = case.get("classname", ""), case.get("name", "")
            lines = [line.strip() for line in ANSI.sub("", fault.text or "").splitlines()]
            lines = [line for line in lines if line]
            reason = lines[-1] if lines else fault.get("message", "")
            if notebook := re.search(r"notebooks\.(.+)\.ipynb$", place):
                place = notebook[1].replace(".", "/")
                name = re.sub(r"Cell (\d+)", lambda m: f"code cell {int(m[1]) + 1}", name)
                if "Cell outputs differ" in "".join(lines):
                    marks = {"+": "stored ", "-": "now "}  # of pytest's comparison
                    changed = [line for line in lines if line[:2] in ("- ", "+ ")]
                    changed = [marks[line[0]] + line[2:] for line in changed]
                    reason = f"its checked output has changed: {'; '.join(changed)}"
            found.append((place, name, reason[:200]))
    return found


def page(moved: list[tuple[str, str, str]], failed: list[tuple[str, str, str]]) -> str:
    """The summary, in Markdown."""
    lines = ["## Versions that moved", "", "| package | tested | here |", "|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in moved] or ["| none | | |"]
    for title, chosen in {
        "Lessons that moved": [row for row in failed if re.match(r"(solutions/)?\d\d_", row[0])],
        "Other tests": [row for row in failed if not re.match(r"(solutions/)?\d\d_", row[0])],
    }.items():
        lines += ["", f"## {title}", ""]
        for place in dict.fromkeys(row[0] for row in chosen):
            lines.append(f"- **{place}**")
            lines += [f"  - {name}: `{why}`" for where, name, why in chosen if where == place]
        lines += [] if chosen else ["None."]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("Name the results: make what-moved RESULTS=build/tests.xml", file=sys.stderr)
        return 2
    try:
        failed = failures(Path(arguments[0]))
    except (OSError, xml.ParseError) as error:
        print(f"{arguments[0]} does not hold the results of pytest: {error}", file=sys.stderr)
        return 2
    print(page(versions((ROOT / "constraints.txt").read_text(encoding="utf-8")), failed))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
