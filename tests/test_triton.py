"""Triton kernels are left out, their wrappers run as they are, and the process stays as it was."""

import threading

import pytest
import torch
import transformers

from fake_cuda import NotSimulated, simulate
from fake_cuda.launches import pointers, programs
from helpers import kernels, language_modelling, predict, text_classification

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
liger = pytest.importorskip("liger_kernel.transformers")
modeling_llama = pytest.importorskip("transformers.models.llama.modeling_llama")

MiB = 2**20
SIZE = MiB  # values of a vector: 4 MiB


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = places < n
    x = tl.load(x_ptr + places, mask=mask)
    y = tl.load(y_ptr + places, mask=mask)
    tl.store(out_ptr + places, x + y, mask=mask)


@triton.jit
def twice_kernel(x_ptr, label_ptr, width, BLOCK: tl.constexpr, TWICE: tl.constexpr):
    """Reads a row once or twice and writes it back, with one label a row."""
    row = tl.program_id(0)
    label = tl.load(label_ptr + row)
    x_ptr += row * width
    for start in range(0, width, BLOCK):
        places = start + tl.arange(0, BLOCK)
        block = tl.load(x_ptr + places, mask=places < width)
        if TWICE:
            block += tl.load(x_ptr + places, mask=places < width)
        tl.store(x_ptr + places, block + label, mask=places < width)


@triton.jit
def count_kernel(x_ptr, count_ptr, n, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    many = tl.load(x_ptr + places, mask=places < n) > 0
    tl.atomic_add(count_ptr, tl.sum(many.to(tl.int32), 0))


tuned_kernel = triton.autotune(
    configs=[triton.Config({"BLOCK": size}) for size in (256, 1024)], key=["n"]
)(add_kernel)
guessed_kernel = triton.heuristics({"BLOCK": lambda given: 1 / 0})(add_kernel)


def blocks(meta):
    return (triton.cdiv(SIZE, meta["BLOCK"]),)


def added(kernel=add_kernel, **options):
    x, y = torch.ones(SIZE), torch.ones(SIZE)
    assert x.is_cuda and x.device.type == "cuda" and x.device == torch.device("cuda")
    out = torch.empty(SIZE, device=x.device)
    kernel[blocks](x, y, out, SIZE, **options)
    return out


@pytest.fixture(scope="module")
def tiny():
    return language_modelling("tiny", length=256)


@pytest.fixture(scope="module")
def plain(tiny):
    return predict(tiny, gpu="A100-80GB", per_device_train_batch_size=8)


# ------------------------------------------------------------------------------------------ kernels
def test_what_a_wrapper_allocates_is_counted_and_nothing_runs():
    assert simulate(lambda: added(BLOCK=1024)).peak_allocated == 3 * 4 * MiB


def test_an_autotuner_tries_once_and_heuristics_never():
    def run():
        return [added(tuned_kernel), added(tuned_kernel)]

    found = simulate(run)
    assert found.peak_allocated == (3 * 4 + 256) * MiB  # the scratch of trying, in the first call
    assert simulate(lambda: added(guessed_kernel)).peak_allocated == 3 * 4 * MiB


def test_a_wrapper_asks_triton_for_the_card_and_for_what_was_tuned():
    """As flash-linear-attention's do (fla/utils/hardware.py), and Mamba's (ssd_state_passing.py in
    mamba_ssm/ops/triton): by what they find they choose how many partial sums they allocate."""
    asked = []

    def run():
        active = triton.runtime.driver.active
        facts = active.utils.get_device_properties(active.get_current_device())
        target = active.get_current_target()
        out = added(tuned_kernel)
        asked.append((target.backend, target.arch, facts["max_shared_mem"] // 1024, facts))
        return out, out.new_empty(tuned_kernel.best_config.kwargs["BLOCK"], 1024)  # 1 MiB

    found = [predict(run, gpu=name) for name in ("T4", "A100-80GB", "H100")]
    assert [card[:3] for card in asked] == [("cuda", 75, 64), ("cuda", 80, 163), ("cuda", 90, 227)]
    assert [card[3]["multiprocessor_count"] for card in asked] == [40, 108, 132]
    assert {one.peak_allocated for one in found} == {(3 * 4 + 256) * MiB}


def test_a_launch_is_timed_by_the_bytes_of_its_pointers():
    def step():
        layer = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(layer.parameters())
        for _ in range(2):
            layer(torch.ones(1, 1)).sum().backward()
            added(BLOCK=1024)
            optimizer.step()

    found = predict(step, gpu="A100-80GB")
    assert found.time.moved["backward"] > 3 * 4 * MiB
    assert "Of Triton kernels only the bytes are timed." in found.note


def test_a_kernels_source_says_what_it_reads_and_writes():
    x, label = torch.ones(4, 100), torch.ones(4, dtype=torch.int64)
    given = dict(x_ptr=x, label_ptr=label, width=100, BLOCK=128, TWICE=True)
    of_x, of_label = pointers(twice_kernel, given)
    assert (of_x.moved, of_x.written) == (3 * x.nbytes, True)  # two reads at most, and a write
    assert (of_label.moved, of_label.written) == (label.nbytes, False)
    assert programs((4,), given) == programs(lambda meta: (meta["width"] // 25,), given) == 4
    assert programs(lambda meta: (meta["missing"],), given) is None


def test_a_wrapper_that_reads_what_a_kernel_computes_is_refused_by_the_kernels_name():
    def run(read):
        x, count = torch.ones(100), torch.zeros(1, dtype=torch.int32)
        count_kernel[(1,)](x, count, 100, BLOCK=128)
        return torch.empty(read(count))

    for read in (lambda count: count.item(), lambda count: int(count.cumsum(0)[-1] + 1)):
        with pytest.raises(NotSimulated, match="values that the Triton kernel count_kernel"):
            simulate(lambda read=read: run(read))


def test_experts_are_taken_to_have_equal_shares():
    from liger_kernel.ops.fused_moe import compute_routing_metadata

    tiles = []

    def run():
        chosen = torch.topk(torch.randn(512, 8), 2, dim=-1).indices.to(torch.int32)
        tiles.append(compute_routing_metadata(chosen, 8)[-1].shape)

    simulate(run)
    assert tiles == [(8 * 2,)]  # 1,024 tokens of 8 experts in tiles of 64


def test_a_gradient_that_nobody_knows_is_not_one():
    def loss(scale):
        x = torch.randn(16, 64, requires_grad=True)
        target = torch.randint(64, (16,))
        out = liger.LigerCrossEntropyLoss()(x, target)
        out.backward(scale(out))

    for scale in (torch.ones_like, torch.randn_like):  # known and 1, or not known
        assert simulate(lambda scale=scale: loss(scale)).peak_allocated > 16 * 64 * 4


def test_a_cpu_runs_no_kernel():
    with pytest.raises(NotSimulated, match="Triton kernels, which a CPU cannot run"):
        simulate(lambda: add_kernel[(1,)](*torch.ones(3, 8), 8, BLOCK=8), None)


def test_a_missing_package_is_one_sentence():
    def run():
        raise ModuleNotFoundError("No module named 'triton'", name="triton")

    with pytest.raises(NotSimulated, match=r"triton is not installed here: on Linux, .*liger"):
        simulate(run)


# -------------------------------------------------------------------------------------------- Liger
def test_liger_keeps_no_logits(tiny, plain):
    found = predict(tiny, gpu="A100-80GB", per_device_train_batch_size=8, use_liger_kernel=True)
    logits = 4 * 8 * 256 * tiny.config.vocab_size  # bytes in float32
    assert found.peak_allocated < plain.peak_allocated - 2 * logits
    assert found.by_category["parameters"] == plain.by_category["parameters"]
    assert sum(found.time.launches.values()) < sum(plain.time.launches.values())


def test_parts_of_liger_can_be_switched_off(tiny, plain):
    off = dict.fromkeys(("rope", "rms_norm", "swiglu", "fused_linear_cross_entropy"), False)
    options = dict(use_liger_kernel=True, liger_kernel_config=off)
    found = predict(tiny, gpu="A100-80GB", per_device_train_batch_size=8, **options)
    assert found.peak_allocated == plain.peak_allocated and "Triton" not in found.note


def test_a_norms_gradient_has_a_row_for_each_multiprocessor():
    """Its wrapper asks the card (rms_norm_backward in liger_kernel/ops/rms_norm.py)."""

    def run():
        norm = liger.LigerRMSNorm(4096)
        x = torch.ones(2, 4096, requires_grad=True)
        norm(x).sum().backward()

    a100, t4 = (predict(run, gpu=name).by_category["temporaries"] for name in ("A100-80GB", "T4"))
    assert a100 - t4 == (108 - 40) * 4096 * 4


def standing() -> tuple:
    kind = modeling_llama.LlamaForCausalLM
    return (
        modeling_llama.apply_rotary_pos_emb,
        modeling_llama.LlamaRMSNorm,
        modeling_llama.LlamaMLP,
        vars(kind)["forward"],
        torch.nn.functional.cross_entropy,
        torch._C._len_torch_dispatch_stack(),
    )


def test_the_process_is_as_before(tiny):
    before = standing()
    predict(tiny, gpu="T4", use_liger_kernel=True)

    def by_hand():
        liger.apply_liger_kernel_to_llama(cross_entropy=True, fused_linear_cross_entropy=False)
        model = transformers.AutoModelForCausalLM.from_config(tiny.config)
        assert isinstance(model.model.norm, liger.LigerRMSNorm)
        raise ArithmeticError("and an error ends it")

    with pytest.raises(ArithmeticError):
        predict(by_hand, gpu="T4")
    assert standing() == before
    assert torch.ones(1).device == torch.device("cpu") and not torch.ones(1).is_cuda


def test_other_threads_keep_their_functions(tiny):
    seen, usual = [], modeling_llama.apply_rotary_pos_emb
    q = torch.randn(1, 1, 2, 4)

    def elsewhere():
        seen.append(modeling_llama.apply_rotary_pos_emb(q, q, torch.ones(1, 2, 4), q[0])[0])

    def change(model):
        liger._apply_liger_kernel_to_instance(model=model)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return model

    predict(tiny.with_model(change), gpu="T4", use_liger_kernel=True)
    torch.testing.assert_close(seen[0], usual(q, q, torch.ones(1, 2, 4), q[0])[0])


def test_what_liger_has_no_kernels_for_is_said():
    found = predict(text_classification("tiny"), gpu="T4", use_liger_kernel=True)
    assert found.note.startswith("Liger has no kernels for bert")


def test_kernels_of_packages_that_are_missing_are_said(monkeypatch):
    """transformers computes Qwen3.5's linear attention without them, more slowly."""
    qwen = transformers.Qwen3_5TextConfig()
    there = kernels.importlib.util.find_spec
    gone = dict.fromkeys(kernels.PACKAGES)  # no package has a place
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda n: gone.get(n, n and there(n)))
    said = kernels.kernels_note(qwen, True)
    assert said.startswith("Without causal-conv1d and flash-linear-attention, as here, ")
    assert kernels.kernels_note(transformers.LlamaConfig(), True) == ""
    assert kernels.kernels_note(transformers.ViTConfig(), False) == ""
    gone["fla"] = gone["causal_conv1d"] = "a place"
    assert kernels.kernels_note(qwen, False) == ""


def test_liger_needs_a_card_and_its_packages(tiny, monkeypatch):
    with pytest.raises(ValueError, match="use_liger_kernel=True needs a card"):
        predict(tiny, gpu="cpu", use_liger_kernel=True)
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs the package triton: on Linux, .*\[liger\]"):
        predict(tiny, gpu="T4", use_liger_kernel=True)
