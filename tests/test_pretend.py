"""The pretended card: what it answers is what a card answers, and what it should see it sees."""

import json
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from helpers import (
    describe,
    device,
    free,
    language_modelling,
    measure,
    predict,
    supports,
    text_classification,
    train,
)
from tools import pretend
from tools.shared.pretended import pretended

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real card")
BATCH = {"per_device_train_batch_size": 4, "max_steps": 3}


@pytest.fixture(params=["T4", "H100"])
def card(request):
    with pretended(request.param) as card:
        yield card


@pytest.fixture
def t4():
    with pretended("T4") as card:
        yield card


def test_the_machine_looks_like_one_with_the_card(card):
    assert device() == torch.device("cuda") and describe().name == card.name
    assert supports("bf16") == supports("tf32") == card.name.startswith("NVIDIA H100")
    assert text_classification().name == "tiny BERT"  # 6 GiB are free


def test_nothing_of_it_stays():
    before = torch.cuda.memory_allocated, torch.autocast.__init__, torch.version.cuda
    with pretended("T4"):
        torch.ones(3, device="cuda")
    assert not torch.cuda.is_available() and device().type == "cpu"
    assert (torch.cuda.memory_allocated, torch.autocast.__init__, torch.version.cuda) == before
    assert not torch.ones(3).is_cuda


def test_what_it_does_not_know_fails_as_it_would(t4):
    with pytest.raises(AttributeError):
        torch.accelerator.max_memory_allocated_ever()
    with pytest.raises(TypeError):
        torch.cuda.set_per_process_memory_fraction(1)
    with pytest.raises(ValueError, match="Invalid fraction value: 1.098"):
        torch.cuda.set_per_process_memory_fraction(1.098)


# ------------------------------------------------------------------------------- which tensor where
def test_tensors_go_where_they_are_sent(t4):
    here, away = torch.ones(4, device="cuda"), torch.ones(4)
    assert here.is_cuda and here.device == torch.device("cuda", 0) and not away.is_cuda
    for moved in (away.cuda(), away.to("cuda"), away.to(here), away.to(device=device())):
        assert moved.is_cuda and not away.is_cuda
    for back in (here.cpu(), here.to("cpu"), here.to(torch.device("cpu"), torch.float64)):
        assert not back.is_cuda and here.is_cuda
    assert (here * 2).is_cuda and (here * torch.tensor(2.0)).is_cuda
    assert here[torch.tensor([1, 0])].is_cuda
    layer = torch.nn.Linear(4, 4).to(device())
    layer(here).sum().backward()
    assert layer.weight.is_cuda and layer.weight.grad.is_cuda


def test_tensors_of_both_places_do_not_mix(t4):
    here, away = torch.ones(4, device="cuda"), torch.ones(4)
    with pytest.raises(RuntimeError, match="all tensors to be on the same device"):
        here + away
    with pytest.raises(RuntimeError, match="all tensors to be on the same device"):
        torch.nn.Linear(4, 4)(here)
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        here.numpy()
    assert here.cpu().numpy().sum() == here.sum().item() == 4


# ------------------------------------------------------------------------------------------ memory
def test_allocated_and_reserved_bytes(t4):
    with measure() as usage:
        kept = torch.zeros(2**20, device=device())
        del kept
        small = torch.zeros(1, device=device())
        torch.zeros(2**20)  # on the CPU
    assert usage.peak_allocated - usage.start == 4 * 2**20 and small.is_cuda
    assert usage.peak_reserved == 20 * 2**20 + 2 * 2**20
    large = torch.zeros(2**20, device=device())
    with measure() as usage:  # a copy on the CPU was never on the card
        assert not large.cpu().is_cuda and not large.to("cpu", copy=True).is_cuda
    assert usage.peak_allocated == usage.start
    del large
    assert torch.cuda.memory_allocated() == 512
    parts = [torch.zeros(2**19, device=device()) for _ in range(2)]
    parts.pop()  # 18 MiB beside 2 MiB in use; and what is beside `small`
    split = torch.cuda.memory_stats()["inactive_split_bytes.all.current"]
    assert split == 18 * 2**20 + 2 * 2**20 - 512
    parts.clear()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 2 * 2**20
    assert t4.calls == ["empty_cache"]


def test_a_limit_and_a_full_card(t4):
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(40 * 2**20 / total)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 64.00 MiB"):
        torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda")
    first = torch.empty(30 * 2**20, dtype=torch.uint8, device="cuda")
    del first
    torch.empty(36 * 2**20, dtype=torch.uint8, device="cuda")  # after the cache is emptied
    assert torch.cuda.memory_stats()["num_alloc_retries"] == 2


def test_attention_in_one_kernel_has_the_gradients_of_the_plain_one(t4):
    gradients = []
    for place in ("cpu", "cuda"):
        torch.manual_seed(0)
        q = torch.randn(2, 4, 16, 8).to(place).requires_grad_()
        F.scaled_dot_product_attention(q, q, q, is_causal=True).square().sum().backward()
        gradients.append(q.grad.cpu())
    assert torch.allclose(*gradients, atol=1e-6)


SAVED = {"fp16": True, "activation_checkpointing": True}


def test_compiled_code_is_traced_without_the_pretence(t4):
    twice = torch.compile(lambda x: x * 2, backend="eager")
    found = twice(torch.ones(4, device="cuda"))
    assert found.is_cuda and found.cpu().sum() == 8


def test_what_compiled_code_checkpoints_is_made_again_as_it_was(t4):
    def attend(x):
        return F.scaled_dot_product_attention(x, x, x).square()

    def layer(x):
        return checkpoint(attend, x, use_reentrant=False)

    x = torch.randn(2, 4, 16, 8, device="cuda", requires_grad=True)
    (plain,) = torch.autograd.grad(layer(x).sum(), x)
    compiled = torch.compile(layer, backend=lambda graph, _: graph.forward)
    (found,) = torch.autograd.grad(compiled(x).sum(), x)
    assert torch.allclose(found.cpu(), plain.cpu(), atol=1e-6)


def test_compiled_code_is_predicted_without_the_pretence(t4):
    def step():
        x = torch.ones(2, 4, 16, 8, requires_grad=True)  # predicted on the card
        attend = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x).square())
        attend(x).sum().backward()

    assert 2 * 4096 <= predict(step).peak_allocated < 2**20


def test_an_upsampling_that_is_counted_stays_on_the_card(t4):
    """FlopCounterMode takes it apart, and what it then makes asks the CPU where it is."""
    with FlopCounterMode(display=False):
        out = torch.nn.Upsample(scale_factor=2)(torch.ones(1, 1, 2, 2, device="cuda"))
    assert out.is_cuda and out.shape == (1, 1, 4, 4)


def test_whole_numbers_are_counted_on_the_card(t4):
    experts = torch.tensor([0, 2, 2, 3], dtype=torch.int32, device="cuda")
    counts = torch.histc(experts, bins=4, min=0, max=3)
    assert counts.is_cuda and counts.dtype == torch.int32 and counts.tolist() == [1, 0, 2, 1]
    rows = F.one_hot(experts.long(), num_classes=4)
    assert rows.is_cuda and rows.sum(0).tolist() == counts.tolist()


def test_plain_attention_makes_its_mask_on_the_card(t4):
    q = torch.ones(2, 4, 16, 8, dtype=torch.bfloat16, device="cuda")  # no fused kernel takes it
    assert F.scaled_dot_product_attention(q, q, q, is_causal=True).is_cuda


@pytest.mark.parametrize("settings", [{}, SAVED, {"bf16": True}])
def test_a_run_needs_what_is_predicted(card, settings):
    here = text_classification("tiny")
    predicted = predict(here, **BATCH, **settings)
    run = train(here, **BATCH, **settings)
    assert run.device == predicted.device == card.name
    assert run.losses[-1] < run.losses[0] + 1
    assert predicted.peak_allocated == pytest.approx(run.peak_allocated, rel=0.05)
    assert run.used > run.peak_reserved > run.peak_allocated
    free()
    assert card.memory.allocated <= 2**20  # cuBLAS's workspaces went too


def test_a_run_reports_its_own_tensors(t4):
    runs = [train(text_classification("tiny"), **BATCH)]
    kept = torch.zeros(1024, 1024, device=device())
    kept @ kept  # with a workspace of cuBLAS, which the next run takes for itself
    runs.append(train(text_classification("tiny"), **BATCH))
    assert runs[0].peak_allocated == runs[1].peak_allocated
    assert runs[1].peak_reserved >= runs[0].peak_reserved + kept.nbytes


def test_each_run_sets_its_own_tf32():
    products = torch.backends.cuda.matmul
    with pretended("H100"):
        try:
            for settings, expected in (({}, "ieee"), ({"tf32": True}, "tf32"), ({}, "ieee")):
                products.allow_tf32 = True  # as Accelerate does for compiled code
                torch.backends.fp32_precision = "tf32"  # as transformers does, once for all runs
                run = train(
                    language_modelling("tiny"),
                    after=lambda _: products.fp32_precision,
                    **BATCH,
                    **settings,
                )
                assert run.after == expected and products.fp32_precision == "tf32"
        finally:
            torch.backends.fp32_precision = "none"
            torch.set_float32_matmul_precision("highest")


# --------------------------------------------------------------------------------------- the judge
def cell(id, source, stored=""):
    outputs = [{"output_type": "stream", "name": "stdout", "text": stored}] if stored else []
    return {"id": id, "source": source, "outputs": outputs, "cell_type": "code"}


CELLS = [
    cell("imports", "from helpers import device, language_modelling, train\nimport torch"),
    cell("fine", "# NBVAL_CHECK_OUTPUT\nprint(1 + 1)", "2\n"),
    cell("other", "# NBVAL_CHECK_OUTPUT\nprint(device().type)", "cpu\n"),
    cell(
        "accessor", 'if device().type == "cuda":\n    torch.accelerator.max_memory_allocated_ever()'
    ),
    cell("place", "torch.ones(2, device=device()) + torch.ones(2)"),
    cell(
        "flags",
        'train(language_modelling("tiny"), max_steps=3, tf32=True)\n'
        "torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32",
    ),
    cell(
        "old-flags",
        'torch.backends.cuda.matmul.fp32_precision = "tf32"\ntorch.backends.cuda.matmul.allow_tf32',
    ),
]


@pytest.fixture(scope="module")
def results():
    from IPython.core.interactiveshell import InteractiveShell

    with pretended("H100"):
        found = pretend.run_cells(CELLS)
    torch.set_float32_matmul_precision("highest")
    torch.backends.fp32_precision = "none"
    InteractiveShell.clear_instance()
    return found


def test_planted_defects_are_seen(results):
    wrong = {result["id"]: result for result in results if {"error", "differs"} & result.keys()}
    assert list(wrong) == ["other", "accessor", "place", "old-flags"]
    assert wrong["other"]["differs"] == ["stored: cpu", "here:   cuda"]
    assert wrong["accessor"]["error"].startswith("AttributeError")
    assert "same device" in wrong["place"]["error"]
    assert "TF32" in wrong["old-flags"]["error"]


def test_the_table_stays_honest(results):
    sentences = "\n".join(pretend.judge(results, {}))
    for name in ("other", "accessor", "place", "old-flags"):
        assert f"{name}: " in sentences
    fails = {id: {"kind": "fails"} for id in ("accessor", "place", "old-flags")}
    assert pretend.judge(results, fails | {"other": {"kind": "differs"}}) == []
    listed = fails | {"other": {"kind": "fails"}, "fine": {"kind": "differs"}, "gone": {}}
    assert len(pretend.judge(results, listed)) == 3


def test_the_table_names_cells_that_exist_and_says_why():
    rows = pretend.tomllib.loads(pretend.TABLE.read_text()).get("cell", [])
    cells = {pretend.title(path): path for path in pretend.notebooks() if path != pretend.KIT}
    for row in rows:
        assert row.keys() <= {"notebook", "id", "kind", "cards", "needs", "why"}
        assert row["kind"] in ("fails", "differs") and len(row["why"]) > 20
        assert set(row.get("cards", pretend.CARDS)) <= set(pretend.CARDS)
        if row["notebook"] != "gpu":
            found = json.loads(cells[row["notebook"]].read_text(encoding="utf-8"))["cells"]
            assert row["id"] in {one["id"] for one in found}
    for row in pretend.tomllib.loads(pretend.TABLE.read_text()).get("smaller", []):
        found = json.loads(cells[row["notebook"]].read_text(encoding="utf-8"))["cells"]
        pretend.smaller(found, row["notebook"])


def test_a_row_that_needs_a_package_counts_where_it_is(tmp_path):
    row = '[[cell]]\nnotebook = "01_one"\nid = "{0}"\nneeds = "{0}"\n'
    table = tmp_path / "table.toml"
    table.write_text(row.format("torch") + row.format("no_such_package"))
    path = pretend.ROOT / "notebooks" / "01_one.ipynb"
    assert list(pretend.listed(path, "T4", table)) == ["torch"]


def test_sizes_of_a_card_are_made_smaller(tmp_path):
    table = tmp_path / "table.toml"
    row = {"notebook": "x", "id": "fine", "find": "1 + 1", "put": "1"}
    table.write_text("[[smaller]]\n" + "\n".join(f"{k} = {v!r}" for k, v in row.items()))
    assert pretend.smaller(CELLS, "x", table)[1]["source"].endswith("print(1)")
    assert pretend.smaller(CELLS, "y", table)[1]["source"] == CELLS[1]["source"]
    with pytest.raises(ValueError, match="'1 . 1' is not in the cell fine"):
        pretend.smaller(pretend.smaller(CELLS, "x", table), "x", table)


def test_the_command_says_how_many_failed(monkeypatch, capsys):
    def start(path, *_):
        return ["imports: no"] if path.name.startswith("02_") else [], 1

    monkeypatch.setattr(pretend, "start", start)
    assert pretend.main(["--card", "T4", "--lessons", "01 02", "--jobs", "1"]) == 1
    said = capsys.readouterr().out
    assert "T4 01_vanilla_trainer: ok" in said and "T4 02_where_memory_goes: FAILED" in said
    assert "    imports: no\n" in said and "T4: 4 notebooks" in said
    assert pretend.main(["--card", "T4", "--lessons", "01"]) == 0


def test_a_process_that_dies_is_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(pretend.sys, "executable", "false")
    wrong, _ = pretend.start(tmp_path / "x.ipynb", "T4", 6.0)
    assert wrong[0].startswith("the process ended") and sys.executable == "false"
