"""The files that readers copy from examples/launch do what they promise, at tiny size.

Two processes and no card, where Accelerate makes DDP of everything. So the training script tells it
that there are two, joined by gloo: what is prepared, cut, saved is then the method's own.
"""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest
import torch
import yaml
from accelerate.commands.launch import launch_command_parser
from transformers import LlamaForCausalLM

import warm

ROOT = Path(__file__).resolve().parent.parent
FILES = ROOT / "examples" / "launch"
LESSON = ROOT / "notebooks" / "18_more_than_one_gpu.ipynb"
DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
sys.path.append(str(FILES))

TRAIN = """
import json, os
import torch
from accelerate import state
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule
import transformers.training_args

def two_cards(self, *_, **__):
    return "gloo", DistributedType.MULTI_GPU

state.PartialState._prepare_backend = two_cards
state.PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
transformers.training_args.is_torch_bf16_gpu_available = lambda: True
if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
    from deepspeed.ops import __compatible_ops__
    __compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled first
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes))
weights, seen = sum(p.numel() for p in model.parameters()), {}
rows = [{"input_ids": t, "labels": t} for t in torch.arange(16).repeat(32, 1)]
hook = lambda module, inputs, output: seen.update(dtype=str(output.dtype))
model.model.layers[0].mlp.gate_proj.register_forward_hook(hook)
arguments = TrainingArguments(
    "out", per_device_train_batch_size=2, max_steps=8, learning_rate=1e-2, bf16=True,
    save_strategy="no", report_to="none", disable_tqdm=True, optim="adamw_torch",
    dataloader_pin_memory=False, **json.loads(os.environ.get("MORE", "{}")),
)
trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
first = {name: tokens[None] for name, tokens in rows[0].items()}
seen["before"] = model(**first).loss.item()
seen["kept_back"] = 0  # micro-batches whose gradients stay whole

def send(self, now, *rest, **options):
    seen["kept_back"] += not now
    return sends(self, now, *rest, **options)

sends, FSDPModule.set_requires_gradient_sync = FSDPModule.set_requires_gradient_sync, send
trainer.train()
pieces = [getattr(p, "ds_tensor", p) for p in trainer.model.parameters()]
held = sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in pieces)
wrapped = trainer.model_wrapped
stage = getattr(wrapped, "zero_optimization_stage", lambda: None)()
seen |= {"kind": type(wrapped).__name__, "stage": stage, "share": held / weights}
seen["ranks"] = trainer.args.world_size
seen["trained"] = trainer.evaluate()["eval_loss"]
trainer.save_model("saved")
if trainer.args.process_index == 0:
    json.dump(seen, open("seen.json", "w"))
"""


def quiet(**more):
    settings = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    settings |= {"PYTHONPATH": str(ROOT), "KINETO_LOG_LEVEL": "99", "HF_HUB_OFFLINE": "1"}
    if sys.platform == "linux":
        settings["GLOO_SOCKET_IFNAME"] = "lo"
    return os.environ | settings | more


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture
def folder(tmp_path):
    for path in FILES.iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    programs = tmp_path / "bin"
    programs.mkdir()
    command = f'exec {warm.executable()} -m accelerate.commands.accelerate_cli "$@"\n'
    (programs / "accelerate").write_text(f"#!/bin/bash\n{command}")
    (programs / "accelerate").chmod(0o755)
    return tmp_path


def run(folder, command, **more):
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=quiet(PATH=path, **more),
        capture_output=True,
        text=True,
        timeout=240,
    )
    seen = folder / "seen.json"
    return done, json.loads(seen.read_text()) if seen.exists() else None


def loaded_loss(folder) -> float:
    model = LlamaForCausalLM.from_pretrained(folder / "saved", dtype=torch.float32)
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        return model(input_ids=tokens, labels=tokens).loss.item()


def launched(folder, name, **more) -> dict:
    port = f"--main_process_port {free_port()}"
    done, seen = run(folder, f"accelerate launch {port} --config_file {name} train.py", **more)
    assert done.returncode == 0 and seen, done.stderr[-2000:]
    return seen


def trained_and_saved(folder, seen) -> None:
    assert seen["ranks"] == 2
    assert seen["trained"] < 0.7 * seen["before"]
    assert loaded_loss(folder) == pytest.approx(seen["trained"], abs=0.05)


# ------------------------------------------------------------------------- files that launch a run
def test_fsdp2_cuts_trains_in_16_bits_and_saves_a_model(folder):
    seen = launched(folder, "fsdp2.yaml", MORE='{"gradient_accumulation_steps": 2}')
    assert seen["kept_back"] > 0  # in `no_sync()`
    assert (seen["kind"], seen["dtype"]) == ("FSDPLlamaForCausalLM", "torch.bfloat16")
    assert 0.5 <= seen["share"] < 0.52
    trained_and_saved(folder, seen)


@DEEPSPEED
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_is_of_the_stage_and_saves_a_model(folder, stage):
    file = folder / "deepspeed.yaml"
    text = file.read_text().replace("zero3.json", f"zero{stage}.json")
    file.write_text(text if stage == 3 else text.replace("zero3_init_flag: true\n", ""))
    seen = launched(folder, "deepspeed.yaml")
    assert (seen["kind"], seen["stage"]) == ("DeepSpeedEngine", stage)
    assert seen["dtype"] == "torch.bfloat16"  # as with fsdp2.yaml
    trained_and_saved(folder, seen)


def test_the_job_of_a_cluster_trains_the_same_method(folder):
    """Each of two nodes has one card here; `srun` starts the command once on each."""
    (folder / "bin" / "scontrol").write_text("#!/bin/bash\necho 127.0.0.1\necho other\n")
    nodes = 'SLURM_NODEID=1 "$@" & SLURM_NODEID=0 "$@"; code=$?; wait $!; exit $code'
    (folder / "bin" / "srun").write_text(f"#!/bin/bash\n{nodes}\n")
    for name in ("scontrol", "srun"):
        (folder / "bin" / name).chmod(0o755)
    job = folder / "job.sh"
    job.write_text(job.read_text().replace("29500", str(free_port())))
    slurm = {"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "1", "SLURM_JOB_NODELIST": "one,other"}
    sent = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}  # as the lesson has it
    slurm["MORE"] = json.dumps({"gradient_accumulation_steps": 2, "accelerator_config": sent})
    done, seen = run(folder, "bash job.sh", **slurm)
    assert done.returncode == 0 and seen, done.stderr[-2000:]
    assert seen["kind"] == "FSDPLlamaForCausalLM" and 0.5 <= seen["share"] < 0.52
    assert seen["kept_back"] == 0
    trained_and_saved(folder, seen)


# ------------------------------------------------------------------------- commands, word by word
def understood(words: list[str]):
    assert words[:2] == ["accelerate", "launch"]
    arguments = launch_command_parser().parse_args(words[2:])
    assert arguments.training_script == "train.py"
    file = yaml.safe_load((FILES / arguments.config_file).read_text())
    return arguments, file


def test_the_commands_in_the_text_train_what_stands_beside_them():
    cell = next(c for c in nbformat.read(LESSON, 4).cells if c.id == "commands")
    lines = re.findall(r"^accelerate launch .*$", cell.source, re.M)
    assert len(lines) == 4
    methods = [understood(shlex.split(line.split("#")[0]))[1]["distributed_type"] for line in lines]
    assert methods == ["FSDP", "DEEPSPEED", "FSDP", "FSDP"]
    cluster, _ = understood(shlex.split(lines[-1]))
    assert (cluster.num_machines, cluster.num_processes, cluster.machine_rank) == (2, 16, 0)


def test_a_rented_machine_is_ended_and_an_image_starts_the_file():
    task = yaml.safe_load((FILES / "sky.yaml").read_text())
    assert task["file_mounts"]["/trained"]["name"]  # `down` deletes the disks
    assert task["resources"]["autostop"] == {"idle_minutes": 10, "down": True}
    command = task["run"].replace("\\\n", " ").replace("$SKYPILOT_NUM_GPUS_PER_NODE", "2")
    arguments, file = understood(shlex.split(command))
    assert (arguments.num_processes, file["distributed_type"]) == (2, "FSDP")
    last = (FILES / "Dockerfile").read_text().splitlines()[-1]
    assert understood(json.loads(last.removeprefix("CMD ")))[1]["distributed_type"] == "FSDP"


# ---------------------------------------------------------------------------------- misspelt keys
@pytest.mark.parametrize("name", ["fsdp2.yaml", "deepspeed.yaml"])
def test_a_misspelt_key_in_a_block_is_noticed(folder, name):
    import check_keys

    assert check_keys.unknown_keys(folder / name) == []
    file = yaml.safe_load((folder / name).read_text())
    block = next(value for value in file.values() if isinstance(value, dict))
    for key in list(block):
        wrong = dict(block)
        wrong[f"{key}x"] = wrong.pop(key)
        (folder / "wrong.yaml").write_text(yaml.safe_dump({"block": wrong}))
        assert check_keys.unknown_keys(folder / "wrong.yaml") == [f"{key}x"]
    command = [sys.executable, "check_keys.py", "wrong.yaml"]
    done = subprocess.run(command, cwd=folder, env=quiet(), capture_output=True, text=True)
    assert done.returncode == 1 and f"{key}x" in done.stderr


@DEEPSPEED
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_refuses_a_misspelt_key(stage):
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    file = json.loads((FILES / f"zero{stage}.json").read_text())["zero_optimization"]
    known = {key: value for key, value in file.items() if value != "auto"}
    assert DeepSpeedZeroConfig(**known).stage == stage
    with pytest.raises(ValueError, match="overlap_com\n"):
        DeepSpeedZeroConfig(**known, overlap_com=True)


# ----------------------------------------------------------------------------------------- peaks
@pytest.fixture(scope="module")
def peaks(tmp_path_factory):
    found = tmp_path_factory.mktemp("peaks") / "peaks.json"
    command = [sys.executable, str(FILES / "peaks.py"), str(found)]
    done = subprocess.run(command, env=quiet(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(found.read_text())


def gradients() -> int:
    from peaks import deep

    return sum(p.nbytes for p in deep().parameters())


def test_ddp_keeps_a_second_copy_of_the_gradients(peaks):
    copy = gradients()
    for way in ("one", "two, each sent"):
        saved = peaks["DDP"][way] - peaks["DDP, bucket view"][way]
        assert 0.8 * copy < saved < 1.05 * copy
    kept = peaks["DDP"]["two"] - peaks["DDP, bucket view"]["two"]
    assert kept < 0.05 * copy  # the view saves nothing while a micro-batch waits
    halved = peaks["DDP"]["one"] - peaks["ZeRO-1"]["one"]
    assert halved == pytest.approx(copy, rel=0.01)  # of two copies of states, one


def test_fsdp2_keeps_whole_gradients_of_what_is_not_sent(peaks):
    copy = gradients()
    run = peaks["FSDP2"]
    assert run["two"] - run["one"] > 0.5 * copy
    assert run["two, each sent"] - run["one"] < 0.4 * copy
    assert peaks["FSDP2, weights kept"]["two"] - peaks["FSDP2, weights kept"]["one"] > 0.5 * copy
