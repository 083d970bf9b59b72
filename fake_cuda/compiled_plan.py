"""A compiled graph as Inductor plans it for a card that is not there, to be run on fake tensors.

Inductor lowers a graph, fuses and orders it, and writes a function in Python that allocates each
buffer, takes it again, frees it and launches kernels. That function is kept and run on fake
tensors; its kernels are left out, and of each only the bytes are noted that Inductor says it moves.
So what is allocated and when it is freed is the compiler's own plan, line by line.

It leans on private names of torch._inductor, which is imported when a graph is compiled and not
before; tests/test_private_names.py names those that move.
"""

import ast
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import NamedTuple

import torch

from .card import Card
from .compiled_card import CUDA, claim, copied, found
from .refusals import NotSimulated

# Checks at run time are of no use here; parts of a graph are for CUDA graphs alone. No kernel's
# blocks can be tried out: they are those with which the trials begin.
SETTINGS = dict(size_asserts=False, alignment_asserts=False, graph_partition=False)
SETTINGS["coordinate_descent_tuning"] = False
UNKNOWN = "compiled code that needs {}: leave torch.compile out, or take the default mode"


class Plan(NamedTuple):
    """A graph as it is planned.

    `call` is the function that Inductor wrote, `moved` the bytes of each of its kernels in the
    order of their numbers, and `strides` those of its results, None for what is no tensor.
    """

    call: ast.FunctionDef
    moved: list[int]
    strides: list[tuple[int, ...] | None]


class Graph(NamedTuple):
    """What Inductor is given: a graph of ATen's operations, fake inputs, and what it is for."""

    module: torch.fx.GraphModule
    inputs: list
    backward: bool
    inference: bool


def copy_of(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The graph as it is now: planning changes it."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return torch.fx.GraphModule(module, graph)


def planned(graph: Graph, card: Card | None) -> Plan:
    """Let Inductor plan a graph.

    Args:
        graph: it is changed.
        card: for which it is planned; None is a CPU.
    """
    from torch._inductor import compile_fx, config
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    inputs = [copied(x) for x in graph.inputs] if card else graph.inputs
    moved: list[int] = []
    with ExitStack() as stack:
        for context in (found(card, moved), DebugContext(), config.patch(SETTINGS)):
            stack.enter_context(context)
        compile_fx.view_to_reshape(graph.module)
        with torch.no_grad():
            mode = compile_fx.fake_tensor_prop(graph.module, inputs)
        if card:
            claim(CUDA, graph.module, inputs)
        compile_fx._recursive_record_original_output_strides(graph.module)
        stack.enter_context(V.set_fake_mode(mode))
        compile_fx._recursive_post_grad_passes(graph.module, is_inference=graph.inference)
        stack.enter_context(compile_fx.maybe_disable_comprehensive_padding(inputs))
        lowering = GraphLowering(
            graph.module,
            example_inputs=inputs,
            shape_env=mode.shape_env,
            is_inference=graph.inference,
            is_backward=graph.backward,
        )
        lowering.freeze_runtime_asserts()
        stack.enter_context(V.set_graph_handler(lowering))
        stack.enter_context(V.set_extern_kernel_nodes([]))
        lowering.run(*inputs)
        code, _ = lowering.codegen()
        return Plan(_function(code.value), moved, _strides(lowering))


def _function(code: str) -> ast.FunctionDef:
    """The function `call` of what Inductor wrote."""
    nodes = ast.walk(ast.parse(code))
    return next(n for n in nodes if isinstance(n, ast.FunctionDef) and n.name == "call")


def _strides(lowering) -> list[tuple[int, ...] | None]:
    from torch._inductor.ir import IRNode

    outputs = [x for x in lowering.graph_outputs]
    tensors = [x if isinstance(x, IRNode) and x.has_tensor_output() else None for x in outputs]
    hint = lowering.sizevars.optimization_hint
    return [x and tuple(hint(n) for n in x.get_layout().stride) for x in tensors]


class _Names(dict):
    """The global names of a plan."""

    def __init__(self, known: dict, kernel: Callable):
        super().__init__(known)
        self.kernel = kernel

    def __missing__(self, name: str):
        if name.startswith("cpp_"):
            return lambda *_: None
        if name.startswith("kernel_"):
            return lambda: self.kernel(int(name.removeprefix("kernel_")))
        if hasattr(__builtins__, name) or isinstance(__builtins__, dict) and name in __builtins__:
            raise KeyError(name)
        raise NotSimulated.uses(UNKNOWN.format(name))


def runnable(plan: Plan, kernel: Callable, extern: Callable) -> Callable:
    """A function of a list of fake tensors, which it empties, that does what the plan says.

    Args:
        plan: what Inductor wrote.
        kernel: called with the bytes that a kernel moves, in its place.
        extern: called with the name, arguments and result of a product in a library.
    """

    class Extern:
        def __getattr__(self, name: str):
            def call(*args, out=None, **options):
                if out is None:  # a convolution, whose result nobody allocated
                    return getattr(torch.ops.aten, name)(*args, **options)
                return extern(name, args, out)

            return call

    def again(tensor, shape, stride, offset=0):
        return torch.as_strided(tensor, shape, stride, offset + tensor.storage_offset())

    def empty(shape, stride, dtype):
        return torch.empty_strided(shape, stride, dtype=dtype)

    names = _Names(
        {
            "torch": _Torch(),
            "aten": torch.ops.aten,
            "inductor_ops": torch.ops.inductor,
            "_quantized": torch.ops._quantized,
            "device": lambda *_, **__: torch.device("cpu"),  # as which fake tensors run
            "extern_kernels": Extern(),
            "reinterpret_tensor": again,
            "inf": float("inf"),
            "nan": float("nan"),
            "get_raw_stream": lambda *_: 0,
            **dict.fromkeys(("empty_strided_cpu", "empty_strided_cuda"), empty),
        },
        lambda number: kernel(plan.moved[number]),
    )
    exec(compile(ast.Module([plan.call], []), "<compiled>", "exec"), names)
    return names["call"]


class _HigherOrder:
    """Random numbers that are to be drawn once more: their state is kept, and lies on the host."""

    @staticmethod
    def run_and_save_rng_state(operation, *args, **options):
        return torch.get_rng_state(), operation(*args, **options)

    @staticmethod
    def run_with_rng_state(state, operation, *args, **options):
        return operation(*args, **options)


class _Operations:
    """torch.ops, of whose operations on functions those are known that plans need."""

    higher_order = _HigherOrder()

    def __getattr__(self, name: str):
        return getattr(torch.ops, name)


class _Torch:
    """torch without a device to guard."""

    ops = _Operations()
    cuda = SimpleNamespace(_DeviceGuard=lambda *_: ExitStack(), set_device=lambda *_: None)

    def __getattr__(self, name: str):
        return getattr(torch, name)
