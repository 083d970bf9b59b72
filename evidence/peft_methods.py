"""The methods of PEFT's comparison on an L40S: settings of each, and how a model gets one.

The scripts are in `method_comparison` of huggingface/peft at commit b8bf4075. Every method trains
the same model on the same data in the same order, so they differ only in memory that PEFT takes.
"""

import torch
from peft import PeftModel, get_peft_config, get_peft_model

from evidence.cards import Reading, readings_before_emptying
from fake_cuda import MiB, Simulation

ATTENTION = {"target_modules": ["q_proj", "v_proj"]}
MLP = {"target_modules": ["gate_proj", "up_proj", "down_proj"]}
ALL_LINEAR = MLP["target_modules"] + ["q_proj", "k_proj", "v_proj", "o_proj"]
HEADS = {"token_dim": 1024, "num_attention_heads": 8, "num_layers": 28}
PREFIX = HEADS | {"num_transformer_submodules": 1, "encoder_hidden_size": 3072}
TEXTS = {  # run: its adapter_config.json, without what is PEFT's default
    "adalora rank32": ATTENTION
    | {"target_r": 32, "init_r": 64, "tinit": 200, "tfinal": 500, "total_step": 5000},
    "deft rank32": ATTENTION | {"r": 32, "alpha": 128},
    "fourierft default": ATTENTION | {"scaling": 300},
    "fourierft n_frequency-5000": ATTENTION | {"scaling": 300, "n_frequency": 5000},
    "glora default": ATTENTION,
    "gralora rank32": ATTENTION | {"r": 32},
    "hira rank32-lr4.5e-3": ATTENTION | {"r": 32},
    "ia3 all-attn-5k-lr0.005": {
        "target_modules": ALL_LINEAR,
        "feedforward_modules": MLP["target_modules"],
    },
    "ia3 lr_0.001": {
        "target_modules": ["k_proj", "v_proj", "down_proj"],
        "feedforward_modules": ["down_proj"],
    },
    "lily rank140-mlp-a2-b2-s8.0": MLP | {"r": 140, "stride_A": 14, "scaling": 8.0},
    "lily rank896-a2-b2-s2.0": ATTENTION | {"r": 896, "stride_A": 14, "scaling": 2.0},
    "lokr rank32-factor4-lr0.003": ATTENTION | {"r": 32, "alpha": 64, "decompose_factor": 4},
    "lora rank10-target-mlp": MLP | {"r": 10, "lora_alpha": 20},
    "lora rank32-dora": ATTENTION | {"r": 32, "lora_alpha": 64, "use_dora": True},
    "lora rank64-rslora": ATTENTION | {"r": 64, "lora_alpha": 64, "use_rslora": True},
    "miss mini": ATTENTION | {"mini_r": 64, "init_weights": "mini"},
    "oft rank32": ATTENTION | {"r": 32, "oft_block_size": 0},
    "peanut rank1-relu-depth0-s32.0": ATTENTION | {"r": 1, "scaling": 32.0},
    "peanut rank32-relu-depth0-s2.0": ATTENTION | {"r": 32, "scaling": 2.0},
    "prefixtuning lr_0.005_zero_init": PREFIX | {"num_virtual_tokens": 200, "init_weights": "zero"},
    "prefixtuning tokens50-init_prefix-lr_0.005": PREFIX
    | {"num_virtual_tokens": 50, "init_weights": "zero"},
    "pvera rank64": ATTENTION | {"r": 64},
    "road lr_0.001": ATTENTION | {"variant": "road_2"},
    "tinylora default": ATTENTION,
    "tinylora weight-tying": ATTENTION | {"weight_tying": 1.0},
    "vblora default": ATTENTION,
}

LAYERS = "to_q to_k to_v to_out.0 add_q_proj add_k_proj add_v_proj to_add_out"
LINEAR = {"target_modules": f"{LAYERS} linear_in linear_out to_qkv_mlp_proj".split()}
IMAGES = {
    "adalora default": LINEAR
    | {"lora_alpha": 32, "init_r": 32, "tinit": 100, "tfinal": 200, "total_step": 750},
    "c3a default": LINEAR,
    "deft para": LINEAR | {"r": 32, "decomposition_method": "qr", "para": True},
    "delora default": LINEAR | {"r": 32},
    "dora rank64": LINEAR | {"r": 64, "lora_alpha": 64, "use_dora": True},
    "fourierft default": LINEAR | {"n_frequency": 2000},
    "glora default": LINEAR | {"r": 32},
    "gralora default": LINEAR | {"alpha": 32},
    "hra default": LINEAR | {"r": 32},
    "ia3 default": LINEAR | {"feedforward_modules": LINEAR["target_modules"]},
    "ln_tuning default": {"target_modules": ["norm_q", "norm_k"]},
    "loha default": LINEAR | {"r": 32, "alpha": 32},
    "lokr default": LINEAR | {"r": 32, "alpha": 32},
    "lora rank64": LINEAR | {"r": 64, "lora_alpha": 64},
    "oft default": LINEAR,
    "peanut default": LINEAR,
    "psoft default": LINEAR,
    "pvera default": LINEAR | {"r": 32},
    "road default": LINEAR,
}
# Results that had no row when the blind test of November 2026 was made.
PROMPT = {"num_virtual_tokens": 200, "token_dim": 3072, "num_transformer_submodules": 1}
PROMPT |= {"num_attention_heads": 24, "num_layers": 28}
BLOCKS = {"target_modules_bd_a": ["o_proj", "down_proj"], "nblocks": 2}
BLOCKS |= {"target_modules_bd_b": ["q_proj", "v_proj", "k_proj", "up_proj", "gate_proj"]}
RANKS = {name: 896 if name in ("k_proj", "v_proj") else 2944 for name in ALL_LINEAR}
TEXTS_2 = {
    "adaptionprompt lr_0.0005": {
        "target_modules": "self_attn",
        "adapter_len": 100,
        "adapter_layers": 28,
    },
    "beft target-v_proj": {"target_modules": ["v_proj"]},
    "c3a default": ATTENTION | {"block_size": 64, "init_weights": False},
    "deft rank32-para": ATTENTION | {"r": 32, "decomposition_method": "qr", "para": True},
    "delora rank32": ATTENTION | {"r": 32},
    "full-finetuning lr_0.00001": {},
    "glora vector-paths": ATTENTION | {"config_A_B": "vector", "config_C": "vector"},
    "ln_tuning default": {
        "target_modules": ["input_layernorm", "norm", "post_attention_layernorm"]
    },
    "loha rank32": ATTENTION | {"r": 32, "alpha": 64},
    "lora rank14-target-mlp-bdlora": MLP | {"r": 14, "lora_alpha": 28, "use_bdlora": BLOCKS},
    "lora rank32-lorafa": ATTENTION | {"r": 32, "lora_alpha": 64},
    "lora rank32-mica": ATTENTION | {"r": 32, "lora_alpha": 64, "init_lora_weights": "mica"},
    "lora rank32": ATTENTION | {"r": 32, "lora_alpha": 64},
    "miss bat": ATTENTION | {"init_weights": "bat"},
    "miss default": ATTENTION,
    "osf rank128": {"target_modules": ALL_LINEAR, "rank_pattern": RANKS, "init_weights": None},
    "prompt_tuning default": PROMPT,
    "psoft default": ATTENTION | {"r": 256, "psoft_alpha": 256},
    "psoft fast": ATTENTION
    | {"r": 256, "psoft_alpha": 256, "psoft_svd": "lowrank", "use_cayley_neumann": True},
    "ptuning default": PROMPT | {"num_virtual_tokens": 20, "encoder_hidden_size": 3072},
    "pvera default": ATTENTION,
    "randlora default": ATTENTION,
    "trainable_tokens sos+eos": {
        "token_indices": [128000, 128001],
        "target_modules": "model.embed_tokens",
    },
    "vera default": ATTENTION,
}
IMAGES_2 = {
    "deft default": LINEAR | {"r": 32, "decomposition_method": "qr"},
    "full-finetuning default": {},
    "lily default": LINEAR,
    "lora default": LINEAR | {"r": 32, "lora_alpha": 32},
    "miss default": LINEAR | {"r": 32},
    "randlora default": LINEAR,
    "vblora default": LINEAR | {"r": 32},
    "vera default": LINEAR | {"r": 32},
}
METHODS = {"prefixtuning": "PREFIX_TUNING", "ptuning": "P_TUNING", "dora": "LORA"}
METHODS |= {"adaptionprompt": "ADAPTION_PROMPT"}  # where a run is called otherwise


def adapted(model: torch.nn.Module, run: str, settings: dict, **task) -> PeftModel:
    method = run.split()[0]
    if method == "full-finetuning":
        return model.train()
    config = get_peft_config({"peft_type": METHODS.get(method, method.upper())} | settings | task)
    # Its own weights are in float32, but for one method.
    model = get_peft_model(model, config, autocast_adapter_dtype=method != "osf")
    for name, parameter in model.named_parameters():
        if ".ranknum." in name:  # AdaLoRA's ranks, which train by mistake in PEFT 0.21
            parameter.requires_grad_(False)
    model.train()
    for layer in model.modules():
        if hasattr(layer, "module_dropout"):  # LoHa and LoKr draw a number, which a fake one is not
            layer.eval()  # takes part always, as with their dropout of 0
    return model


def update(model: PeftModel, optimizer: torch.optim.Optimizer, step: int) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if getattr(model, "peft_type", None) == "ADALORA":  # how much each rank matters, so far
        model.base_model.update_and_allocate(step)


def after_each_step(found: Simulation) -> list[Reading]:
    """What stood wherever a run emptied the cache, less the segment that the scripts take before
    they count."""
    return [Reading(*(n - 2 * MiB for n in seen)) for seen in readings_before_emptying(found)]
