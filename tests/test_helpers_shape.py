"""The shape of the package: public names, and the private names it leans on.

The canary does not import helpers, so that it can speak when a new torch has broken them.
"""

import ast
import importlib.metadata
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from test_private_names import find

PACKAGE = Path(__file__).parents[1] / "helpers"
MODULES = sorted(path.stem for path in PACKAGE.glob("[!_]*.py"))


def test_public_names_are_importable_and_hide_no_module():
    helpers = importlib.import_module("helpers")
    expected = """
        device describe supports gpu Run record load compare measure free gib Workload
        text_classification language_modelling train predict Prediction show
    """
    assert set(expected.split()) <= set(helpers.__all__)
    for name in helpers.__all__:
        assert hasattr(helpers, name), name
    for found in pkgutil.iter_modules([str(PACKAGE)]):
        if found.name != "__main__":  # importing that one is running it
            assert inspect.ismodule(getattr(helpers, found.name, None)), f"{found.name} is hidden"


def test_importing_it_loads_none_of_the_libraries_it_uses():
    ask = "import helpers, sys; print(*{name.split('.')[0] for name in sys.modules})"
    run = subprocess.run(
        [sys.executable, "-c", ask], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    heavy = {"torch", "transformers", "datasets", "accelerate", "peft", "pandas", "numpy"}
    assert not {*heavy, "matplotlib", "fake_cuda"} & set(run.stdout.split())


@pytest.mark.parametrize("module", MODULES)
def test_public_functions_and_classes_say_what_they_do(module):
    # Read from the source: a dataclass without a docstring is given one when it is made.
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    public = [n for n in tree.body if isinstance(n, kinds) and not n.name.startswith("_")]
    silent = [node.name for node in public if not ast.get_docstring(node)]
    assert ast.get_docstring(tree) and not silent, f"{module}: without a docstring: {silent}"


def test_public_functions_are_typed():
    helpers = importlib.import_module("helpers")
    for name in set(helpers.__all__) - {"show"}:
        value = getattr(helpers, name)
        if inspect.isfunction(value):
            hints = inspect.signature(inspect.unwrap(value))
            assert hints.return_annotation is not inspect.Signature.empty, name


# ------------------------------------------------------------------------------------------- canary
def test_a_module_still_keeps_its_tensors_in_two_dictionaries():
    module = torch.nn.BatchNorm1d(1)
    assert set(module._parameters) == {"weight", "bias"} and "running_mean" in module._buffers


def test_the_profiler_still_logs_the_allocator():
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
        torch.ones(1000)
    ones, end = profile.profiler.kineto_results.experimental_event_tree()
    start = ones.children[0].children[0]
    assert [e.extra_fields.alloc_size for e in (start, end)] == [4000, -4000]
    assert start.extra_fields.ptr == end.extra_fields.ptr
    assert 0 < start.start_time_ns < end.start_time_ns


def test_the_fused_attention_kernels_still_have_shapes_without_a_gpu():
    with find("torch._subclasses.fake_tensor").FakeTensorMode():
        q = torch.ones(2, 4, 32, 64, dtype=torch.float16)
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        assert flash(q, q, q, 0.0, False)[0].shape == q.shape
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        assert efficient(q, q, q, None, True)[0].shape == q.shape


def test_a_version_outside_of_the_range_is_one_sentence(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: ["torch>=999", "pytest>99; x"])
    with pytest.raises(ImportError, match=r"torch .* is here, .* needs >=999: run make install"):
        importlib.import_module("helpers").refuse_other_versions()
