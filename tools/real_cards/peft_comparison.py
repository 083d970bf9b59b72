"""PEFT's comparison of its own methods on an L40S, predicted: a language model and an image model.

Every method trains the same model on the same data in the same order, so the methods differ only in
memory that PEFT itself takes. The scripts are in `method_comparison` of huggingface/peft at commit
b8bf4075; here is the same step in our words. Their numbers are read after each step, less the first
segment of the allocator, which stood when they began to count.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from peft import PeftModel, get_peft_config, get_peft_model
from peft.optimizers import create_lorafa_optimizer
from transformers import AutoConfig, AutoModelForCausalLM, Dinov2Config, Dinov2Model

from fake_cuda import Allocator, MiB, Simulation, simulate

L40S = (8, 9), 142  # compute capability, multiprocessors (data/gpus.csv)
ROOT = Path(__file__).resolve().parents[2]
# Padded tokens a text of MetaMathQA, which nobody published: those with which one run meets its
# three measurements (`calibrate`). Batches come by twenties, from long to short, and the cache is
# emptied every ten: MEAN is the mean text and that of the eleventh batch, FIRST that of the first,
# LONGEST that of the first in the longest hundredth: two, as one segment more makes a jump.
MEAN, FIRST, LONGEST = 223, 427, (575, 580)
CALIBRATION = "lora rank64-rslora"

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


def _adapted(model: torch.nn.Module, run: str, settings: dict, **task) -> PeftModel:
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


def _update(model: PeftModel, optimizer: torch.optim.Optimizer, step: int) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if getattr(model, "peft_type", None) == "ADALORA":  # how much each rank matters, so far
        model.base_model.update_and_allocate(step)


def _after_each_step(simulation: Simulation) -> list[tuple[int, int, int]]:
    """Bytes allocated and reserved wherever a run empties the cache, and reserved at most until
    then; less the segment that the scripts take before they count."""
    allocator, found = Allocator(), []
    for i, size in simulation.log:
        if not size:
            # torch counts whole blocks, with what was too little to split off.
            blocks = sum(block for block, _, is_free in allocator.blocks.values() if not is_free)
            seen = blocks, allocator.reserved, allocator.peak
            found.append(tuple(n - 2 * MiB for n in seen))
        allocator.step(i, size)
    return found


@contextmanager
def svd_of_a_card() -> Iterator[None]:
    """cuSOLVER's right vectors lie by rows (`_linalg_svd_meta` in torch/_meta_registrations.py), so
    what PEFT takes of the first rows is no copy and holds all of them. With images it makes no
    difference: that script moves the model to the host and back, which copies the rows alone."""
    decompose = torch.linalg.svd

    def by_rows(*args, **options):
        left, values, right = decompose(*args, **options)
        return left, values, right.contiguous()

    with mock.patch.object(torch.linalg, "svd", by_rows):
        yield


def _rebuilds(model: PeftModel) -> None:
    """OSF as PEFT 0.19 had it (tuners/osf/layer.py): all factors of a weight stand beside it, and
    each pass makes a weight of them. PEFT 0.21 keeps fewer, and adds what was learned."""
    for layer in model.modules():
        if not hasattr(layer, "_osf_U_low_init"):
            continue
        low, rank = layer.osf_svd_params["default"], layer.effective_rank["default"]
        rows, columns = layer.get_base_layer().weight.shape
        for kept in (layer._osf_U_low_init, layer._osf_S_low_init, layer._osf_V_low_init):
            kept.clear()
        layer._osf_U_high.clear()
        layer._osf_V_high.clear()
        layer._detach_hooks()
        left, values, right = (
            torch.empty(shape, dtype=torch.bfloat16)
            for shape in ((rows, rank), (rank,), (rank, columns))
        )

        def forward(x, low=low, left=left, values=values, right=right):
            high = torch.mm(left * values.unsqueeze(0), right)
            return F.linear(x, high + torch.mm(low["U_low"] * low["S_low"][None], low["V_low"]))

        low["U_low"].register_hook(lambda g, left=left: g - left @ (left.T @ g))
        low["V_low"].register_hook(lambda g, right=right: g - (g @ right.T) @ right)
        layer.forward = forward


def train_texts(run: str, lengths: list[int], **config) -> list[tuple]:
    """Steps of 4 texts of these many padded tokens; see `_after_each_step` for what comes back.

    run.py of MetaMathQA: bf16 weights, AdamW by lists, gradients clipped, no checkpointing. What
    the model returned lives until the next step: logits, and keys and values for a cache.
    """
    config = AutoConfig.from_pretrained(ROOT / "data" / "configs" / "llama-3.2-3b.json", **config)

    def train():
        model = AutoModelForCausalLM.from_config(config)
        settings = (TEXTS | TEXTS_2)[run]
        with svd_of_a_card():
            model = _adapted(model.bfloat16(), run, settings, task_type="CAUSAL_LM")
        if run.startswith("osf"):
            _rebuilds(model)
        if run.endswith("lorafa"):
            optimizer = create_lorafa_optimizer(model, 32, 64, 1e-4, 0.1)
            with model.disable_adapter():  # run.py takes a loss without it: on leaving, PEFT
                pass  # lets all of an adapter train again, what the optimizer froze too
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
        for step, length in enumerate(lengths, 1):
            ids = torch.zeros(4, length, dtype=torch.long)
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            batch["attention_mask"][:, -1] = 0  # all but the longest text are padded
            batch["labels"] = ids.clone()
            tokens = batch["attention_mask"].sum().item()
            optimizer.zero_grad()
            outputs = model(**batch, num_items_in_batch=tokens)
            loss = outputs.loss
            loss.backward()
            _update(model, optimizer, step)
            torch.cuda.empty_cache()  # as the script does every ten steps, the longest of which
        return model, optimizer, outputs, loss, batch  # come first

    return _after_each_step(simulate(train, *L40S))


def predict_texts(run: str) -> dict[str, int]:
    """Long texts come after shorter ones, whose logits are still there."""
    longest = [length for text in LONGEST for length in (MEAN, text)]
    reading = train_texts(run, [MEAN, MEAN, FIRST, *longest])
    reserved = [now for _, now, _ in reading]
    return {
        "allocated after a step, mean": reading[1][0],
        "reserved after a step, mean": (reserved[1] + reserved[2]) // 2,
        "reserved after a step, 99th percentile": sum(reserved[4::2]) // len(LONGEST),
    }


def texts(runs: dict = TEXTS) -> Iterator[tuple[str, Callable]]:
    for run in runs:
        yield run, partial(predict_texts, run)


def calibrate() -> None:
    """Print the calibrating run at some lengths, to choose MEAN, FIRST and LONGEST by."""
    tried = [*range(FIRST - 10, FIRST + 11, 5), *range(LONGEST[0] - 5, LONGEST[-1] + 6, 5)]
    lengths = [MEAN, MEAN, *(n for length in tried for n in (length, MEAN))]
    readings = train_texts(CALIBRATION, lengths)
    for length, (allocated, reserved, _) in zip(lengths, readings, strict=True):
        print(f"{length:4}  allocated {allocated:,}  reserved {reserved:,}")


# black-forest-labs/FLUX.2-klein-base-4B, transformer/config.json, where it differs from the class.
KLEIN = dict(num_layers=5, num_single_layers=20, num_attention_heads=24, joint_attention_dim=7680)
KLEIN |= dict(guidance_embeds=False)
DINO = Dinov2Config(image_size=518)  # facebook/dinov2-base waits on the card, for evaluations
COUNT, TEXT, SIDE, CHANNELS = 14, 512, 32, 128  # images to train on, tokens, patches, their values


def train_images(run: str, steps: int = 2, **config) -> Callable:
    """A function that takes steps of 2 images of 512 x 512.

    run.py of image-gen: bf16 weights, checkpointing, AdamW by lists, gradients clipped; images and
    prompts are encoded before and stay on the card.
    """
    try:
        from diffusers import Flux2Transformer2DModel
    except ImportError as error:
        raise ImportError("the image model needs: pip install --no-deps diffusers==0.38") from error

    def train():
        dtype = torch.bfloat16
        judge = Dinov2Model(DINO)
        model = Flux2Transformer2DModel(**KLEIN | config).to(dtype)
        model.enable_gradient_checkpointing()
        model = _adapted(model, run, (IMAGES | IMAGES_2)[run])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        width = model.config.joint_attention_dim
        all_prompts = torch.zeros(COUNT, TEXT, width, dtype=dtype)
        all_places = torch.zeros(COUNT, TEXT, 4, dtype=torch.long)
        all_latents = torch.zeros(COUNT, CHANNELS, SIDE, SIDE, dtype=dtype)
        torch.cuda.empty_cache()
        losses = []
        for step in range(1, steps + 1):
            chosen = torch.zeros(2, dtype=torch.long)
            latents = all_latents.index_select(0, chosen)
            prompts = all_prompts.index_select(0, chosen)
            places = all_places.index_select(0, chosen)
            grid = torch.zeros(SIDE * SIDE, 4, dtype=torch.long).expand(2, -1, -1)
            noise = torch.randn_like(latents)
            times = torch.ones(2)
            sigmas = torch.ones(2, 1, 1, 1, dtype=dtype)
            noisy = (1.0 - sigmas) * latents + sigmas * noise
            packed = noisy.flatten(2).permute(0, 2, 1)
            optimizer.zero_grad(set_to_none=True)
            predicted = model(
                hidden_states=packed,
                timestep=times / 1000,
                encoder_hidden_states=prompts,
                txt_ids=places,
                img_ids=grid,
                return_dict=False,
            )[0]
            predicted = predicted.permute(0, 2, 1).reshape(latents.shape)
            target = noise - latents
            loss = ((predicted.float() - target.float()) ** 2).reshape(2, -1).mean(1).mean()
            loss.backward()
            _update(model, optimizer, step)
            loss = loss.detach()
            losses.append(loss)
            torch.cuda.empty_cache()
        return model, judge, optimizer, losses, predicted, packed

    return train


def predict_images(run: str) -> dict[str, int]:
    """After a hundred steps the script draws pictures, in other memory; the steps after that are
    not simulated. On a full card they end with other segments (HRA: with 21 GB or with 47)."""
    allocated, now, peak = _after_each_step(simulate(train_images(run), *L40S))[-1]
    return {
        "allocated after a step, mean": allocated,
        "reserved after a step, mean of the first hundred": now,
        "reserved": peak,
    }


def images(runs: dict = IMAGES) -> Iterator[tuple[str, Callable]]:
    for run in runs:
        yield run, partial(predict_images, run)


SETS = {"peft-texts": texts, "peft-images": images}
SETS |= {"peft-texts-2": partial(texts, TEXTS_2), "peft-images-2": partial(images, IMAGES_2)}

if __name__ == "__main__":
    calibrate()
