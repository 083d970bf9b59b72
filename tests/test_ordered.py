"""Runs that ask for the same sums each time, and what their kernels take for it."""

import os
import textwrap

import pytest
import torch
import torch.nn.functional as F

from fake_cuda import simulate
from fake_cuda.card import Card
from fake_cuda.ordered import told
from fake_cuda.scratch import scratch, workspace
from fake_cuda.scripts import Script
from helpers import language_modelling, predict

RATES = {"fp32": 19.5e12, "tf32": 156e12, "fp16": 312e12, "bf16": 312e12}
A100 = Card("A100", (8, 0), 108, 1.555e12, RATES)
H100 = Card("H100", (9, 0), 132, 3.35e12, RATES)
HEADS, LENGTH, WIDTH = 8, 2048, 64
SUMS = 4 * HEADS * LENGTH * WIDTH  # the gradient of the queries in fp32
DENSE = "flash_attn_func(p, p, p, causal=True{})"
TEXTS = "flash_attn_varlen_func(p[0], p[0], p[0], ends, ends, 1024, 1024, causal=True{})"
STEP = """
    import torch
    {before}
    from flash_attn import flash_attn_func, flash_attn_varlen_func
    ends = torch.tensor([0, 1024, 2048], device="cuda", dtype=torch.int32)
    p = torch.nn.Parameter(torch.zeros(1, 2048, 8, 64, device="cuda", dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([p])
    for _ in range(3):
        out = {call}
        out.backward(torch.zeros_like(out))
        optimizer.step()
        optimizer.zero_grad()
"""
SWITCH = "torch.use_deterministic_algorithms(True)"


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(call, before=""):
        text = textwrap.dedent(STEP).format(call=call, before=before)
        (tmp_path / "train.py").write_text(text)
        return simulate(Script(str(tmp_path / "train.py"), seconds=60), card=A100)

    return run


@pytest.mark.parametrize("before", ["", SWITCH])
@pytest.mark.parametrize(
    ("call", "splits", "sums"), [(DENSE, 14, SUMS), (TEXTS, 7, 4 * HEADS * (LENGTH + 256) * WIDTH)]
)
def test_flash_attn_adds_up_in_order_where_it_is_told(run, call, splits, sums, before):
    """A gradient of the queries for each split of the multiprocessors over all heads of all texts
    (nsplits in csrc/flash_attn/flash_api.cpp). Torch's own switch does not reach it."""
    plain, ordered, usual = (
        [size for _, size in run(call.format(given), before).log]
        for given in (", deterministic=False", ", deterministic=True", "")
    )
    assert plain == usual
    assert ordered == [splits * size if abs(size) == sums else size for size in plain] != plain


@pytest.mark.parametrize("call", [DENSE, TEXTS])
def test_alibi_takes_nothing_but_its_slopes(run, call):
    plain, biased = (
        run(call.format(more)).log for more in ("", ", alibi_slopes=torch.zeros(8, device='cuda')")
    )
    rest = [size for _, size in biased]
    for _, size in plain:
        rest.remove(size)
    assert {abs(size) for size in rest} == {4 * 8}


@pytest.mark.parametrize("slopes", ["torch.zeros(4)", "torch.zeros(8).half()"])
def test_slopes_of_another_kind_are_the_scripts_own_error(run, slopes):
    with pytest.raises(ValueError, match="fails by itself.*(ALiBi|alibi)"):
        run(DENSE.format(f", alibi_slopes={slopes}.cuda()"))


def test_pages_of_keys_are_refused_by_name(run):
    pages = ", block_table=torch.zeros(2, 8, device='cuda', dtype=torch.int32)"
    with pytest.raises(
        ValueError, match="uses flash_attn's block_table, whose memory is not known"
    ):
        run(TEXTS.format(pages))


def test_torchs_own_kernels_follow_its_switch():
    """`deterministic` in aten/src/ATen/native/transformers/cuda/attention_backward.cu."""
    back = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    texts = torch.ops.torch_attn._varlen_attn_backward.default
    q = torch.empty(1, LENGTH, HEADS, WIDTH, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    rows = torch.empty(LENGTH, HEADS, WIDTH, dtype=torch.bfloat16, device="meta")
    ends = torch.empty(3, dtype=torch.int32, device="meta")
    row = SUMS // WIDTH, 4 * HEADS * (LENGTH + 256)
    for order, splits in ((True, (14, 7)), (False, (1, 1)), (None, (1, 1))):
        with told(order):
            assert scratch(back, (q, q, q, q), A100) == [row[0], splits[0] * SUMS]
            found = scratch(texts, (rows, *[rows] * 4, None, ends), A100)
        assert found == [row[1], splits[1] * row[1] * WIDTH]


@pytest.mark.parametrize(("warn", "kernel"), [(False, "flash"), (True, "cudnn")])
def test_the_switch_decides_in_a_run_unless_it_only_warns(warn, kernel):
    """cuDNN's attention, first on a Hopper, is none that adds up in one order
    (check_cudnn_deterministic in sdp_utils.cpp)."""
    seen = []

    def attend():
        torch.use_deterministic_algorithms(True, warn_only=warn)
        try:
            shape = (1, HEADS, LENGTH, WIDTH)
            q = torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)
            seen.append(F.scaled_dot_product_attention(q, q, q))
            seen[-1].backward(torch.zeros_like(seen[-1]))
        finally:
            torch.use_deterministic_algorithms(False)

    sizes = [size for _, size in simulate(attend, H100).log]
    assert kernel in type(seen[0].grad_fn).__name__.lower()
    assert (17 * SUMS in sizes) == (kernel == "flash")  # 132 multiprocessors for 8 heads


def test_a_trainer_with_full_determinism(monkeypatch):
    """It sets the workspace of cuBLAS, too (transformers.trainer_utils)."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    model = language_modelling("tiny", length=512)
    plain, ordered = (
        predict(model, gpu="A100-80GB", per_device_train_batch_size=1, bf16=True, **settings)
        for settings in ({}, {"full_determinism": True})
    )
    heads = model.config.num_attention_heads
    width = -(-model.config.hidden_size // heads // 32) * 32
    sums = 4 * heads * 512 * width
    sizes = [{size for _, size in found.log} for found in (plain, ordered)]
    assert sums in sizes[0] and -(-108 // heads) * sums in sizes[1]
    assert workspace((8, 0)) in sizes[0] and workspace((8, 0)) not in sizes[1]
    assert 16 * 8 * 1024 in sizes[1]
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


@pytest.mark.parametrize(
    ("told_size", "size"),
    [(":4096:8", 2**25), (":16:8", 2**17), (":4096:2:16:8", 8519680), ("much", 8519680)],
)
def test_the_environment_tells_the_workspace(told_size, size, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", told_size)
    assert workspace((8, 0)) == size
