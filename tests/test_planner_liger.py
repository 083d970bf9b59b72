"""Liger's kernels as a technique: where they are offered, and that recipes keep their promise."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from helpers import kernels
from helpers.workloads import text_classification
from planned import SHAPE, question, saved_decoder, saved_encoder
from planner.answer import Fit
from planner.script import script
from planner.techniques import CHUNKED_LOSS, KINDS, LIGER, Plan

RECIPES = Path(__file__).with_name("interpreted_recipes.py")
needs_liger = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("triton", "liger_kernel"))), reason="needs Liger"
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return saved_decoder(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=257).save_pretrained(folder)
    return str(folder)


def asked(model, gpu="RTX 4090", batch=2**22, **options):
    """A question of so many samples that its logits are large."""
    return question(model, gpu=gpu, batch=batch, **options)


def offered(asked) -> set:
    among = {LIGER, CHUNKED_LOSS}
    return {technique for way in asked.ways() for technique in way.techniques} & among


@needs_liger
def test_liger_takes_the_place_of_the_chunks_where_it_knows_the_model(llama):
    found = asked(llama)
    assert offered(found) == {LIGER} and found.without_liger == ""
    assert [way.name for way in found.ways()] == [
        "",
        "Liger kernels",
        "checkpointing",
        "checkpointing, Liger kernels",
        "checkpoints on the host",
        "checkpoints on the host, Liger kernels",
    ]
    assert Fit(question=found, recipes=[]).not_tried == ""


@needs_liger
def test_chunks_stay_where_liger_cannot_be_and_it_is_said_why(llama, gpt2):
    for found, why in (
        (asked(gpt2), "Liger has none for gpt2"),
        (asked(llama, gpu="T4"), "compute capability 8.0, and this card has 7.5"),
    ):
        assert offered(found) == {CHUNKED_LOSS}
        told = Fit(question=found, recipes=[]).not_tried
        assert told.startswith("Liger's kernels were not tried: ") and why in told


def test_without_the_package_the_planner_answers_with_chunks(llama, monkeypatch):
    there = importlib.util.find_spec
    for missing in ("triton", "liger_kernel"):
        with monkeypatch.context() as patch:
            gone = {missing: None}
            patch.setattr(
                kernels.importlib.util, "find_spec", lambda n, gone=gone: gone.get(n, there(n))
            )
            if missing == "liger_kernel" and there("triton") is None:
                continue
            found = asked(llama)
            assert offered(found) == {CHUNKED_LOSS}
            assert f"{missing} is not installed here" in Fit(question=found, recipes=[]).not_tried


def test_neither_is_offered_or_spoken_of_where_there_are_no_large_logits(llama, tmp_path):
    encoder = saved_encoder(tmp_path)
    for found in (asked(llama, batch=2), asked(encoder, task=text_classification)):
        assert offered(found) == set() and found.without_liger == ""


@needs_liger
def test_a_head_that_does_more_than_a_product_has_neither(tmp_path):
    config = transformers.Gemma2Config(**SHAPE, num_key_value_heads=4, head_dim=16, vocab_size=257)
    config.save_pretrained(tmp_path)
    assert config.final_logit_softcapping
    found = asked(str(tmp_path))
    assert offered(found) == set() and found.without_liger == ""


@needs_liger
def test_without_a_fused_loss_it_spares_no_logits():
    assert kernels.why_no_liger("llama") == kernels.why_no_liger("qwen3") == ""
    assert kernels.why_no_liger("granite") == "Liger has no fused loss for granite"


APPLIED = """
from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as known
for kind in {kinds}:
    try:
        known[kind]()
    except ImportError:
        print(kind)
"""


@needs_liger
def test_kernels_that_cannot_be_imported_are_not_offered():
    """Those for Qwen3-VL ask transformers for a class that it no longer has."""
    kinds = "llama", "qwen2", "qwen3", "gemma3_text", "phi3", "mistral", "gpt_oss", "qwen3_vl"
    command = [sys.executable, "-c", APPLIED.format(kinds=kinds)]  # it changes classes for good
    broken = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    for kind in kinds:
        config = transformers.AutoConfig.for_model(kind)
        if kind not in broken:
            assert kernels.why_no_liger(kind) == kernels.kernels_note(config, True) == ""
            continue
        assert "does not fit this transformers" in kernels.why_no_liger(kind)
        with pytest.raises(ValueError, match="would end in an error, Liger's"):
            kernels.kernels_note(config, True)


@needs_liger
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_its_script_names_the_package_and_sets_the_flag(kind, llama):
    for way in asked(llama).ways():
        text = script(asked(llama), Plan(kind, way), 1)
        has = LIGER in way.techniques
        assert ("use_liger_kernel=True," in text) == ("liger-kernel==" in text) == has
        assert ("on Linux" in text) == has and "chunked_loss" not in text


@needs_liger
def test_recipes_with_liger_keep_their_promise_in_tritons_interpreter():
    """Triton decides when it is imported whether it interprets: so in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider", str(RECIPES)]
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
