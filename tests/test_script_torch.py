"""What healthy scripts ask of torch works in a script run: files, generators, graphs, old names."""

import textwrap

import pytest
import torch

from fake_cuda import simulate
from fake_cuda.card import Card
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

    def run(body, updates=2, end=END, card=T4, **options):
        (tmp_path / "train.py").write_text(MODEL + textwrap.dedent(body) + end)
        script = Script(str(tmp_path / "train.py"), seconds=60, **options)
        script.found = simulate(script, card=card)
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
            assert found["epoch"] == 3 and found["seen"].shape == (4,)
            assert found["seen"].is_cuda or found["seen"].tolist() == [0, 1, 2, 3]
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


def test_a_checkpoint_is_read_when_its_weights_are_copied(run):
    run("""
        class Later:
            def __init__(self):
                self.file = torch.PyTorchFileReader("real.pt")

            @classmethod
            def __torch_function__(cls, func, types, args=(), kwargs=None):
                read = [a.read() if isinstance(a, Later) else a for a in args]
                return func(*read, **(kwargs or {}))

            def read(self):
                size = 4096 * 32
                found = self.file.get_storage_from_record("data/0", 4 * size, torch.UntypedStorage)
                flat = found._typed_storage()._untyped_storage
                kind = torch.TypedStorage(wrap_storage=flat, dtype=torch.float32, _internal=True)
                return torch._utils._rebuild_tensor_v2(kind, 0, (4096, 32), (32, 1), False, {})

        torch.save(torch.ones(4096, 32), "real.pt")
        before = allocated()
        with torch.no_grad():
            model[0].weight.copy_(Later())
        assert allocated() == before and Later().read().sum() == 4096 * 32
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


def test_buffers_that_no_file_holds_have_their_values_in_a_pretrained_model(run):
    """Which are filled after it was made on "meta", where torch.tensor asks what is the place."""
    run("""
        from transformers import BertConfig, BertModel
        with torch.device("meta"):
            assert torch.tensor([1.0]).is_meta and torch.get_default_device().type == "meta"
        sizes = dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=100)
        BertModel(BertConfig(intermediate_size=64, **sizes)).save_pretrained("kept")
        again = BertModel.from_pretrained("kept")
        positions = again.embeddings.position_ids
        assert positions.flatten().tolist() == list(range(512))
        again.cuda()(input_ids=torch.ones(2, 8, dtype=torch.long, device="cuda"))
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


def test_generators_of_the_card(run):
    run("""
        from torch.utils.data import DataLoader
        g = torch.Generator(device="cuda").manual_seed(3)
        assert isinstance(g, torch.Generator)
        assert isinstance(torch.default_generator, torch.Generator)
        assert g.device == torch.device("cuda", 0) and torch.Generator().device.type == "cpu"
        assert torch.Generator("cuda:0").device.type == "cuda" and g.initial_seed() == 3
        g.set_state(g.get_state())
        assert torch.randn(3, generator=g, device="cuda").is_cuda
        assert torch.cuda.default_generators[0].device.type == "cuda"
        first = lambda: next(iter(DataLoader(
            torch.arange(99), 9, shuffle=True, generator=torch.Generator().manual_seed(3)
        ))).tolist()
        assert first() == first() != list(range(9))
        torch.cuda.random.set_rng_state(torch.cuda.random.get_rng_state())
    """)


def test_the_card_as_default_device(run):
    run("""
        torch.set_default_device("cuda")
        layer = torch.nn.Linear(3, 4)
        made = (torch.zeros(2), torch.tensor([1.0]), torch.arange(3), layer.weight)
        assert all(t.is_cuda for t in made) and torch.get_default_device().type == "cuda"
        assert torch.randn(3, generator=torch.Generator("cuda")).is_cuda
        assert not torch.zeros(2, device="cpu").is_cuda
        torch.set_default_device(None)
        assert not torch.zeros(2).is_cuda
    """)


def test_old_names_of_types(run):
    run("""
        x = torch.cuda.FloatTensor(256, 1024).normal_()
        assert x.is_cuda and x.shape == (256, 1024) and torch.cuda.LongTensor([1, 2]).is_cuda
        assert isinstance(x, torch.cuda.FloatTensor) and not isinstance(x, torch.cuda.HalfTensor)
        assert not isinstance(torch.zeros(1), torch.cuda.FloatTensor)
        assert x.type() == "torch.cuda.FloatTensor" and torch.zeros(1).type() == "torch.FloatTensor"
        assert x.type(torch.cuda.HalfTensor).type() == "torch.cuda.HalfTensor"
        assert torch.zeros(2).type("torch.cuda.LongTensor").is_cuda
        assert torch.zeros(2).type_as(x).is_cuda and not x.type(torch.FloatTensor).is_cuda
        torch.set_default_tensor_type("torch.cuda.FloatTensor")
        assert torch.zeros(2).is_cuda and torch.nn.Linear(2, 2).weight.is_cuda
        torch.set_default_tensor_type(torch.FloatTensor)
        assert not torch.zeros(2).is_cuda
    """)


def test_tables_of_memory_and_of_the_card(run):
    run("""
        import os
        cuda, weights = torch.cuda, sum(p.nbytes for p in model.parameters())
        stats = cuda.memory_stats()
        assert stats["allocated_bytes.all.current"] == allocated() >= weights
        assert stats["allocated_bytes.all.peak"] == cuda.max_memory_allocated()
        assert stats["reserved_bytes.all.current"] == cuda.memory_reserved()
        assert stats["num_ooms"] == 0 == stats["inactive_split_bytes.small_pool.peak"]
        assert "Allocated memory" in cuda.memory_summary(0, abbreviated=True)
        facts = cuda.get_device_properties(0)
        assert facts.multi_processor_count == 40 and facts.L2_cache_size == 4 * 2**20
        assert str(facts.uuid) and facts.max_threads_per_multi_processor == 1024
        assert cuda.memory_snapshot() == [] and "GPU:0" in cuda.list_gpu_processes()
        assert cuda.utilization() == 0 and not cuda.is_current_stream_capturing()
        assert torch.version.cuda.split(".") and torch.backends.cudnn.version() + 1
        assert cuda.get_arch_list()[0] == "sm_75" and cuda.nccl.version() >= (2, 10)
        cuda.memory._record_memory_history(max_entries=9)
        cuda.memory._dump_snapshot("history.pickle")
        assert os.path.getsize("history.pickle")
        assert torch.zeros(3, pin_memory=True).is_pinned() and not model[0].weight.is_pinned()
        cuda.cudart().cudaProfilerStart()
    """)


def test_a_fraction_of_the_memory_runs_out(run):
    body = """
        torch.cuda.set_per_process_memory_fraction(0.25)
        try:
            torch.empty(6 * 2**30, dtype=torch.uint8, device="cuda")
            raise SystemExit("there was no limit")
        except torch.OutOfMemoryError:
            pass
    """
    assert "ran out of memory once" in run(body, memory=16 * 2**30).note


def test_profilers_are_left_out_with_a_note(run):
    script = run("""
        import os
        from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler
        plan = schedule(wait=0, warmup=0, active=1)
        asked = dict(activities=[ProfilerActivity.CUDA], schedule=plan)
        with profile(on_trace_ready=tensorboard_trace_handler("log"), **asked) as p:
            with torch.profiler.record_function("forward"):
                model(torch.randn(16, 32, device="cuda"))
            p.step()
        assert len(os.listdir("log")) == 1
        assert p.key_averages().table(sort_by="cuda_time_total") == ""
        p.export_chrome_trace("trace.json")
        with torch.autograd.profiler.profile(use_device="cuda"), torch.cuda.profiler.profile():
            model(torch.randn(16, 32, device="cuda"))
        with torch.autograd.profiler.emit_nvtx():
            model(torch.randn(16, 32, device="cuda"))
    """)
    assert "Profilers were left out" in script.note and len(script.printed) < 1000


def test_replays_of_a_graph_are_updates_of_its_time(run):
    plain = "optimizer = torch.optim.SGD(model.parameters())\n"  # Adam makes states in its first
    eager = run(plain)
    replays = """
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    update()
for _ in range(9):
    graph.replay()
raise SystemExit("it should have stopped before")
"""
    captured = run(plain + replays, end="")
    assert "CUDA graphs" in captured.note and "CUDA graphs" not in eager.note
    assert captured.found.step_seconds == pytest.approx(eager.found.step_seconds, rel=0.02)
    assert captured.found.peak_allocated == pytest.approx(eager.found.peak_allocated, rel=0.1)
    peaks = [script.found.timeline.sum(axis=1).max() for script in (eager, captured)]
    assert peaks[1] == pytest.approx(peaks[0], rel=0.1)


def test_a_graph_without_the_optimizer_counts_in_the_step(run):
    steps = """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(torch.randn(16, 32, device="cuda")).sum().backward()
        for _ in range(9):
            graph.replay()
            optimizer.step()
    """
    found = run(steps, end="").found
    names = [name for _, name in found.phases]
    assert names[-3:] == ["forward", "backward", "optimizer step"]
    graphed = run("model = torch.cuda.make_graphed_callables(model, (torch.zeros(16, 32),))")
    assert "CUDA graphs" in graphed.note


def test_datasets_hear_that_they_are_workers(run):
    run("""
        from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
        class Asks(Dataset):
            def __len__(self):
                return 100
            def __getitem__(self, i):
                info = get_worker_info()
                assert info.num_workers == 4 and info.dataset is self and info.seed
                return i
        begun = []
        asked = dict(num_workers=4, timeout=9, prefetch_factor=2, persistent_workers=True)
        loader = DataLoader(Asks(), 10, worker_init_fn=begun.append, **asked)
        assert len([batch for batch in loader]) == 10 and begun == [0]
        class Shards(IterableDataset):
            def __iter__(self):
                info = get_worker_info()
                yield from range(info.id, 12, info.num_workers)
        found = [batch.tolist() for batch in DataLoader(Shards(), 2, num_workers=3)]
        assert found == [[0, 3], [6, 9], [1, 4], [7, 10], [2, 5], [8, 11]]
        assert get_worker_info() is None
        assert list(DataLoader([1, 2], 1, False, None, None, 2))[0].tolist() == [1]
    """)


@pytest.mark.parametrize(
    "line",
    [
        "load_inline('own', cpp_sources='', cuda_sources=SOURCE, functions=[])",
        "torch.cuda._compile_kernel(SOURCE, 'f').set_shared_memory_config(1024)",
    ],
)
def test_kernels_of_the_scripts_own_are_refused_by_name(run, line):
    body = """
        from torch.utils.cpp_extension import load_inline
        SOURCE = "__global__ void f() {}"
    """
    with pytest.raises(ValueError, match="compiles an extension for CUDA"):
        run(f"{textwrap.dedent(body)}{line}\n")


def test_tf32_is_asked_of_the_card(run):
    asks = "from transformers import TrainingArguments\nTrainingArguments('out', tf32=True)"
    with pytest.raises(ValueError, match=r"in line 13 of train.py: .*--tf32 requires Ampere"):
        run(asks)
    ampere = Card("A100", (8, 0), 108, 1555e9, {"fp32": 19.5e12, "tf32": 150e12})
    times = [run(text, card=ampere).found.step_seconds for text in ("", asks)]
    assert times[1] <= times[0]


def test_a_script_that_ends_where_torch_has_left_its_modes_is_told_why(run):
    """As an error within compiled code does, it leaves fewer modes than it found."""
    with pytest.raises(ValueError, match="fails by itself in line .*: ValueError: in the middle"):
        run("""
            from torch.overrides import _pop_mode
            update()
            _pop_mode()
            raise ValueError("in the middle")
        """)


def test_a_module_within_another_is_moved_as_it_says_itself(run):
    run("""
class Metric(torch.nn.Module):  # as torchmetrics' and torch's recurrent layers
    total = torch.zeros(1)
    def _apply(self, fn, recurse=True):
        self.total = fn(self.total)
        return super()._apply(fn, recurse)
within = torch.nn.Sequential(Metric(), torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
within[2].weight = within[1].weight
within.to("cuda").half()
assert within[0].total.is_cuda and within[0].total.dtype == torch.float16
assert within[2].weight is within[1].weight and within[1].weight.dtype == torch.float16
within.to_empty(device="cuda")
assert within[2].weight is within[1].weight
""")


def test_a_module_that_keeps_a_part_in_float32_keeps_it(run):
    run("""
class Half(torch.nn.Module):  # all but its norm, as mixtures keep their routers
    def __init__(self):
        super().__init__()
        self.product, self.norm = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)
    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.norm.float()
        return self
within = torch.nn.Sequential(Half(), torch.nn.Linear(8, 8)).to("cuda").half()
assert within[0].product.weight.dtype == within[1].weight.dtype == torch.float16
assert within[0].norm.weight.dtype == torch.float32
""")


def test_who_holds_a_parameter_holds_it_after_a_move(run):
    """An optimizer that was made before goes on updating it, and the gradient comes along."""
    run("""
within = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
within[1].again = within[1].running_mean
optimizer = torch.optim.AdamW(within.parameters())
within.to("cuda")(torch.ones(4, 8, device="cuda")).sum().backward()
within.to(torch.bfloat16)
weight = within[0].weight
assert optimizer.param_groups[0]["params"][0] is weight and weight.dtype == torch.bfloat16
assert weight.grad.dtype == torch.bfloat16 and weight.grad.is_cuda and weight.is_leaf
optimizer.step()
assert optimizer.state[weight]["exp_avg"].dtype == torch.bfloat16
empty = torch.nn.Linear(8, 8, device="meta").to_empty(device="cuda")
assert empty.weight.is_cuda and isinstance(empty.weight, torch.nn.Parameter)
""")


MASKED = """
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cuda")
query = torch.zeros(1, 2, 256, 16, device="cuda", requires_grad=True)
{attention}(query, query, query, block_mask=mask).sum().backward()
assert query.grad.shape == query.shape and mask.kv_num_blocks.is_cuda
assert mask.full_kv_num_blocks.tolist() == [[[0, 1]]], mask.full_kv_num_blocks.tolist()
"""


def test_flex_attention_with_a_mask_of_the_card(run):
    """The mask is made pair by pair, under vmap, where tensors of the card look real."""
    run(MASKED.format(attention="torch.compile(flex_attention)"))
    with pytest.raises(ValueError, match="in line .* flex attention that is not compiled"):
        run(MASKED.format(attention="flex_attention"))
