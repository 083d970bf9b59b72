"""docs/predict.md lists all that is refused: each place that raises one has its words there."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import settings
from planner import ranks

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fake_cuda"
RAISED = {"NotSimulated", "FlexOnCPU", "NotKnown", "Stop"}
WORDS = ("refusals.py", "scripts/words.py")  # whose texts other modules import
# Where words come from elsewhere: what torch's error says (`refusals.MESSAGES`), and what
# `Where.stop` is given.
FROM_ELSEWHERE = {"NotSimulated.uses(what)", "Stop(*text)"}
AT_LEAST = 12  # letters of what identifies a text


def page() -> str:
    text = (ROOT / "docs" / "predict.md").read_text(encoding="utf-8")
    section = text.partition("## What is refused, and why")[2].partition("\n## ")[0]
    return section.replace("`", "").lower()


def constants(path: Path) -> dict[str, str]:
    """The texts that a module gives a name."""
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                value = ast.literal_eval(node.value)
            except ValueError:
                continue
            if isinstance(value, str):
                found[node.targets[0].id] = value
    return found


def raised(call: ast.Call) -> bool:
    called = ast.unparse(call.func)
    return called in RAISED | {f"{name}.uses" for name in RAISED} or called.endswith(".refuses")


def refusals() -> Iterator[tuple[str, str]]:
    """(where, text) of each refusal in fake_cuda; a text is "" if nothing here knows it."""
    imported = {name: text for of in WORDS for name, text in constants(PACKAGE / of).items()}
    for path in sorted(PACKAGE.rglob("*.py")):
        known = imported | constants(path)
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(call, ast.Call) and raised(call)):
                continue
            where = f"{path.relative_to(ROOT)}: {ast.unparse(call)}"
            parts = [part for given in call.args for part in ast.walk(given)]
            texts = [known[n.id] for n in parts if isinstance(n, ast.Name) and n.id in known]
            told = [n.value for n in parts if isinstance(n, ast.Constant)]
            texts += [text for text in told if isinstance(text, str) and "mode=" in text]
            yield from ((where, text) for text in texts or [""])


def clause(text: str) -> str:
    """The first part of a text that stands in each of its sentences, without what is filled in."""
    parts = [part.strip(" ()").lower() for part in re.split(r"\{[^}]*\}|[:,;]", text)]
    return next((part for part in parts if len(part) >= AT_LEAST), text.strip().lower())


def test_the_page_lists_what_is_refused():
    written, found = page(), list(refusals())
    assert len(found) > 30
    unknown = {where.partition(": ")[2] for where, text in found if not text}
    assert unknown <= FROM_ELSEWHERE
    assert [where for where, text in found if clause(text) not in written] == []


def test_texts_without_a_place_that_raises_them_are_none():
    """A refusal that nobody raises any more would stand in the page for nothing."""
    used = {text for _, text in refusals()}
    told = constants(PACKAGE / "refusals.py").values()
    assert set(told) - used <= {"the run uses {}"}


@pytest.mark.parametrize(
    "names", [settings.REFUSED, settings.REFUSED_OPTIMIZERS, ranks.DEEPSPEED], ids=str
)
def test_the_page_lists_settings_that_are_refused(names):
    assert [name for name in names if name not in page()] == []
