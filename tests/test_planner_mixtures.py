"""A mixture's experts are one parameter: what the planner says of it, and pastes, is true."""

import copy
import json
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from planned import question
from planner.changes import beside_experts, experts_in_4_bits, stacks
from planner.question import ask
from planner.script import script
from planner.techniques import KINDS, Plan
from test_planner_script import by_hand, check_saved, distance, pasted, prepared  # noqa: F401

SHAPE = dict(vocab_size=257, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
SHAPE |= dict(num_key_value_heads=4, max_position_embeddings=64, initializer_range=0.2)
SHAPE |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, num_experts_per_tok=2)
FINE = dict(moe_intermediate_size=64, n_routed_experts=4, n_group=2, topk_group=1)
FINE |= dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16)
CONFIGS = {
    "Mixtral": transformers.MixtralConfig(**SHAPE, intermediate_size=64, num_local_experts=4),
    "Qwen3": transformers.Qwen3MoeConfig(
        **SHAPE, num_experts=4, head_dim=16, moe_intermediate_size=64, mlp_only_layers=[0]
    ),
    "GPT-OSS": transformers.GptOssConfig(
        **SHAPE, num_local_experts=4, head_dim=16, intermediate_size=64
    ),
    "DeepSeek": transformers.DeepseekV3Config(**SHAPE, **FINE, first_k_dense_replace=1),
    "Llama 4": transformers.Llama4TextConfig(
        **SHAPE, num_local_experts=4, head_dim=16, intermediate_size=64, intermediate_size_mlp=64
    ),
}
DENSE = {
    "Llama": transformers.LlamaConfig(**SHAPE, intermediate_size=64),
    "XLNet": transformers.XLNetConfig(vocab_size=257, d_model=64, n_layer=2, n_head=4, d_inner=64),
    "Mamba": transformers.MambaConfig(vocab_size=257, hidden_size=64, num_hidden_layers=2),
}
SAID = {  # of a mixture, beside what the price says of any model
    "full": "autocast passes the experts by",
    "full in bf16": "",
    "LoRA": "experts and their router stay as they are",
    "QLoRA": "experts too, from 16 bits in the host's memory",
}


def made(config, seed=0):
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    made(CONFIGS["Mixtral"]).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def published_in_mxfp4(tmp_path_factory):
    """A checkpoint whose experts are packed as gpt-oss' are: blocks of 32 numbers and a scale."""
    folder = tmp_path_factory.mktemp("mxfp4")
    model = made(CONFIGS["GPT-OSS"]).to(torch.bfloat16)
    model.save_pretrained(folder)
    file, random = folder / "model.safetensors", torch.Generator().manual_seed(0)
    weights = load_file(file)
    for name in [n for n in weights if n.endswith("_proj") and "experts" in n]:
        experts, inputs, outputs = weights.pop(name).shape
        blocks = (experts, outputs, inputs // 32)
        packed = torch.randint(0, 256, (*blocks, 16), generator=random, dtype=torch.uint8)
        weights[f"{name}_blocks"] = packed
        weights[f"{name}_scales"] = torch.full(blocks, 124, dtype=torch.uint8)  # 2 ** -3
    save_file(weights, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_mixture_is_known_by_its_parameters(name):
    model = made(CONFIGS[name])
    found = stacks(model)
    assert found and all(where.endswith(".experts") for where in found)
    assert all(keys == ["gate_up_proj", "down_proj"] for keys in found.values())
    lora = peft.LoraConfig(target_modules=beside_experts(model))
    learning = [n for n, p in peft.get_peft_model(model, lora).named_parameters() if "lora" in n]
    places = {n.split(".layers.")[1].split(".")[1] for n in learning}
    assert places == {"self_attn"} and len({n.split(".")[4] for n in learning}) == 2


@pytest.mark.parametrize("name", DENSE)
def test_other_parameters_of_three_dimensions_are_no_experts(name):
    assert stacks(made(DENSE[name])) == {}


def test_a_packed_mixture_is_still_known():
    model = made(CONFIGS["Mixtral"])
    before, targets = stacks(model), beside_experts(model)
    experts_in_4_bits(model, ["gate_up_proj", "down_proj"])
    after = {name: sorted(keys) for name, keys in stacks(model).items()}
    assert after == {name: sorted(keys) for name, keys in before.items()}
    assert beside_experts(model) == targets


@pytest.mark.parametrize("kind", SAID)
def test_the_price_says_what_is_done_to_experts(kind, mixture):
    asked, plan = question(mixture), Plan.named(kind)
    assert SAID[kind] in asked.price(plan) and "nothing;" not in asked.price(plan)
    sparse = set(asked.price(plan).split("; ")) - set(plan.price().split("; "))
    assert bool(sparse) == bool(SAID[kind])


def test_what_is_said_of_autocast_is_so(mixture):
    """Experts of float32 compute in it, unless their kernel is one that autocast knows."""
    model, seen = prepared(question(mixture), "full"), []
    model.model.layers[0].mlp.experts.act_fn.register_forward_hook(
        lambda *call: seen.append(call[-1].dtype)
    )
    for kernel in ("grouped_mm", "eager"):
        model.set_experts_implementation(kernel)
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.arange(16)[None])
    assert seen[0] == torch.float32 and set(seen[1:]) == {torch.bfloat16}
    asked = question(mixture)
    asked.skeleton.set_experts_implementation("eager")
    assert asked.price(Plan.named("full")) == "nothing"


def check_experts(model, name):
    """What learns, and in which type the experts are."""
    inside = {n: p for n, p in model.named_parameters() if ".experts." in n}
    learning = {n for n, p in model.named_parameters() if p.requires_grad}
    if "LoRA" in name:
        assert all(".self_attn." in n and "lora_" in n for n in learning)
    else:
        assert set(inside) < learning and any(".gate." in n or "router" in n for n in learning)
    stacked = {p.dtype for n, p in inside.items() if "bias" not in n}
    half = torch.bfloat16 if "LoRA" in name or "in bf16" in name else torch.float32
    assert stacked == ({torch.uint8} if "QLoRA" in name else {half})


def check_pasted(ran, asked, name, kind):
    """The gradient of the plain run, the method, and what is saved loads again."""
    model = ran.names["trainer"].model
    rounded = "bf16" in name or "bf16" in asked.settings(Plan.named(name), 1)
    wanted = by_hand(asked, kind, ran.batch)
    assert distance(ran.gradients, wanted) < (0.05 if rounded else 1e-4)
    check_experts(model, name)
    check_saved(ran, asked, name, kind)


@pytest.mark.parametrize("kind", [kind.name for kind in KINDS])
@pytest.mark.parametrize("way", ["", "checkpointing, chunked loss"])
def test_the_code_of_a_mixture_keeps_its_promise(kind, way, mixture, pasted):  # noqa: F811
    name, asked = ", ".join(filter(None, (kind, way))), question(mixture, batch=4)
    ran = pasted(asked, name, 4 if "backward" in kind else 2)
    check_pasted(ran, asked, name, kind)


@pytest.mark.parametrize("kind", ["full in bf16", "LoRA", "QLoRA"])
def test_a_mixture_published_in_mxfp4_is_unpacked(kind, published_in_mxfp4, pasted):  # noqa: F811
    asked = question(published_in_mxfp4, batch=4, unpacked="Mxfp4Config")
    check_pasted(pasted(asked, kind, 2), asked, kind, kind)


@pytest.mark.parametrize(("method", "unpacked"), [("mxfp4", "Mxfp4Config"), ("fp8", None)])
def test_what_cannot_be_unpacked_is_refused(method, unpacked, published_in_mxfp4, tmp_path):
    config = json.loads((Path(published_in_mxfp4) / "config.json").read_text())
    config["quantization_config"]["quant_method"] = method
    (tmp_path / "config.json").write_text(json.dumps(config))
    if unpacked is None:
        with pytest.raises(ValueError, match="is published in fp8: name a copy of it in 16 bits"):
            ask(str(tmp_path), length=16)
        return
    asked = ask(str(tmp_path), length=16)
    assert asked.unpacked == unpacked and not hasattr(asked.workload.config, "quantization_config")


@pytest.mark.parametrize("kind", ["full in bf16", "LoRA", "QLoRA"])
def test_what_is_pasted_is_what_was_predicted(kind, mixture):
    asked = question(mixture)

    def weights(model):
        named = model.named_parameters()
        return {n: (tuple(p.shape), p.dtype, p.requires_grad) for n, p in named}

    assert weights(prepared(asked, kind)) == weights(asked.changed(Plan.named(kind)).model())


def test_the_comment_makes_experts_learn_too(mixture, pasted):  # noqa: F811
    """The line that is pasted as a comment, without its mark."""
    asked = question(mixture, batch=4)

    def edit(text):
        assert text.count("# target_parameters=") == 1
        return text.replace("# target_parameters=", "target_parameters=")

    ran = pasted(asked, "LoRA", 2, edit)
    inside = {n for n in ran.gradients if ".experts." in n}
    assert len(inside) == 2 * 2 * 2 and len(ran.gradients) > len(inside)  # A and B, two stacks
    assert any(ran.gradients[n].any() for n in inside)
    assert "target_parameters" not in script(asked, Plan.named("QLoRA"), 2)
