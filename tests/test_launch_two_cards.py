"""What changes silently on two cards, and adapters over them: what lesson 18 says and is pasted."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys

import nbformat
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import warm
from helpers import load
from planner.command import main
from test_launch_files import LESSON, folder, free_port, launched, run, trained_and_saved

__all__ = ["folder"]  # pytest finds it by its name
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2"


def pasted(cell: str) -> str:
    source = next(c for c in nbformat.read(LESSON, 4).cells if c.id == cell).source
    return re.search(r"```python\n(.*?)```", source, re.S)[1]


def test_the_command_of_the_text_answers_what_is_recorded(capsys):
    source = next(c for c in nbformat.read(LESSON, 4).cells if c.id == "predict-read").source
    words = shlex.split(re.search(r"`onegpu (predict .*?)`", source)[1])
    assert main([*words, "--json"]) == 0
    row = load("predictions").query("set == 'ranks' and variant == 'FSDP2'").iloc[0]
    found = json.loads(capsys.readouterr().out)
    assert found["peak_allocated"] == pytest.approx(row["peak_allocated"], rel=1e-3)


HSDP = """
import json
import torch
import torch.distributed as dist
from meters import Collectives, size
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
nodes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "within"))
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(4)))
whole = size(model.parameters())
for layer in [*model, model]:
    fully_shard(layer, mesh=nodes)
with Collectives() as handed:
    model(torch.ones(2, 64)).sum().backward()
sent = {name: n / whole for name, n in handed.items()}
print(json.dumps({"held": size(model.parameters()) / whole, "sent": sent}))
"""


def test_hsdp_cuts_within_a_node_and_sends_a_share_of_the_gradients_between(tmp_path):
    """What lesson 18's table of cuts says: two nodes of two cards, as PyTorch's wrapper does it."""
    table = next(c for c in nbformat.read(LESSON, 4).cells if c.id == "leave").source
    assert "| HSDP | the same, within a node | also, between nodes, a share of the" in table
    (tmp_path / "hsdp.py").write_text(HSDP)
    files = LESSON.parents[1] / "examples" / "launch"
    done = subprocess.run(
        [warm.executable(), str(tmp_path / "hsdp.py")],
        env=os.environ | {"PYTHONPATH": str(files)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout)
    assert seen["held"] == 0.5
    within = {"c10d::_allgather_base_": 2.0, "c10d::_reduce_scatter_base_": 1.0}
    assert seen["sent"] == within | {"c10d::allreduce_": 0.5}


# ---------------------------------------------------------------------------------- silent changes
ALONE = """
from unittest import mock
with mock.patch("torch.cuda.device_count", lambda: 2):
    arguments = TrainingArguments("out", report_to="none")
    cards = arguments.n_gpu
trainer = Trainer(model, arguments, train_dataset=rows)
kind = type(trainer._wrap_model(trainer.model)).__name__
json.dump({"kind": kind, "cards": cards, "ranks": arguments.world_size}, open("seen.json", "w"))
"""


def unpatched(folder) -> str:
    """The script, in which Accelerate sees this machine as it is."""
    return re.sub(r"^state\.PartialState.*$", "", (folder / "train.py").read_text(), flags=re.M)


def test_plain_python_on_two_cards_is_data_parallel(folder):
    script = unpatched(folder).partition("arguments = TrainingArguments(")[0]
    (folder / "train.py").write_text(script + ALONE)
    done, seen = run(folder, f"{warm.executable()} train.py")
    assert done.returncode == 0, done.stderr[-2000:]
    assert seen == {"kind": "DataParallel", "cards": 2, "ranks": 1}


def test_plain_torchrun_reads_no_file_and_is_ddp(folder):
    script = unpatched(folder).replace("bf16=True,", "bf16=True, use_cpu=True,")
    (folder / "train.py").write_text(script)
    done, seen = run(folder, f"{warm.executable()} {TORCHRUN} train.py")
    assert done.returncode == 0 and seen, done.stderr[-2000:]
    assert (seen["kind"], seen["share"]) == ("DistributedDataParallel", 1)
    trained_and_saved(folder, seen)


FSDP1_WITHOUT_A_CARD = """
import accelerate.utils.dataclasses, torch.distributed.fsdp._init_utils
accelerate.utils.dataclasses.is_cuda_available = lambda: True
torch.cuda.current_device = lambda: torch.device("cpu")
torch.distributed.fsdp._init_utils._check_module_states_for_sync_module_states = lambda _: None
"""


def test_a_misspelt_version_trains_by_fsdp_1_and_says_nothing(folder):
    file, script = folder / "fsdp2.yaml", (folder / "train.py").read_text()
    file.write_text(file.read_text().replace("fsdp_version", "fsdp_versoin"))
    script = script.replace('trainer.save_model("saved")\n', "")  # gloo cannot gather for it
    (folder / "train.py").write_text(FSDP1_WITHOUT_A_CARD + script)
    port = f"--main_process_port {free_port()}"
    done, seen = run(folder, f"accelerate launch {port} --config_file fsdp2.yaml train.py")
    assert done.returncode == 0 and seen, done.stderr[-2000:]
    assert (seen["kind"], seen["share"]) == ("FullyShardedDataParallel", 0.5)
    assert seen["trained"] < 0.7 * seen["before"]
    assert not re.search("versoin|fsdp_version|FSDP ?[12]", done.stderr)


def test_sharded_states_save_no_weights_and_say_nothing(folder):
    file = folder / "fsdp2.yaml"
    file.write_text(file.read_text().replace("FULL_STATE_DICT", "SHARDED_STATE_DICT"))
    assert "SHARDED" in file.read_text()
    seen = launched(folder, "fsdp2.yaml")
    assert seen["trained"] < 0.7 * seen["before"]
    assert not list((folder / "saved").rglob("*.safetensors"))


# ------------------------------------------------------------------------------ adapters, two cards
DATA = """
data = [{"input_ids": list(range(i, i + 16)), "labels": list(range(i, i + 16))} for i in range(32)]
"""
LOOKS = """

def train_and_look(self):  # goes to the end of the recipe, which has imported Trainer
    import json

    result = train_fully(self)
    base = {n: p for n, p in self.model.named_parameters() if "base_layer" in n}
    found = {"kind": type(self.model_wrapped).__name__, "ranks": self.args.world_size}
    found["base"] = sum(getattr(p, "to_local", lambda p=p: p)().nbytes for p in base.values())
    whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in base.values()]  # of all ranks
    read = [p for n, p in in_4_bits("base").named_parameters() if "_proj" in n]
    same = [torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8))
            for a, b in zip(whole, read, strict=True)]
    found["trained_on_it"] = all(same)
    if self.args.process_index == 0:
        json.dump(found, open("seen.json", "w"))
    return result


train_fully, Trainer.train = Trainer.train, train_and_look
"""
SHAPE = dict(hidden_size=128, intermediate_size=256, num_attention_heads=2, num_key_value_heads=2)
FOUR_BITS = 2 * (4 * 128 * 128 + 3 * 128 * 256) // 2  # bytes of the base: two layers
QUIET = 'max_steps=20, learning_rate=1e-2, report_to="none", save_strategy="no", disable_tqdm=True'


@pytest.fixture
def adapters(folder):
    """The folder with a model, and the lesson's lines for it, up to their launch."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, **SHAPE))
    model.save_pretrained(folder / "base")
    recipe = (folder / "qlora.py").read_text()
    (folder / "qlora.py").write_text(recipe + LOOKS)
    text = pasted("kaggle").replace("meta-llama/Llama-3.1-8B", "base")
    assert text.count("num_train_epochs=1") == text.count("notebook_launcher(") == 1
    return folder, DATA + text.replace("num_train_epochs=1", QUIET)


def loads(folder) -> bool:
    """The adapter is of the base, and has learned."""
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    ids = torch.arange(16)[None]
    with torch.no_grad():
        before = base(input_ids=ids, labels=ids).loss
        again = PeftModel.from_pretrained(base, folder / "adapter")
        return bool(again(input_ids=ids, labels=ids).loss < before - 0.3)


def test_a_notebook_of_two_cards_trains_adapters_on_both(adapters):
    """Each has the whole base."""
    folder, text = adapters
    text = text.replace("num_processes=2", f"num_processes=2, use_port='{free_port()}'")
    (folder / "notebook.py").write_text(text)
    done, seen = run(folder, f"{sys.executable} notebook.py", KAGGLE_KERNEL_RUN_TYPE="Interactive")
    assert done.returncode == 0 and seen, done.stderr[-2000:]
    assert (seen["kind"], seen["ranks"]) == ("DistributedDataParallel", 2)
    assert seen["trained_on_it"]
    assert seen["base"] == pytest.approx(FOUR_BITS, rel=0.01)
    assert loads(folder)


@pytest.mark.parametrize("before, words", [
    ("from transformers import Trainer", "* `bitsandbytes`"),
    ("from accelerate import Accelerator; Accelerator(cpu=True)", "only be initialized inside"),
])  # fmt: skip
def test_a_notebook_that_was_used_before_is_refused(adapters, before, words):
    folder, text = adapters
    (folder / "notebook.py").write_text(f"{before}\n{text}")
    done, _ = run(folder, f"{sys.executable} notebook.py", KAGGLE_KERNEL_RUN_TYPE="Interactive")
    assert done.returncode != 0 and words in done.stderr


def test_each_process_loads_the_base_on_its_own_card(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    for rank, found in (("", "cuda:0"), ("1", "cuda:1")):
        monkeypatch.setenv("LOCAL_RANK", rank) if rank else monkeypatch.delenv("LOCAL_RANK", False)
        assert runpy.run_path(str(folder / "qlora.py"))["PLACE"] == found


@pytest.mark.parametrize("storage, share", [("HALF", 1 / 2), ("torch.uint8", 1)])
def test_fsdp2_cuts_four_bits_that_are_stored_as_floats(adapters, storage, share):
    folder, text = adapters
    patches = (folder / "train.py").read_text().partition("if os.environ.get")[0]
    function = text.replace("from accelerate import notebook_launcher", "")
    function = function.partition("notebook_launcher(")[0]
    function = function.replace(
        "max_steps", "use_cpu=False, dataloader_pin_memory=False, max_steps"
    )
    (folder / "train.py").write_text(f"{patches}\n{function}\ntrain()\n")
    recipe = (folder / "qlora.py").read_text()
    assert recipe.count('"bnb_4bit_quant_storage": HALF') == 1
    recipe = recipe.replace('_storage": HALF', f'_storage": {storage}')
    (folder / "qlora.py").write_text(recipe)
    seen = launched(folder, "fsdp2.yaml")
    assert seen["kind"] == "FSDPPeftModelForCausalLM" and seen["trained_on_it"]
    assert seen["base"] == pytest.approx(share * FOUR_BITS, rel=0.01)
    assert loads(folder)
