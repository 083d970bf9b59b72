"""One rank of several: the script that is predicted runs under torchrun, and keeps its promise."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from planned import samples
from planner import ranks
from planner.command import main

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


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("decoder"), 64)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Weights are nearly all that it needs."""
    return saved(tmp_path_factory.mktemp("wide"), 512, num_hidden_layers=4)


@pytest.fixture
def launched(tmp_path):
    """Runs a script as two processes that talk by gloo."""

    def launch(text: str, wrapper: str = "") -> None:
        (tmp_path / "train.py").write_text(text)
        (tmp_path / "wrapper.py").write_text(wrapper)
        root = Path(__file__).resolve().parents[1]
        environment = os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=str(root))
        environment |= dict(CUDA_VISIBLE_DEVICES="", HF_DEACTIVATE_ASYNC_LOAD="1")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", *["wrapper.py"] * bool(wrapper), "train.py"]
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert "loss " in done.stdout

    return launch


def rows() -> list[dict]:
    """Samples of unlike lengths and numbers of labels, of which -100 does not count."""
    found = samples(functools.partial(type, "Asked", (), {})())
    return [{name: row[name].tolist() for name in ("input_ids", "labels")} for row in found]
