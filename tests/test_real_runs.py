"""The trace against logs of real cards: the same allocations, in the same order."""

import csv
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

from evidence import libraries
from evidence.decoder import Student
from evidence.decoder_training import simulated as simulated_on
from evidence.sources import course
from fake_cuda import MiB, Versions, logs, simulate
from fake_cuda.card import Card
from fake_cuda.ordered import told
from fake_cuda.scratch import scratch, workspace

DATA = Path(__file__).parents[1] / "data"
MEASURED = {
    (row["set"], row["run"], row["quantity"]): int(row["measured"])
    for row in csv.DictReader((DATA / "measurements" / "peaks.csv").open())
}
aten = torch.ops.aten
NIUHUANG, SIDSOC12, LINYUN = course.NIUHUANG, course.SIDSOC12, course.LINYUN


def rounded(size: int) -> int:
    return -(-size // 512) * 512


KEPT = {}


def simulated(student: Student, card: Card = course.UNKNOWN, torch: str | None = None):
    key = student, repr(card), torch  # a card's rates are a dictionary, which has no hash
    if key not in KEPT:
        with libraries.behaving(libraries.of(torch=torch)):
            KEPT[key] = simulated_on(student, card)
    return KEPT[key]


def test_a_run_from_an_empty_allocator_has_the_peaks_of_the_card():
    trained = simulated(NIUHUANG["training, length 200"])
    for quantity in ("allocated", "reserved"):
        real = MEASURED["course-niuhuang", "training, length 200", quantity]
        found = getattr(trained, f"peak_{quantity}")
        assert found == pytest.approx(real, rel=0.005)


def test_a_forward_pass_takes_what_the_card_took():
    for run in ("forward, length 200", "forward, length 100"):
        found = course.peaks(NIUHUANG[run])
        real = {q: MEASURED["course-niuhuang", run, q] for q in ("allocated", "reserved")}
        assert found["reserved"] == real["reserved"]
        assert found["allocated"] == pytest.approx(real["allocated"], abs=512)


@pytest.mark.parametrize(
    "student, where, file",
    [
        (NIUHUANG["training, length 200"], (), "niuhuang_small_200_training_fp32"),
        (NIUHUANG["training, length 200, bf16"], (), "niuhuang_small_200_training_bf16"),
        (NIUHUANG["forward, length 200, bf16"], (), "niuhuang_small_200_forward_bf16"),
        (SIDSOC12["forward, length 128"], (course.HOPPER,), "sidsoc12_2.7b_128_forward_fp32"),
        (
            LINYUN["training, length 128, bf16"],
            (course.RTX_PRO_6000, "2.11"),
            "linyun_3.4b_128_training_bf16",
        ),
    ],
)
def test_each_allocation_is_one_of_the_card_in_its_order(student, where, file):
    """The log also has the few KB with which index_put sorts, and no peak shows. Logs that begin
    within a run end with the simulated one."""
    log = logs.read_log(DATA / "cuda_logs" / f"{file}.npz")
    real = [rounded(size) for action, _, size in log.entries if action == logs.ALLOC]
    found = [rounded(size) for _, size in simulated(student, *where).log if size > 0]
    there, count = reversed(real), 0
    for size in reversed(found):
        if size not in there:  # which also moves on, to behind the one that is equal
            break
        count += 1
    whole = student.whole and "sidsoc12" not in file
    assert count >= 0.995 * len(real) and (count == len(found)) == whole


def test_cublas_workspace_by_card_and_version():
    small, large = 8519680, 32 * MiB
    for version in ("2.6.0", "2.11.0+cu128"):
        assert workspace((9, 0), Versions(version)) == large
        assert workspace((8, 0), Versions(version)) == small
        assert workspace((10, 0), Versions(version)) == small
        assert workspace((12, 0), Versions(version)) == small
    for version in ("2.12.0", "2.13.0+cpu", "2.14.1"):
        assert workspace((8, 9), Versions(version)) == small
        assert {workspace(c, Versions(version)) for c in ((9, 0), (10, 0), (12, 0))} == {large}


def test_each_thread_takes_a_workspace_with_its_first_product():
    def forward(backward):
        weight = torch.nn.Parameter(torch.empty(512, 512))
        loss = (torch.empty(512, 512) @ weight).sum()
        if backward:
            loss.backward()
        return loss

    for backward in (False, True):
        sizes = [size for _, size in simulate(partial(forward, backward)).log]
        assert sizes.count(8519680) == 1 + backward
    assert 8519680 not in [size for _, size in simulate(lambda: torch.empty(9) + 1).log]


def test_since_torch_2_15_each_product_gives_its_workspace_back(monkeypatch):
    """Unless the environment says that it is kept (CublasHandlePool.cpp)."""

    def products():
        one = torch.empty(512, 512)
        for _ in range(3):
            one = one @ one
        return one

    def log(version: str) -> list[int]:
        return [n for _, n in simulate(products, versions=Versions(version)).log]

    monkeypatch.delenv("TORCH_CUBLAS_WORKSPACE_CACHE", raising=False)
    new, old = log("2.15.0"), log("2.14.1")
    assert (new.count(8519680), new.count(-8519680)) == (3, 3)
    assert (old.count(8519680), old.count(-8519680)) == (1, 0)
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
    assert log("2.15.0") == old


def test_clipping_takes_all_gradients_at_once(monkeypatch):
    """As on CUDA, where all tensors of a list have one kernel (torch/nn/utils/clip_grad.py)."""
    multiply, seen = torch._foreach_mul_, []

    def count(tensors, factor):
        seen.append(len(tensors))
        multiply(tensors, factor)

    def clip():
        weights = [torch.nn.Parameter(torch.empty(1000)) for _ in range(20)]
        for weight in weights:
            weight.grad = torch.empty(1000)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)

    monkeypatch.setattr(torch, "_foreach_mul_", count)
    simulate(clip)
    assert seen == [20]


def test_gradients_are_added_in_place_where_nobody_else_holds_them():
    def train():
        weight = torch.nn.Parameter(torch.empty(1024, 1024))
        x = torch.empty(1024, 1024) @ weight
        (x.exp() * 2 + x.sigmoid() * 3).sum().backward()

    cuda, cpu = (
        sum(size == 4 * MiB for _, size in simulate(train, card).log) for card in ((8, 0), None)
    )
    with torch.profiler.profile(profile_memory=True) as profile:
        train()
    events = profile.profiler.kineto_results.events()
    measured = sum(e.name() == "[memory]" and e.nbytes() == 4 * MiB for e in events)
    assert cuda == cpu == measured


def test_inference_mode_takes_composite_operations_apart():
    def infer(guard, on):
        with guard(), torch.autocast("cuda", torch.bfloat16, enabled=on):
            return torch.einsum("bij,bkj->bik", torch.empty(4, 64, 64), torch.empty(4, 64, 64))

    for on in (True, False):
        plain, inference = (
            [size for _, size in simulate(partial(infer, guard, on)).log]
            for guard in (torch.no_grad, torch.inference_mode)
        )
        assert plain == inference


@pytest.mark.parametrize("guard, copies", [(torch.enable_grad, 1), (torch.inference_mode, 3)])
def test_autocast_casts_a_weight_of_einsum_once(guard, copies):
    """The CPU's does not know einsum and casts the moved weight for each product."""

    def multiply():
        weight = torch.nn.Parameter(torch.empty(640, 512))
        with guard(), torch.autocast("cuda", torch.bfloat16):
            for _ in range(3):
                torch.einsum("bi,oi->bo", torch.empty(64, 512), weight)

    assert [size for _, size in simulate(multiply).log].count(2 * 640 * 512) == copies


A100, H100 = Card("A100", (8, 0), 108), Card("H100", (9, 0), 132)


def test_kernels_own_memory():
    def grads(*shape, dtype=torch.bfloat16):
        return torch.empty(*shape, dtype=dtype, device="meta").transpose(1, 2)

    q, k = grads(2, 1000, 8, 96), grads(2, 1000, 2, 96)
    flash = aten._scaled_dot_product_flash_attention_backward.default
    rows = 4 * 2 * 8 * 1024
    assert scratch(flash, (q, q, q, q), A100) == [rows, rows * 96]
    assert scratch(flash, (q, q, k, k), A100) == [rows, rows * 96, *2 * [2 * 8 * 1000 * 96 * 2]]
    efficient = aten._scaled_dot_product_efficient_attention_backward.default
    q = grads(2, 1000, 8, 64, dtype=torch.float32)
    assert scratch(efficient, (q, q, q, q), A100) == [4 * 16000, 16 * 16 * (4 * 64 * 64 + 16)]
    # Wider heads than a block is high: keys and values in pieces, 200 of all heads at most.
    q, wide = grads(2, 1000, 8, 256), 4 * 64 * (256 + 256)
    whole = 8 * 4 * (4 * 128 * 64 + 16)
    assert scratch(efficient, (q, q, q, q), A100) == [4 * 16000, 16 * (whole + 12 * wide)]
    q, wide = grads(2, 1000, 8, 128), 4 * 64 * (128 + 128)
    on_t4, on_a100 = 16 * 2 * (4 * 64 * 64 + 16), 8 * (4 * 128 * 128 + 16)
    assert scratch(efficient, (q, q, q, q), A100) == [4 * 16000, 16 * on_a100]
    for order, pieces in ((False, 12), (True, 1)):
        with told(order):
            found = scratch(efficient, (q, q, q, q), Card("T4", (7, 5), 40))
        assert found == [4 * 16000, 16 * (on_t4 + pieces * wide)]
    # The log of the 423M model at length 256 has these two at every norm: 8 MiB, and 32 bytes.
    x = torch.empty(4, 256, 1024, device="meta")
    total = aten.sum.dim_IntList
    assert scratch(total, (x, [0, 1], True), A100) == [8 * MiB, 32]
    assert scratch(total, (x, [2]), A100) == scratch(total, (x.mT, [0, 1]), A100) == []
    x = torch.empty(8192, 4096, device="meta")
    found = [scratch(total, (x, [0]), card)[0] for card in (A100, H100)]
    assert found == [2 * 54 * MiB, 2 * 66 * MiB]


def test_texts_end_to_end_keep_128_rows_between_them():
    """The formulas of mha_varlen_bwd (aten/.../transformers/cuda/flash_attn/flash_api.cpp)."""
    own = torch.ops.torch_attn._varlen_attn_backward.default
    q = torch.empty(1000, 8, 96, dtype=torch.bfloat16, device="meta")
    k, borders = q[:, :2], torch.empty(4, dtype=torch.int32, device="meta")  # three texts
    sums = 4 * 8 * (1000 + 3 * 128)
    assert scratch(own, (q, q, q, q, q, None, borders), A100) == [sums, sums * 96]
    expanded = 2 * [2 * 1000 * 8 * 96]  # grouped heads: gradients of all keys and values
    assert scratch(own, (q, q, k, k, q, None, borders), A100) == [sums, sums * 96, *expanded]
    spread = torch.empty(1, dtype=q.dtype, device="meta").expand(q.shape)  # the gradient of a sum
    found = scratch(own, (spread, q, q, q, q, None, borders), A100)
    assert found == [2 * 1000 * 8 * 96, sums, sums * 96]

    def layer():
        options = {"dtype": torch.bfloat16, "requires_grad": True}
        q, k, v = (torch.randn(1000, 8, 96, **options) for _ in range(3))
        ends = torch.tensor([0, 300, 512, 1000], dtype=torch.int32)
        varlen_attn(q, k, v, ends, ends, 488, 488, window_size=(-1, 0)).sum().backward()

    sizes = [size for _, size in simulate(layer).log]
    assert sums in sizes and sums * 96 in sizes


def test_a_transform_of_two_dimensions_takes_a_work_area():
    transform = aten._fft_c2c.default
    for shape, times in (((512, 729), 1), ((3072, 1024), 2)):
        x = torch.empty(shape, dtype=torch.complex64, device="meta")
        assert scratch(transform, (x, [0, 1], 0, True), A100) == [times * 8 * x.numel()]
        assert scratch(transform, (x, [1], 0, True), A100) == []

    def update():  # as FourierFT does: a spectrum of real numbers, its inverse, a gradient
        spectrum = torch.zeros(3072, 1024, requires_grad=True)
        torch.fft.ifft2(spectrum).real.sum().backward()

    assert [size for _, size in simulate(update).log].count(2 * 8 * 3072 * 1024) == 2
