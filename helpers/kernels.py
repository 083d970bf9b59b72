"""Kernels of other packages with which a model may be computed: Liger's, and those of attention
that is linear."""

import ast
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

PACKAGES = {  # by the names of their modules
    "causal_conv1d": "causal-conv1d",
    "fla": "flash-linear-attention",
    "mamba_ssm": "mamba-ssm",
}


def missing_for_liger() -> str:
    """The package that its kernels want and that is not here; "" if all are."""
    return next((name for name in ("triton", "liger_kernel") if not _installed(name)), "")


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def why_no_liger(model_type: str) -> str:
    """Why `use_liger_kernel=True` would spare a language model no logits here; "" if it does.

    Args:
        model_type: as a configuration names it, such as "llama".
    """
    if missing := missing_for_liger():
        return f"the package {missing} is not installed here"
    try:
        apply = _applied_by_liger(model_type)
    except ImportError as error:  # of another time than torch or transformers
        return f"the package liger_kernel cannot be imported here: {error}"
    if apply is None:
        return f"Liger has none for {model_type}"
    if broken := _broken(apply):
        return broken
    fused = inspect.signature(apply).parameters.get("fused_linear_cross_entropy")
    return "" if fused and fused.default else f"Liger has no fused loss for {model_type}"


def kernels_note(config: PreTrainedConfig, liger: bool) -> str:
    """What has to be said of a model's kernels: of Liger's, if they are asked for, and of those
    that transformers takes where their packages are installed, and here are not.

    Raises:
        ValueError: with Liger's training would end in an error.
    """
    said = liger and _about_liger(config.model_type), _without_packages(config)
    return " ".join(filter(None, said))


def _applied_by_liger(model_type: str) -> Callable | None:
    """Liger's function that changes such models; None where it has none."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    return MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)


def _about_liger(model_type: str) -> str:
    apply = _applied_by_liger(model_type)
    if apply is None:
        return f"Liger has no kernels for {model_type}: the flag changes nothing."
    if broken := _broken(apply):
        raise ValueError(f"use_liger_kernel=True would end in an error, {broken}: leave it out")
    return ""


def _broken(apply: Callable) -> str:
    """Why Liger's function for a kind of model cannot run, "" if it can: what it imports from Liger
    when it is called may ask transformers for what was there at another time."""
    found = ast.walk(ast.parse(inspect.getsource(apply)))
    names = {node.module for node in found if isinstance(node, ast.ImportFrom)}
    for name in sorted(name for name in names if name.startswith("liger_kernel")):
        try:
            importlib.import_module(name)
        except ImportError as error:
            why = str(error).partition(" from ")[0]
            return f"Liger's {name.rpartition('.')[2]} does not fit this transformers ({why})"
    return ""


def _without_packages(config: PreTrainedConfig) -> str:
    """Its code names each package beside the operations of torch's that stand in for its kernel."""
    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model is None:
        return ""
    code = inspect.getsource(sys.modules[model.__module__])
    named = set(re.findall(r'with_fallback\(\s*"\w+",\s*"(\w+)"', code))
    missing = [p for name, p in PACKAGES.items() if name in named and not _installed(name)]
    said = (
        f"Without {' and '.join(missing)}, as here, transformers computes its layers by torch's "
        "operations; with them a step takes other memory and other time."
    )
    return said if missing else ""
