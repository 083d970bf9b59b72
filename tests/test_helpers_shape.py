"""The shape of the package: who imports whom, public names, and the private names it leans on.

The canary does not import helpers, so that it can speak when a new torch has broken them.
"""

import ast
import importlib.metadata
import inspect
import pkgutil
from pathlib import Path

import pytest
import torch

PACKAGE = Path(__file__).parents[1] / "helpers"
MODULES = sorted(path.stem for path in PACKAGE.glob("[!_]*.py"))
# A module may import those to the right of it and no other: arrows run one way, without circles.
ARROWS = {
    "hardware": set(),
    "runs": {"hardware"},
    "memory": {"hardware"},
    "workloads": {"hardware"},
    "prediction": {"hardware", "workloads", "runs"},
    "training": {"hardware", "workloads", "memory", "runs", "prediction"},
    "show": {"hardware", "runs"},
    "report": {"runs"},
    "fit": {"hardware", "workloads", "runs", "prediction"},
}


def imports(source: str, package: str = "helpers") -> set[str]:
    """The modules of `package` that a source imports, wherever in the file it does."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = ([package] if node.level else []) + (node.module or "").split(".")
            origin = [part for part in origin if part]
            names = [[*origin, alias.name] for alias in node.names]
        else:
            continue
        found |= {name[1] for name in names if name[0] == package and len(name) > 1}
    return found


def test_imports_are_found_however_they_are_written():
    source = (
        "from . import a\nfrom .b import x\nimport helpers.c\ndef f():\n from helpers import d\n"
    )
    assert imports(source + "from helpers.e import y\nimport os.path\n") == set("abcde")


@pytest.mark.parametrize("module", MODULES)
def test_arrows_run_one_way(module):
    allowed = ARROWS[module]
    assert imports((PACKAGE / f"{module}.py").read_text()) <= allowed


def test_arrows_have_no_circle():
    order = list(ARROWS)
    for at, module in enumerate(order):
        assert ARROWS[module] <= set(order[:at]), module


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
LEANED_ON = """
accelerate.state.AcceleratorState _reset_state _shared_state
accelerate.state.GradientState _reset_state _shared_state
huggingface_hub get_session try_to_load_from_cache
huggingface_hub.constants HF_HUB_OFFLINE ENDPOINT
torch.UntypedStorage _cdata
bitsandbytes.autograd._functions MatMul8bitFp MatMul8bitLt
bitsandbytes.backends.default.ops _gemm_4bit_default_impl
bitsandbytes.functional create_dynamic_map name2qmap
bitsandbytes.nn.Int8Params _quantize
bitsandbytes.nn.Params4bit _quantize
torch._C _current_graph_task_id DispatchKeySet _ExcludeDispatchKeyGuard
torch._C _len_torch_function_stack
torch._C.DispatchKey AutocastCPU
torch._C._nn _parse_to
torch._subclasses.fake_tensor FakeTensor FakeTensorMode
torch._subclasses.fake_tensor.FakeTensor fake_device
torch.ops.prim.device default
torch.autograd.graph saved_tensors_hooks save_on_cpu
torch.autograd.graph.save_on_cpu __init__
torch.library.Library _destroy impl
torch.nn.Module _apply
torch.multiprocessing spawn start_processes
torch.nn.DataParallel forward
safetensors.torch save_file
torch.nn.Parameter __new__
torch.nn.functional scaled_dot_product_attention
torch.nn.modules.module register_module_forward_pre_hook register_module_forward_hook
torch.ops.aten _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
torch.ops.aten _scaled_dot_product_attention_math
torch.ops.aten._local_scalar_dense default
torch.ops.aten._ctc_loss Tensor
torch.Tag dynamic_output_shape data_dependent_output
torch.ops.aten.bernoulli_ float
torch.optim.optimizer _foreach_supported_types _get_foreach_kernels_supported_devices
torch.optim.optimizer register_optimizer_step_pre_hook register_optimizer_step_post_hook
torch.overrides TorchFunctionMode
torch.utils._python_dispatch TorchDispatchMode _disable_current_modes
torch.utils._pytree tree_leaves tree_map
torch.cuda nvtx memory Stream Event device device_of mem_get_info
torch.accelerator current_accelerator current_stream get_memory_info
transformers Trainer TrainingArguments PrinterCallback set_seed
transformers.masking_utils find_packed_sequence_indices is_tracing
transformers.trainer clear_device_cache
transformers.utils.import_utils is_torch_cuda_available
transformers.utils generic
transformers.training_args OptimizerNames
"""


def find(path: str):
    """The object of a dotted path: the longest part that is a module, then its attributes."""
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ImportError(path)


@pytest.mark.parametrize("line", LEANED_ON.strip().splitlines())
def test_private_names_are_still_there(line):
    owner, *names = line.split()
    missing = [name for name in names if not hasattr(find(owner), name)]
    assert not missing, f"torch {torch.__version__}: {owner} no longer has {missing}"


def test_a_module_still_keeps_its_tensors_in_two_dictionaries():
    module = torch.nn.BatchNorm1d(1)
    assert set(module._parameters) == {"weight", "bias"} and "running_mean" in module._buffers


def test_the_profiler_still_logs_the_allocator():
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
        torch.ones(1000)
    events = profile.profiler.kineto_results.events()
    logged = [(e.nbytes(), e.start_ns() > 0) for e in events if e.name() == "[memory]"]
    assert logged == [(4000, True), (-4000, True)]


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
