"""Grouped products of a mixture's experts: bytes and operations by hand, and a CPU's real run."""

import textwrap

import pytest
import torch
import torch.nn.functional as F

from fake_cuda import simulate
from fake_cuda.card import Card
from fake_cuda.scripts import Script
from helpers import memory
from helpers.memory import measure

RATES = {"fp32": 67e12, "tf32": 495e12, "fp16": 989e12, "bf16": 989e12}
H100 = Card("H100", (9, 0), 132, 3.35e12, RATES)
A100 = Card("A100", (8, 0), 108, 1.555e12, RATES)
EXPERTS, ROWS, INNER, COLUMNS = 8, 1024, 512, 768
HALVES = (torch.bfloat16, torch.float16)


class Calls(torch.nn.Module):
    def forward(self, function, *args, **options):
        return function(*args, **options)


def step(dtype, product=F.grouped_mm, a=(ROWS, INNER), b=(EXPERTS, INNER, COLUMNS)):
    """A pass forward and backward of one grouped product."""

    def run():
        offsets = torch.arange(1, EXPERTS + 1, dtype=torch.int32) * (ROWS // EXPERTS)
        one, other = (torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in (a, b))
        out = Calls()(product, one, other, offs=offsets if min(len(a), len(b)) == 2 else None)
        out.backward(torch.zeros_like(out))

    return run


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("product", [F.grouped_mm, torch._grouped_mm])
def test_bytes_are_those_of_the_matrices_and_of_what_the_kernel_takes(dtype, product):
    """At the peak both matrices, both gradients, the result and its gradient. Where one kernel
    does it, its arguments and descriptors; else cuBLAS's workspace, one for each thread."""
    values = 2 * (ROWS * INNER + EXPERTS * INNER * COLUMNS + ROWS * COLUMNS)
    plain = values * dtype.itemsize + 512  # the offsets
    one_kernel = {torch.bfloat16: 512 + 4 * 128 * 132}
    for card, workspace in ((H100, 32 * 2**20), (A100, 8 * 2**20 + 2**17)):
        more = one_kernel.get(dtype) if card is H100 else None
        found = simulate(step(dtype, product), card).peak_allocated
        assert found == plain + (more or 2 * workspace)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_real_run_on_this_cpu_needs_as_much(dtype):
    memory.free()
    with measure() as usage:
        step(dtype)()
    found = simulate(step(dtype), None).peak_allocated
    # A CPU with instructions for bf16 packs a matrix of an expert for them (oneDNN's scratchpad).
    packed = INNER * COLUMNS * dtype.itemsize if dtype == torch.bfloat16 else 0
    own = usage.peak_allocated - usage.start
    assert 0.999 * found <= own <= 1.001 * found + packed


SHAPES = {
    "rows of each": ((ROWS, INNER), (EXPERTS, INNER, COLUMNS)),
    "inner side of each": ((INNER, ROWS), (ROWS, COLUMNS)),
    "columns of each": ((EXPERTS, COLUMNS, INNER), (INNER, ROWS)),
    "a batch": ((EXPERTS, ROWS // EXPERTS, INNER), (EXPERTS, INNER, COLUMNS)),
}


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
def test_the_products_are_those_of_all_rows(kind, dtype):
    for card in (H100, A100):
        time = simulate(step(dtype, torch._grouped_mm, *SHAPES[kind]), card).time
        assert time.flops == pytest.approx(3 * 2 * ROWS * INNER * COLUMNS)
        assert ("an equal share" in time.note) == (kind != "a batch")


def test_a_result_has_rows_at_multiples_of_16_bytes():
    """As on this CPU, whose checks and layout CUDA shares (GroupedMMUtils.h)."""
    seen = []

    def narrow():
        offsets = torch.full((4,), 8, dtype=torch.int32)
        weights = torch.zeros(4, 20, 16, dtype=torch.float16).mT
        seen.append(torch._grouped_mm(torch.zeros(8, 16, dtype=torch.float16), weights, offsets))

    narrow()
    simulate(narrow, H100)
    assert seen[0].stride() == seen[1].stride() == (24, 1)


@pytest.mark.parametrize(
    ("one", "other"), [((64, 15), (4, 15, 16)), ((64, 16), (4, 16, 15)), ((64, 16), (4, 32, 16))]
)
def test_what_torch_refuses_stays_refused(one, other):
    def run():
        offsets = torch.full((4,), 64, dtype=torch.int32)
        torch._grouped_mm(*(torch.zeros(shape).half() for shape in (one, other)), offsets)

    for run_it in (run, lambda: simulate(run, H100)):
        with pytest.raises(RuntimeError, match="multiple of 16 bytes|must match"):
            run_it()


MIXTURE = """
    import torch
    import torch.nn.functional as F
    shapes = (8, 64, 96), (8, 96, 64)
    up, down = (torch.nn.Parameter(torch.randn(n).cuda().{type}()) for n in shapes)
    router = torch.nn.Linear(64, 8).cuda().{type}()
    optimizer = torch.optim.SGD([up, down, *router.parameters()])
    for _ in range(3):
        x = torch.randn(512, 64, device="cuda").{type}()
        weight, chosen = router(x).softmax(-1).topk(2)
        order = chosen.flatten().argsort()
        counts = {count}
        ends = counts.cumsum(0).to(torch.int32)
        hidden = F.silu(F.grouped_mm(x[order // 2], up, offs=ends))
        out = torch._grouped_mm(hidden, down, offs=ends) * weight.flatten()[order, None]
        torch.zeros_like(x).index_add(0, order // 2, out).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    "count",
    [
        "torch.histc(chosen.int(), bins=8, min=0, max=7)",
        "chosen.flatten().bincount(minlength=8)",
        "torch.bincount(chosen.flatten(), minlength=8)",
    ],
)
@pytest.mark.parametrize("kind", ["bfloat16", "half", "float"])
def test_a_script_counts_its_tokens_and_takes_grouped_products(tmp_path, monkeypatch, count, kind):
    monkeypatch.chdir(tmp_path)
    text = textwrap.dedent(MIXTURE).format(count=count, type=kind)
    (tmp_path / "train.py").write_text(text)
    found = simulate(Script(str(tmp_path / "train.py"), seconds=60), card=H100)
    size = 4 if kind == "float" else 2
    assert found.peak_by_category["parameters"] == pytest.approx(2 * 8 * 64 * 96 * size, rel=0.02)
    products = (3 + 2) * 2 * 1024 * 64 * 96 + 2 * 2 * 512 * 64 * 8  # no gradient for the input
    assert found.time.model_flops == pytest.approx(products)
