"""A card that is not there, as Inductor finds it while it plans a graph.

Its properties are told, tensors claim to lie on it, and no kernel is written. It leans on private
names of torch._inductor, which is imported when a graph is compiled and not before.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from .card import Card
from .scratch import THREADS

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def copied(value):
    """A fake tensor of the same shape, which may claim another device."""
    if not isinstance(value, FakeTensor):
        return value
    with value.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)


def claim(place: torch.device, module: torch.fx.GraphModule, inputs: tuple | list = ()) -> None:
    """Let a graph's tensors claim to lie on the card, or on the CPU again.

    Inductor chooses its ways by it. Claimed afterwards: a build for the CPU alone cannot compute
    with fake tensors of CUDA.

    Args:
        place: where they claim to lie.
        module: the graph, changed in place.
        inputs: fake tensors that it is given, changed in place.
    """

    def moved(device: torch.device) -> torch.device:
        return place if device.type in ("cpu", "cuda") else device

    parts = [part for part in module.modules() if isinstance(part, torch.fx.GraphModule)]
    nodes = [node for part in parts for node in part.graph.nodes]  # a mask is a graph of its own
    for node in nodes:
        node.args = tree_map_only(torch.device, moved, node.args)
        node.kwargs = tree_map_only(torch.device, moved, node.kwargs)
    values = [node.meta.get("val") for node in nodes]
    for tensor in tree_leaves((inputs, values)):
        if isinstance(tensor, FakeTensor):
            tensor.fake_device = place


def _on_cpu(update: Callable) -> Callable:
    """`FakeTensorUpdater.incremental_update`, which computes anew what Inductor changed."""

    def updated(updater) -> int:
        module = getattr(updater, "gm", updater)  # until torch 2.12 it holds the graph itself
        claim(CPU, module)
        try:
            return update(updater)
        finally:
            claim(CUDA, module)

    return updated


@contextmanager
def found(card: Card | None, moved: list[int]) -> Iterator[None]:
    """Inside of it Inductor finds a card and Triton for it, or a CPU, and writes no kernel.

    Args:
        card: whose properties it is told; None for a CPU.
        moved: takes the bytes that each kernel reads and writes.
    """
    from torch._inductor import cpu_vec_isa
    from torch._inductor.codegen import cpp
    from torch._inductor.runtime.hints import DeviceProperties

    changes = [
        (cpu_vec_isa, "pick_vec_isa", lambda: cpu_vec_isa.invalid_vec_isa),  # asks the C++ compiler
        (cpp.CppScheduling, "define_kernel", lambda *_, **__: "cpp_kernel"),
    ]
    if card:
        changes += _answers(card) + _kernels(moved)
    DeviceProperties.create.cache_clear()
    with ExitStack() as stack:
        for owner, name, value in changes:
            stack.enter_context(patch.object(owner, name, value))
        yield
    DeviceProperties.create.cache_clear()


def _answers(card: Card) -> list[tuple[object, str, object]]:
    """What answers Inductor's questions about the card: (owner, name, what stands there)."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import scheduler
    from torch._inductor.fx_passes import reinplace
    from torch._inductor.fx_utils import FakeTensorUpdater

    facts = _properties(card)
    updated = _on_cpu(FakeTensorUpdater.incremental_update)
    return [
        (torch.cuda, "get_device_properties", lambda *_: facts),
        (torch.cuda, "get_device_capability", lambda *_: card.capability),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "get_rng_state", lambda *_: torch.empty(16, dtype=torch.uint8)),
        (torch.cuda, "set_rng_state", lambda *_: None),
        (CudaInterface, "get_device_properties", staticmethod(lambda *_: facts)),
        (CudaInterface, "get_compute_capability", staticmethod(lambda *_: facts.compute)),
        (scheduler, "has_triton", lambda: True),
        # Tries out a copy on fake tensors, and would look for the card.
        (reinplace, "_inplace_generalized_scatter", lambda into, *_: into),
        (FakeTensorUpdater, "incremental_update", updated),
    ]


def _kernels(moved: list[int]) -> list[tuple[object, str, object]]:
    """What stands in the place of the kernels' writers: each kernel leaves its bytes in `moved`."""
    from torch._inductor.codegen import triton
    from torch._inductor.codegen import triton_combo_kernel as combos
    from torch._inductor.select_algorithm import TritonTemplate
    from torch._inductor.virtualized import V

    def named(self, source, nodes, kernel) -> str:
        parts = getattr(kernel, "sub_kernels", [kernel])  # several in one, for lists of tensors
        with V.set_kernel_handler(kernel):
            moved.append(sum(int(part.estimate_kernel_num_bytes()) for part in parts))
        return f"kernel_{len(moved) - 1}"

    return [
        (triton.TritonKernel, "codegen_kernel", lambda *_, **__: ""),
        (triton.TritonKernel, "call_kernel", _launch),
        (combos.ComboKernel, "codegen_kernel", lambda *_, **__: ""),
        (combos.ComboKernel, "call_kernel", _launch_several),
        (triton.TritonScheduling, "define_kernel", named),
        (TritonTemplate, "maybe_append_choice", _written),
    ]


def _written(template, choices: list, *, input_nodes: list, layout, **_) -> None:
    """In the place of a kernel that a template writes (flex attention's): a call by its name, whose
    result, as the template's, is one buffer of this layout; what else it fills was made before."""
    choices.append(_named(template.name).bind(input_nodes, layout))


@cache
def _named(name: str):
    """A call of a kernel by its name, which Inductor registers once."""
    from torch._inductor.select_algorithm import ExternKernelChoice

    return ExternKernelChoice(lambda *_, **__: None, name=name)


def _properties(card: Card) -> SimpleNamespace:
    """What Inductor asks of a card (`DeviceProperties.create`, `rand_offset` of random numbers)."""
    major, minor = card.capability
    return SimpleNamespace(
        name=card.name,
        major=major,
        minor=minor,
        compute=10 * major + minor,
        multi_processor_count=card.sms,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=THREADS.get(card.capability, 2048),
        max_threads_per_block=1024,
        warp_size=32,
        gcnArchName="",
        total_memory=card.memory,
    )


def _launch(kernel, name: str, node=None, deallocate_ws: bool = True) -> None:
    """In the place of a launch: its workspace, and the number of its kernel."""
    from torch._inductor.virtualized import V

    wrapper = _wrapper(V)
    kernel.args.python_argdefs()  # settles which workspaces it has
    for space in kernel.args.workspace_args:
        wrapper.generate_workspace_allocation(space)
    wrapper.writeline(f"{name}()")
    if deallocate_ws:  # else what reads it comes later, and frees it
        kernel.deallocate_workspaces()


def _launch_several(kernel, name: str) -> None:
    """The same of a kernel that does the work of several, which have no workspace."""
    from torch._inductor.virtualized import V

    _wrapper(V).writeline(f"{name}()")


def _wrapper(virtual):
    """What writes the function of the graph that is planned now."""
    return virtual.graph.wrapper_code
