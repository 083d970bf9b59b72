"""One rank of several: the script that is predicted runs under torchrun, and keeps its promise."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import warm
from fake_cuda.replicas import TOGETHER, in_groups
from fake_cuda.scripts import Script
from helpers.workloads import language_modelling
from planner import ranks
from planner.command import main
from planner.parts import few_layers

MIB = 2**20
WORKSPACES = 2 * 8.125 * MIB  # of cuBLAS on an A100, which a CPU has not
WRAPPER = """
import json, os, runpy, sys
from helpers.memory import measure
with measure() as usage:
    runpy.run_path(sys.argv[1], run_name="__main__")
if os.environ["RANK"] == "0":
    json.dump(usage.peak_allocated, open("peak.json", "w"))
"""
# gloo keeps copies of what it gathers and scatters, and frees them in threads that nobody measures:
# there one process works with real tensors in a group of two, which sends nothing.
ALONE = """
import torch.distributed as dist
from types import SimpleNamespace
from fake_cuda.scripts.group import NAME, Rank
work = SimpleNamespace(wire=SimpleNamespace(send=lambda *_: None))
where = SimpleNamespace(on_card=lambda _: False, trace=SimpleNamespace(work=work, phases=[]))
group = lambda store, rank, size, timeout: Rank(rank, size, where)
dist.Backend.register_backend(NAME, group, devices=["cpu"])
begin = dist.init_process_group
dist.init_process_group = lambda _: begin(NAME, rank=0, world_size=2, store=dist.HashStore())
dist.barrier = lambda: None
"""
SAVES = """    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    grads = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in grads.items()}
    torch.save({n: g.clone() for n, g in grads.items()}, f"grads{rank}.pt")
    optimizer.step()
"""
SHAPE = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
SHAPE |= dict(vocab_size=257, max_position_embeddings=64)


def saved(folder, width: int, **shape) -> str:
    shape = SHAPE | dict(hidden_size=width, intermediate_size=2 * width) | shape
    config = transformers.Qwen3Config(initializer_range=0.2, **shape)
    transformers.set_seed(0)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("parallel", "settings"), [("fsdp2", {"lora": 4}), ("hsdp", {"activation_checkpointing": True})]
)
def test_few_layers_tell_a_rank_of_many(parallel, settings, tmp_path, monkeypatch):
    """To the byte, to the second, and what travels: and the whole one is not run."""
    asked = language_modelling(saved(tmp_path, 64, num_hidden_layers=12), length=32)
    simulated, ran = Script.simulated, []

    def watched(script, **card):
        ran.append(script.layers)
        return simulated(script, **card)

    def told():
        found = ranks.predict_rank(asked, "A100-80GB", 4, parallel, bf16=True, **settings)
        sizes = found.peak_allocated, found.peak_reserved, found.by_category
        return sizes, found.step_seconds, found.note

    monkeypatch.setattr(Script, "simulated", watched)
    by_few = told()
    assert ran == [3, 4] and "MiB" in by_few[-1]
    monkeypatch.setattr(ranks, "few_layers", lambda _: [])
    assert told() == by_few
    assert ran == [3, 4, 12]


REPLICAS = {
    "ddp, LoRA": (
        "ddp",
        {"lora": 4, "gradient_as_bucket_view": True, "activation_checkpointing": True},
    ),
    "ddp, small buckets, copied": (
        "ddp",
        {"ddp_bucket_cap_mb": 40, "gradient_accumulation_steps": 2, "sync_each_batch": True},
    ),
    "zero1": ("zero1", {"gradient_accumulation_steps": 2, "gradient_as_bucket_view": True}),
}


@pytest.mark.parametrize("name", REPLICAS)
def test_few_layers_tell_a_replica_of_many(name, monkeypatch):
    """Of layers of 86 MB: weights in float32 are sent in four groups, two of them of one size,
    buckets end within layers, and rank 0 has states of other weights than with few layers."""
    parallel, settings = REPLICAS[name]
    shape = SHAPE | dict(num_hidden_layers=12, hidden_size=1536, intermediate_size=4608)
    config = transformers.Qwen3Config(**shape)
    asked = dataclasses.replace(language_modelling("tiny", length=32), config=config)
    tensors, _ = ranks.tensors_of(asked, torch.float32, 0)
    sent = [sum(tensors[i][0] for i in group) for group in in_groups(tensors, [TOGETHER])]
    assert len(sent) == 4 and len({*sent}) == 3
    simulated, ran = Script.simulated, []

    def watched(script, **card):
        ran.append(script.layers)
        return simulated(script, **card)

    def told():
        return ranks.predict_rank(asked, "A100-80GB", 2, parallel, bf16=True, **settings)

    monkeypatch.setattr(Script, "simulated", watched)
    by_few = told()
    assert ran == [3, 4]
    monkeypatch.setattr(ranks, "few_layers", lambda _: [])
    whole = told()
    assert ran == [3, 4, 12]
    for name in ("peak_allocated", "peak_reserved", "by_category", "step_seconds", "note", "time"):
        assert getattr(by_few, name) == getattr(whole, name), name
    assert (by_few.timeline == whole.timeline).all()


def test_of_another_optimizer_a_share_is_predicted_whole(decoder, monkeypatch):
    monkeypatch.setattr(ranks, "few_layers", lambda _: pytest.fail("few layers were asked"))
    asked = language_modelling(decoder, length=16)
    ranks.predict_rank(asked, "A100-80GB", 2, "zero1", optim="sgd")


def test_a_model_whose_number_is_of_other_layers_is_predicted_whole():
    """A BART's is of its encoder, and its decoder's stay as many."""
    shape = {"d_model": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    shape |= {"encoder_layers": 12, "decoder_layers": 12, "vocab_size": 64}
    config = transformers.BartConfig(**shape, is_decoder=True, is_encoder_decoder=False)
    asked = language_modelling("tiny", length=16)
    assert few_layers(dataclasses.replace(asked, config=config)) == []


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("decoder"), 64)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Weights are nearly all that it needs."""
    return saved(tmp_path_factory.mktemp("wide"), 512, num_hidden_layers=4)


@pytest.fixture
def launched(tmp_path):
    """Runs a script as two processes that talk by gloo, by a `python` that may be warm."""

    def launch(text: str, wrapper: str = "", python: str | None = None) -> None:
        python = python or warm.executable()
        (tmp_path / "train.py").write_text(text)
        (tmp_path / "wrapper.py").write_text(wrapper)
        root = Path(__file__).resolve().parents[1]
        environment = os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=str(root))
        environment |= dict(CUDA_VISIBLE_DEVICES="", HF_DEACTIVATE_ASYNC_LOAD="1")
        command = [python, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", *["wrapper.py"] * bool(wrapper), "train.py"]
        if ALONE in wrapper:
            command = [python, "wrapper.py", "train.py"]
            environment |= dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2")
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert "loss " in done.stdout

    return launch


def rows() -> list[dict]:
    """Four samples of unlike lengths and numbers of labels; those of -100 do not count."""
    random, found = torch.Generator().manual_seed(0), []
    for length, counted in ((30, 20), (24, 3), (19, 17), (12, 5)):
        ids = torch.randint(3, 257, (length,), generator=random).tolist()
        labels = [-100] * (length - counted) + ids[length - counted :]
        found.append({"input_ids": ids, "labels": labels})
    return found


def on_rows(text: str) -> str:
    """The script with samples for one step of two micro-batches, which writes its gradient."""
    text = text.replace("samples = [sample] * ", f"samples = {rows()} or ")
    assert text.count("    optimizer.step()\n") == 1
    return text.replace("    optimizer.step()\n", SAVES)


def plainly(model: torch.nn.Module) -> dict:
    """The gradient of the mean over all labels: one process, a sample at a time."""
    total = sum(label != -100 for row in rows() for label in row["labels"][1:])
    for row in rows():
        ids, labels = (torch.tensor([row[name]]) for name in ("input_ids", "labels"))
        logits = model(ids).logits[0, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum")
        (loss / total).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def distance(found: dict, wanted: dict) -> float:
    """How far two gradients are apart, as a share of the second."""
    found = {name.removeprefix("module."): value for name, value in found.items()}
    assert found.keys() == wanted.keys()
    apart = sum((found[n] - wanted[n]).square().sum() for n in wanted)
    return float((apart / sum(g.square().sum() for g in wanted.values())).sqrt())


ACCUMULATED = dict(per_device_train_batch_size=1, gradient_accumulation_steps=2, max_grad_norm=0)
RUNS = {
    "ddp": {},
    "zero1": dict(activation_checkpointing=True),
    "fsdp2": {},
    "hsdp": dict(reshard_after_forward=False),
    "tensor": dict(gradient_accumulation_steps=4),  # both ranks read all samples
    "lora": dict(lora=4),
    "clipped": dict(gradient_accumulation_steps=4, max_grad_norm=0.5),
    "each": dict(sync_each_batch=True),
}
HOW = dict(tensor=("fsdp2", 2), lora=("fsdp2", 1), clipped=("fsdp2", 2), each=("fsdp2", 1))


def adapted(model: torch.nn.Module) -> torch.nn.Module:
    import peft

    torch.manual_seed(0)
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, lora)


@pytest.mark.parametrize("name", RUNS)
def test_the_gradient_is_that_of_the_plain_run_and_what_is_saved_loads(
    name, decoder, launched, tmp_path
):
    parallel, tensor = HOW.get(name, (name, 1))
    settings = ACCUMULATED | RUNS[name]
    text = ranks.rank_script(decoder, 2, parallel, tensor, length=16, **settings)
    assert all(len(line) <= 110 for line in text.splitlines())
    launched(on_rows(text), python=sys.executable if name == "fsdp2" else None)
    plain = transformers.AutoModelForCausalLM.from_pretrained(decoder)
    plain = adapted(plain) if name == "lora" else plain
    wanted = plainly(plain)
    if name == "clipped":
        norm = torch.stack([g.norm() for g in wanted.values()]).norm()
        assert norm > 1
        wanted = {n: g * 0.5 / norm for n, g in wanted.items()}
    for rank in range(2):
        assert distance(torch.load(tmp_path / f"grads{rank}.pt"), wanted) < 1e-4
    saved = tmp_path / "trained"
    if name == "lora":
        import peft

        base = transformers.AutoModelForCausalLM.from_pretrained(decoder)
        again = peft.PeftModel.from_pretrained(base, saved)
    else:
        again = transformers.AutoModelForCausalLM.from_pretrained(saved)
    assert type(again) is type(plain)
    before, after = plain.state_dict(), again.state_dict()
    moved = [n for n in before if not torch.equal(before[n], after[n])]
    assert moved and all((before[n] - after[n]).abs().max() < 1e-3 for n in before)


MEASURED = dict(ddp=dict(gradient_as_bucket_view=True), zero1={}, fsdp2={}, hsdp={}, tensor={})


@pytest.mark.parametrize("name", MEASURED)
def test_a_rank_needs_what_was_predicted(name, wide, launched, tmp_path):
    parallel, tensor = HOW.get(name, (name, 1))
    settings = dict(per_device_train_batch_size=1) | MEASURED[name]
    text = ranks.rank_script(wide, 2, parallel, tensor, length=16, **settings)
    wrapper = (ALONE if parallel in ranks.CUT else "") + WRAPPER
    launched(text.partition("\noptions = StateDictOptions")[0], wrapper)
    measured = json.loads((tmp_path / "peak.json").read_text())
    found = ranks.predict_rank(wide, "A100-80GB", 2, parallel, tensor, length=16, **settings)
    off = 0.016 if parallel in ranks.CUT else 0.002  # 1.0 to 1.5 % high: unexplained
    assert found.peak_allocated - WORKSPACES == pytest.approx(measured, rel=off)


@pytest.mark.parametrize(("cards", "even"), [(2, True), (3, False)])
def test_adapters_of_sixteen_rows_are_told_where_all_weights_divide(monkeypatch, cards, even):
    monkeypatch.setattr(ranks, "skeleton", lambda _: torch.nn.Linear(96, 384, bias=False))
    told = ranks._of_ranks(None, ranks.cut_as_asked(cards, "fsdp2", lora=16))
    assert told.startswith("All ranks hold as much." if even else "Some weights do not divide")
    assert ranks._of_ranks(None, ranks.cut_as_asked(cards, "fsdp2")) == "All ranks hold as much."


def test_the_command_predicts_a_rank_and_prints_its_script(decoder, capsys):
    asked = ["predict", "--model", decoder, "--length", "16", "--gpus", "2xA100-80GB"]
    asked += ["--parallel", "fsdp2", "bf16=True"]
    assert main(asked) == 0
    out = capsys.readouterr().out
    assert "rank 0 of fsdp2 over 2, predicted for A100-80GB" in out
    assert "peak reserved" in out and "it fits" in out and "link carries" in out
    assert "Some weights do not divide evenly: rank 0 is shown" in out  # 257 tokens
    assert main([*asked, "--code"]) == 0
    code = capsys.readouterr().out
    assert "torchrun --nproc-per-node 2" in code and f'MODEL = "{decoder}"' in code


def test_what_is_printed_is_what_is_predicted_but_for_the_weights(decoder):
    workload = language_modelling(decoder, length=16)
    cut = ranks.cut_as_asked(4, "fsdp2", 2)
    read, made = (ranks._rendered(workload, cut, decoder, weights=w) for w in (True, False))
    lines = set(read.splitlines()) ^ set(made.splitlines())
    assert len(lines) == 3 and all("from_" in line for line in lines)
