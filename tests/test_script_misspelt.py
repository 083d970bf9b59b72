"""A key of fsdp_config that transformers would swallow is refused, with the nearest right one."""

import json

import pytest

from fake_cuda.scripts.misspelt import known_keys
from planner.command import main

TRAIN = """
import transformers
transformers.TrainingArguments("out", report_to="none", fsdp={fsdp}, fsdp_config={config!r})
raise SystemExit("the settings were taken")
"""


@pytest.fixture
def told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def told(config, fsdp=True):
        (tmp_path / "train.py").write_text(TRAIN.format(config=config, fsdp=fsdp))
        assert main(["predict", "--gpus", "2xA100-80GB", "--script", "train.py"]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        return err

    return told


def test_the_keys_are_those_that_transformers_reads():
    keys = {"version", "reshard_after_forward", "transformer_layer_cls_to_wrap", "cpu_offload"}
    keys |= {"activation_checkpointing", "limit_all_gathers", "xla", "state_dict_type"}
    assert keys <= known_keys() and len(known_keys()) < 40


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"fsdp_reshard_after_foward": False}, "'fsdp_reshard_after_foward'"),
        ({"transformers_layer_cls_to_wrap": ["A"]}, "'transformer_layer_cls_to_wrap'?"),
        ({"activation_checkpoint": True}, "did you mean 'activation_checkpointing'?"),
        ({"qqq": 1}, "it reads activation_checkpointing, "),
    ],
)
def test_a_misspelt_key_is_refused(told, config, words):
    # The one with the old prefix is shown by the name that is left of it.
    words = words.replace("'fsdp_", "'")
    assert words in told(config) and "never reads" in told(config)


def test_a_file_is_read_and_right_keys_are_taken(told, tmp_path):
    (tmp_path / "fsdp.json").write_text(json.dumps({"versoin": 2}))
    assert "did you mean 'version'?" in told("fsdp.json")
    right = {"fsdp_version": 2, "reshard_after_forward": False, "state_dict_type": "x"}
    assert "the settings were taken" in told(right | {"state_dict_type": "FULL_STATE_DICT"})
    assert "did you mean 'version'?" in told({"versoin": 2}, fsdp=None)
