"""PEFT's comparison of its own methods on an L40S, with an image model: image-gen, FLUX.2.

Here is the step of its run.py in our words. Its numbers are read after each step, less the first
segment of the allocator, which stood when it began to count. A step is timed as well.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from transformers import Dinov2Config, Dinov2Model

from evidence.cards import card
from evidence.peft_methods import IMAGES, IMAGES_2, adapted, after_each_step, update
from fake_cuda import Simulation, simulate

# black-forest-labs/FLUX.2-klein-base-4B, transformer/config.json, where it differs from the class.
KLEIN = dict(num_layers=5, num_single_layers=20, num_attention_heads=24, joint_attention_dim=7680)
KLEIN |= dict(guidance_embeds=False)
DINO = Dinov2Config(image_size=518)  # facebook/dinov2-base waits on the card, for evaluations
COUNT, TEXT, SIDE, CHANNELS = 14, 512, 32, 128  # images to train on, tokens, patches, their values


def built(run: str, **config) -> torch.nn.Module:
    """The image model with a method's layers, checkpointed."""
    try:
        from diffusers import Flux2Transformer2DModel
    except ImportError as error:
        raise ImportError("the image model needs: pip install --no-deps diffusers==0.38") from error
    model = Flux2Transformer2DModel(**KLEIN | config).to(torch.bfloat16)
    model.enable_gradient_checkpointing()
    return adapted(model, run, (IMAGES | IMAGES_2)[run])


def encoded(width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prompts, their places and images, encoded before; they stay on the card."""
    return (
        torch.zeros(COUNT, TEXT, width, dtype=torch.bfloat16),
        torch.zeros(COUNT, TEXT, 4, dtype=torch.long),
        torch.zeros(COUNT, CHANNELS, SIDE, SIDE, dtype=torch.bfloat16),
    )


def train_images(run: str, steps: int = 2, **config) -> Callable:
    """A function that takes steps of 2 images of 512 x 512.

    run.py of image-gen: bf16 weights, checkpointing, AdamW by lists, gradients clipped. What a step
    names lives until the next one names it anew.
    """

    def train():
        judge = Dinov2Model(DINO)
        model = built(run, **config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        all_prompts, all_places, all_latents = encoded(model.config.joint_attention_dim)
        torch.cuda.empty_cache()
        losses = []
        for step in range(1, steps + 1):
            chosen = torch.zeros(2, dtype=torch.long)
            latents = all_latents.index_select(0, chosen)  # (2, channels, side, side)
            prompts = all_prompts.index_select(0, chosen)  # (2, text, width)
            places = all_places.index_select(0, chosen)  # (2, text, 4)
            grid = torch.zeros(SIDE * SIDE, 4, dtype=torch.long).expand(2, -1, -1)
            noise = torch.randn_like(latents)
            times = torch.ones(2)
            sigmas = torch.ones(2, 1, 1, 1, dtype=torch.bfloat16)
            noisy = (1.0 - sigmas) * latents + sigmas * noise
            packed = noisy.flatten(2).permute(0, 2, 1)  # (2, side x side, channels)
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
            update(model, optimizer, step)
            loss = loss.detach()
            losses.append(loss)
            torch.cuda.empty_cache()
        return model, judge, optimizer, losses, predicted, packed

    return train


def predict_images(run: str) -> Simulation:
    return simulate(train_images(run), card=card("L40S"))


def quantities(found: Simulation) -> dict[str, int]:
    """After a hundred steps the script draws pictures, in other memory; the steps after that are
    not simulated. On a full card they end with other segments (HRA: with 21 GB or with 47)."""
    last = after_each_step(found)[-1]
    return {
        "allocated after a step, mean": last.allocated,
        "reserved after a step, mean of the first hundred": last.reserved,
        "reserved": last.peak_reserved,
    }


def measured(runs: dict) -> Iterator[tuple[str, Callable]]:
    for run in runs:
        yield run, lambda run=run: quantities(predict_images(run))


def timed() -> Iterator[tuple[str, Callable]]:
    for run in IMAGES:
        yield run, partial(predict_images, run)


PEAKS = {"peft-images": partial(measured, IMAGES), "peft-images-2": partial(measured, IMAGES_2)}
STEPS = {"peft-images": timed}
