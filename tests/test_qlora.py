"""The recipe of lesson 13, which readers copy: one run at tiny size, held to what it promises."""

import runpy
from pathlib import Path

import bitsandbytes as bnb
import datasets
import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

FILE = Path(__file__).parents[1] / "examples" / "launch" / "qlora.py"
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 128}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2}  # grouped heads, as Llama's


@pytest.fixture(scope="module")
def recipe():
    return runpy.run_path(str(FILE))


@pytest.fixture(scope="module")
def trained(recipe, tmp_path_factory):
    """Folder of the model, folder of the adapter, the trained model, some texts."""
    torch.manual_seed(0)
    model, adapter = (tmp_path_factory.mktemp(name) for name in ("model", "adapter"))
    LlamaForCausalLM(LlamaConfig(**SHAPE)).half().save_pretrained(model)  # as a T4 would load it
    ids = torch.arange(32).repeat(16, 1) + torch.arange(16)[:, None]  # texts that can be learned
    data = datasets.Dataset.from_dict({"input_ids": ids.tolist(), "labels": ids.tolist()})
    settings = {"max_steps": 30, "learning_rate": 1e-2, "per_device_train_batch_size": 8}
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    found = recipe["fine_tune"](model, data, adapter, **settings, **quiet)
    return model, adapter, found.eval(), ids


def logits(model, ids) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits.float()


def apart(model, wanted, ids) -> float:
    return float((logits(model, ids) - wanted).norm() / wanted.norm())


def test_it_trains_adapters_on_four_bits(trained):
    _, _, model, _ = trained
    rounded = [m for m in model.modules() if isinstance(m, bnb.nn.Linear4bit)]
    assert len(rounded) == 2 * 7 and all(m.weight.dtype == torch.uint8 for m in rounded)
    assert all(m.weight.quant_state.nested and m.weight.quant_type == "nf4" for m in rounded)
    assert {m.compute_dtype for m in rounded} == {torch.bfloat16}  # on a T4: float16
    adapters = [p for p in model.parameters() if p.requires_grad]
    assert len(adapters) == 2 * 2 * 7 and {p.dtype for p in adapters} == {torch.float32}


def test_the_adapter_alone_is_saved_and_loads_as_it_was(recipe, trained):
    name, folder, model, ids = trained
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        assert len(file.keys()) == 2 * 2 * 7 and all("lora_" in key for key in file.keys())
    again = PeftModel.from_pretrained(recipe["in_4_bits"](name), folder)
    assert apart(again, logits(model, ids), ids) < 0.01


def test_merged_on_the_cpu_it_is_what_was_trained(recipe, trained, tmp_path):
    name, folder, model, ids = trained
    wanted = logits(model, ids)
    recipe["merge"](name, folder).save_pretrained(tmp_path)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path)  # a plain model, as anybody loads it
    assert not any(isinstance(m, bnb.nn.Linear4bit) for m in merged.modules())
    error = apart(merged, wanted, ids)
    assert error < 0.02  # bfloat16 has eight bits
    untrained = recipe["in_4_bits"](name)
    assert apart(untrained, wanted, ids) > 10 * error
    rounded_again = PeftModel.from_pretrained(recipe["in_4_bits"](name), folder).merge_and_unload()
    assert apart(rounded_again, wanted, ids) > 3 * error


def test_accumulated_texts_of_unequal_labels_give_the_gradient_of_one_batch(
    recipe, trained, tmp_path
):
    name = trained[0]
    ids = torch.arange(64).reshape(2, 32).tolist()
    labels = [
        ids[0],
        [-100] * 28 + ids[1][28:],
    ]  # loss on all tokens of one text, on four of another
    data = datasets.Dataset.from_dict({"input_ids": ids, "labels": labels})
    plain = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "max_steps": 1}
    plain |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    steps = []
    for batch in (2, 1):
        sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": 2 // batch}
        torch.manual_seed(0)  # of the adapters
        model = recipe["fine_tune"](name, data, tmp_path, **plain, **sizes)
        moved = [p.detach().flatten() for key, p in model.named_parameters() if "lora_B" in key]
        steps.append(torch.cat(moved))  # zero before
    assert steps[0].norm() > 0
    assert (steps[1] - steps[0]).norm() < 0.02 * steps[0].norm()
