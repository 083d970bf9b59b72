"""docs/predict.md lists all that is refused: each sentence that ends a prediction has its words
there, or stands below as one about what was asked for wrongly, or as a script's own error."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import settings
from planner import ranks

ROOT = Path(__file__).parents[1]
PACKAGES = ("fake_cuda", "helpers", "planner")
# What reaches a reader as a sentence. Errors of other kinds are those that torch, transformers and
# the system raise themselves, put in their place.
TOLD = {"NotSimulated", "FlexOnCPU", "NotKnown", "Stop", "Failure", "ValueError", "Ended"}
TOLD |= {"ImportError", "MemoryError", "ConnectionError"}
# Modules that say only what is wrong with what was asked for: an option, a file, a name.
WRONG_INPUT = """
    fake_cuda/cards.py fake_cuda/estimates.py fake_cuda/logs.py
    fake_cuda/versions.py helpers/__init__.py helpers/hardware.py
    helpers/host.py helpers/memory.py helpers/models.py helpers/own_data.py helpers/runs.py
    helpers/show.py helpers/trainers.py helpers/training.py planner/calibration.py
    planner/doctor.py planner/finding.py planner/prices.py planner/recorded.py planner/report.py
    planner/search.py planner/terminal.py
""".split()
REASONS = "fake_cuda/scripts/reasons.py"
RETURNED = {("fake_cuda/scripts/script.py", "_ended")} | {
    (REASONS, node.name)
    for node in ast.walk(ast.parse((ROOT / REASONS).read_text(encoding="utf-8")))
    if isinstance(node, ast.FunctionDef) and node.name.startswith("_")
}
# In modules that refuse, too: sentences about what was asked for wrongly, by how they begin.
ASKED_WRONGLY = (
    "{} is not Python",
    "{} is a folder",
    "{} is not a file",
    "{} may not be read",
    "{} is no notebook",
    "a script is predicted for a card",
    "a function of your own takes no settings",
    "optimizer takes a function",
    "{} is called {} in today's transformers",
    "'batch_size' is called",
    "{}={} is ",
    "{} is the old name of",
    "a length of {} tokens is impossible",
    '"tiny" has data of its own',
    '{} has no size "{}"',
    "{} of your own are not read here",
    "image_size is for {} alone",
    "{} reads each picture as {} tokens",
    'pretrained=True is for size "tiny"',
    "{} is not a model for {}",
    "{} reads {} tokens at most",
    "a function given to with_model must return the model",
    "{} holds damaged weights",
    "each micro-batch would be a step of its own",
    "--must-fit asks whether a card holds it",
    "nothing fits, for the weights, with a margin",
    "--{} goes with --parallel",
    "{} is no number of cards",
    "{} is not several cards",
    "name the cards once",
    "a script says itself how it uses its cards",
    "--gpus needs a script, or --parallel",
    "--parallel needs several cards",
    "{} is not an option of {}",
    "--steps and --tokens are of a run",
    "several cards are compared by their prices",
    "a run's model, card and settings go with",
    "--step-seconds is of a run",
    "{}: a script's arguments stand after --",
    "say once how long the run is",
    "--timeline draws one card's step",
    "a batch of {}",
    "no tokenizer of {} is here",
    "one card has nothing to share",
    "{} cards do not divide",
    "hsdp makes two replicas",
    "tensor={} goes with fsdp2",
    "lora={} is no rank",
    "ranks are predicted for cards",
    "{} does nothing with {}",
    "{} of {} is {}, which tensor={} does not divide",
)
# The script's own errors, and those that torch and safetensors raise, in their words.
OF_THE_SCRIPT = (
    "fails by itself",
    "ended before it took an update",
    "is a module of a package",
    "names what is no folder of this machine",
    "needs what is not installed",
    "needs the module {}",
    "asks for the version of {}",
    "asks {} {} for what it does not have",
    "ended its process itself, with status",
    "crashed: its process was ended by",
    "is no Python: it cannot be read",
    "Invalid fraction value",
    "Error initializing torch.distributed",
    "You are trying to save a non contiguous tensor",
)
# Whose words come from elsewhere: from torch's error (`refusals.MESSAGES`), from an error that was
# told already, from `suggest` (the nearest name), or from what `Where.stop` and `Ended` are given.
FROM_ELSEWHERE = {
    "Stop(*text)",
    "Ended()",
    "Failure(why(error, Printed.tail, *known))",
    "Ended(status, keeper=True)",
    "Ended(None if over else status - 256 * (status > 127))",
    "NotSimulated.uses(what)",
    "ValueError(f'{self.path} {outcome.failure}')",
    "ValueError(f'{self.path} {told}')",
    "ValueError(f'{card}: {error}')",
    "ValueError(str(error).replace(path, name))",
}
AT_LEAST = 12  # letters of what identifies a text


def page() -> str:
    text = (ROOT / "docs" / "predict.md").read_text(encoding="utf-8")
    section = text.partition("## What is refused, and why")[2].partition("\n## ")[0]
    return section.replace("`", "").lower()


def modules() -> dict[str, ast.Module]:
    """Each module of the packages, by its path."""
    files = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in files
    }


MODULES = modules()


def values(tree: ast.AST) -> dict[str, list[ast.expr]]:
    """What each name of a module is assigned, anywhere in it."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
    return found


NAMES = {path: values(tree) for path, tree in MODULES.items()}
IMPORTED = {  # of each module the last name of the module that a name comes from
    path: {
        alias.name: (node.module or "").split(".")[-1]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for path, tree in MODULES.items()
}
STATED = {(Path(path).stem, name): value for path in MODULES for name, value in NAMES[path].items()}


def texts(node: ast.expr, path: str, seen: tuple = ()) -> list[str]:
    """The texts that an expression can be, "{}" for what is filled in."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) and node.value else []
    if isinstance(node, ast.JoinedStr):
        return ["".join(part(value, path, seen) for value in node.values)]
    if isinstance(node, ast.Name) and node.id not in seen:
        elsewhere = STATED.get((IMPORTED[path].get(node.id), node.id), [])
        known = NAMES[path].get(node.id) or elsewhere
        return [text for value in known for text in texts(value, path, (*seen, node.id))]
    if isinstance(node, ast.IfExp):
        return texts(node.body, path, seen) + texts(node.orelse, path, seen)
    if isinstance(node, ast.BinOp):
        parts = [texts(side, path, seen) or ["{}"] for side in (node.left, node.right)]
        return [one + other for one in parts[0] for other in parts[1]]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        filled = texts(node.func.value, path, seen)  # of text.format(...)
        bare = [text for text in filled if len(clause(text)) < AT_LEAST]
        inside = [text for given in node.args for text in texts(given, path, seen)]
        return [text for text in filled if text not in bare] + (inside if bare else [])
    return []


def part(value: ast.expr, path: str, seen: tuple) -> str:
    """A part of an f-string: a named text that is filled there stands for itself."""
    if isinstance(value, ast.Constant):
        return value.value
    inside = texts(value.value, path, seen) if isinstance(value.value, ast.Call) else []
    return inside[0] if inside else "{}"


def told(path: str, tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """(what raises or returns a sentence, its texts) of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called.removesuffix(".uses") in TOLD or called.endswith(".refuses"):
                yield ast.unparse(node), [t for a in node.args[:1] for t in texts(a, path)]
        if isinstance(node, ast.FunctionDef) and (path, node.name) in RETURNED:
            for back in ast.walk(node):
                if isinstance(back, ast.Return) and (found := texts(back.value, path)):
                    yield ast.unparse(back), found


def sentences() -> Iterator[tuple[str, str]]:
    """(where, text) of each sentence that ends a prediction; "" for one that nothing here knows."""
    for path, tree in MODULES.items():
        if path not in WRONG_INPUT:
            for what, found in told(path, tree):
                words = [] if what in FROM_ELSEWHERE else found
                yield from ((f"{path}: {what}", text) for text in words or [""])


def clause(text: str) -> str:
    """The first part of a text that stands in each of its sentences, without what is filled in."""
    parts = [part.strip(" ()").lower() for part in re.split(r"\{[^}]*\}|[:,;]", text)]
    return next((part for part in parts if len(part) >= AT_LEAST), text.strip().lower())


def begins(text: str, known: tuple[str, ...]) -> bool:
    bare = re.sub(r"\{[^}]*\}", "{}", text)
    return bare.startswith(known)


def test_every_sentence_is_in_the_page_or_told_apart():
    written, found = page(), list(sentences())
    assert len(found) > 150
    missing = [
        where
        for where, text in found
        if text and clause(text) not in written
        if not begins(text, ASKED_WRONGLY + OF_THE_SCRIPT)
    ]
    assert missing == []


def test_sentences_whose_words_come_from_elsewhere_are_known():
    unknown = {where.partition(": ")[2] for where, text in sentences() if not text}
    assert {what for what in unknown if "suggest(" not in what} == FROM_ELSEWHERE


def test_nothing_is_told_apart_for_nothing():
    """Neither a module without a sentence, nor a sentence that nobody says or that is refused."""
    assert [path for path in WRONG_INPUT if not list(told(path, MODULES[path]))] == []
    found, written = [text for _, text in sentences()], page()
    for known in ASKED_WRONGLY + OF_THE_SCRIPT:
        said = [text for text in found if begins(text, (known,))]
        assert said and not all(clause(text) in written for text in said), known


def test_texts_without_a_place_that_raises_them_are_none():
    """A refusal that nobody raises any more would stand in the page for nothing."""
    used = {text for _, text in sentences()}
    stated = NAMES["fake_cuda/refusals.py"]
    texts_of = {text for name in stated for text in texts(ast.Name(name), "fake_cuda/refusals.py")}
    assert {text for text in texts_of - used if len(clause(text)) >= AT_LEAST} <= {
        "the run uses {}"
    }


@pytest.mark.parametrize(
    "names", [settings.REFUSED, settings.REFUSED_OPTIMIZERS, ranks.DEEPSPEED], ids=str
)
def test_the_page_lists_settings_that_are_refused(names):
    assert [name for name in names if name not in page()] == []
