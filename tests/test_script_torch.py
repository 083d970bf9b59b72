"""What healthy scripts ask of torch works in a script run: files, generators, graphs, old names."""

import textwrap

import pytest
import torch

from fake_cuda import simulate
from fake_cuda.cost import Card
from fake_cuda.scripts import Script

T4 = Card("T4", (7, 5), 40, 320e9, {"fp32": 4.35e12, "fp16": 41.9e12})
MODEL = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(32, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 4))
model.cuda()
optimizer = torch.optim.AdamW(model.parameters())
def update():
    optimizer.zero_grad()
    model(torch.randn(16, 32, device="cuda")).sum().backward()
    optimizer.step()
def allocated():
    return torch.cuda.memory_allocated()
"""
END = "\nfor _ in range(9):\n    update()\nraise SystemExit('it should have stopped before')\n"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run this code between the building of a model and its updates."""
    monkeypatch.chdir(tmp_path)

    def run(body, updates=2, end=END, **options):
        (tmp_path / "train.py").write_text(MODEL + textwrap.dedent(body) + end)
        script = Script(str(tmp_path / "train.py"), seconds=60, **options)
        script.found = simulate(script, card=T4)
        assert script.updates == updates
        return script

    return run


def test_a_checkpoint_is_read_back_where_it_was_and_where_it_is_asked(run):
    run("""
        import os, shutil
        update()
        state = {"model": model.state_dict(), "opt": optimizer.state_dict(), "epoch": 3}
        torch.save(state | {"seen": torch.arange(4)}, "a.pt")
        shutil.copy("a.pt", "b.pt")
        os.rename("a.pt", "c.pt")
        weights = sum(t.nbytes for t in state["model"].values())
        for name, grows, options in (
            ("b.pt", 3, {}),
            ("c.pt", 3, dict(map_location="cuda")),
            ("b.pt", 3, dict(map_location=lambda storage, place: storage.cuda())),
            ("b.pt", 0, dict(map_location="cpu")),
            ("b.pt", 0, dict(map_location={"cuda:0": "cpu"})),
            ("b.pt", 0, dict(map_location=lambda storage, place: storage)),
            ("b.pt", 3, dict(weights_only=False)),
            ("b.pt", 3, dict(mmap=True)),
        ):
            found = None
            before = allocated()
            found = torch.load(name, **options)
            assert round((allocated() - before) / weights) == grows, (name, options)
            assert found["model"]["0.weight"].is_cuda == bool(grows)
            assert found["epoch"] == 3 and found["seen"].tolist() == [0, 1, 2, 3]
            model.load_state_dict(found["model"])
            optimizer.load_state_dict(found["opt"])
        for key, tensor in state["model"].items():
            again = found["model"][key]
            assert (again.shape, again.dtype) == (tensor.shape, tensor.dtype)
    """)


def test_models_and_tensors_of_one_storage_are_saved_to_any_file(run):
    run("""
        import copy, io, pickle
        w, buffer = torch.zeros(1000, 1000, device="cuda"), io.BytesIO()
        torch.save([w, w.t(), w[1:], torch.nn.Parameter(w)], buffer)
        buffer.seek(0)
        before = allocated()
        a, b, c, d = torch.load(buffer)
        assert allocated() - before < 1.1 * w.nbytes and isinstance(d, torch.nn.Parameter)
        assert b.stride() == (1, 1000) and c.shape == (999, 1000) and d.requires_grad
        with open("m.pt", "wb") as file:
            torch.save(model, file)
        with open("m.pt", "rb") as file:
            loaded = torch.load(file, weights_only=False)
        assert loaded(torch.randn(3, 32, device="cuda")).shape == (3, 4)
        assert pickle.loads(pickle.dumps(torch.arange(3))).tolist() == [0, 1, 2]
        assert pickle.loads(pickle.dumps(w)).is_cuda
        before = allocated()
        assert isinstance(copy.copy(model[0].weight), torch.nn.Parameter)
        assert allocated() == before
    """)


def test_a_real_checkpoint_keeps_its_values_and_returns_to_the_card(run, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    w = torch.arange(1e6).view(1000, 1000)
    torch.save({"w": w, "v": w.t()}, tmp_path / "real.pt")
    run("""
        found = torch.load("real.pt", map_location="cpu")
        assert found["w"][0, :3].tolist() == [0, 1, 2]
        before = allocated()
        found = torch.load("real.pt")
        assert found["w"].is_cuda and found["v"].stride() == (1, 1000)
        assert 4e6 <= allocated() - before < 5e6
    """)


def test_a_tensor_goes_through_a_queue(run):
    run("""
        import multiprocessing
        def work(queue, ends):
            queue.put(torch.arange(4) + 1)
            ends.wait()
        queue, ends = multiprocessing.Queue(), multiprocessing.Event()
        process = multiprocessing.Process(target=work, args=(queue, ends))
        process.start()
        assert queue.get().tolist() == [1, 2, 3, 4]
        ends.set()
        process.join()
    """)


def test_safetensors_are_valid_and_large_ones_take_no_room(run):
    run("""
        import os, safetensors, safetensors.torch as files
        from safetensors import safe_open
        update()
        state = model.state_dict() | {"seen": torch.arange(4)}
        files.save_file(state, "a.safetensors", metadata={"format": "pt"})
        found = files.load_file("a.safetensors")
        assert {k: (v.shape, v.dtype) for k, v in found.items()} == {
            k: (v.shape, v.dtype) for k, v in state.items()
        }
        assert found["seen"].tolist() == [0, 1, 2, 3] and not found["0.weight"].is_cuda
        before = allocated()
        assert files.load_file("a.safetensors", device="cuda")["0.weight"].is_cuda
        with safe_open("a.safetensors", "pt", device="cuda:0") as file:
            assert file.get_tensor("0.weight").is_cuda and file.metadata() == {"format": "pt"}
            assert file.get_slice("0.weight")[:3].shape == (3, 32)
        assert len(files.load(files.save(state))) == len(state)
        files.save_model(model, "b.safetensors")
        files.load_model(model, "b.safetensors")
        large = torch.zeros(100_000, 40_000, dtype=torch.bfloat16, device="cuda")
        files.save_file({"large": large}, "c.safetensors")
        assert os.path.getsize("c.safetensors") > 8e9
        assert os.stat("c.safetensors").st_blocks < 100
        files.save_file({"a": torch.ones(3)}, "d.safetensors")
        assert files.load_file("d.safetensors")["a"].tolist() == [1, 1, 1]
        tied = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)]).cuda()
        tied[1].weight = tied[0].weight
        assert len({p.data_ptr() for p in tied.state_dict().values()}) == 3
        files.save_model(tied, "e.safetensors")
        assert len(files.load_file("e.safetensors")) == 3
    """)


def test_a_pretrained_model_is_loaded_again(run):
    run("""
        import os, tokenizers
        from transformers import (
            AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel,
            PreTrainedTokenizerFast,
        )
        gpt = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=100)).cuda()
        gpt.save_pretrained("kept")
        assert os.path.getsize("kept/model.safetensors") > 4 * gpt.num_parameters()
        again = AutoModelForCausalLM.from_pretrained("kept", device_map="cuda")
        assert next(again.parameters()).is_cuda and again.num_parameters() == gpt.num_parameters()
        plain = tokenizers.Tokenizer(tokenizers.models.BPE())
        PreTrainedTokenizerFast(tokenizer_object=plain).save_pretrained("kept")
        AutoTokenizer.from_pretrained("kept")
    """)


TRAINER = """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
import os
gpt = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=100))
data = [dict(input_ids=torch.arange(8), labels=torch.arange(8)) for _ in range(16)]
def trainer(steps, **more):
    asked = TrainingArguments("out", max_steps=steps, save_steps=1, report_to=[], **more)
    return Trainer(gpt, asked, train_dataset=data, eval_dataset=data)
"""


def test_a_trainer_that_saves_at_each_step(run):
    run(TRAINER + "trainer(5).train()", end="")


def test_a_trainer_that_loads_its_best_model_and_one_that_resumes(run):
    body = """
best = trainer(1, load_best_model_at_end=True, eval_strategy="steps", eval_steps=1)
best.train()
kept = sorted(os.listdir("out/checkpoint-1"))
assert {"model.safetensors", "optimizer.pt", "rng_state.pth", "training_args.bin"} <= set(kept)
trainer(3).train(resume_from_checkpoint=True)
"""
    run(TRAINER + body, updates=1, end="")


def test_a_trainer_of_adapters_saves_them(run):
    pytest.importorskip("peft")
    body = """
import peft
gpt = peft.get_peft_model(gpt, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"]))
trainer(5, save_total_limit=1).train()
"""
    run(TRAINER + body, end="")
