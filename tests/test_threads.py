"""A simulation beside a training in another thread: neither does anything of the other's."""

import copy
from threading import Thread

import bitsandbytes
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, masking_utils

from fake_cuda import simulate
from fake_cuda.here import DictHere, Here


def small_model():
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, vocab_size=50, num_attention_heads=4)
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_key_value_heads=4))


def steps():
    """What is simulated: real code of a training, on fake tensors."""
    model = small_model()
    optimizer = bitsandbytes.optim.AdamW8bit(model.parameters())
    ids = torch.zeros(2, 8, dtype=torch.long)
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16):
            model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def trained() -> dict:
    """Gradients, attention, autocast and an update, as bytes."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.arange(16).view(2, 8)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    gradients = [p.grad.numpy().tobytes() for p in model.parameters()]
    weights = [p.detach().numpy().tobytes() for p in model.parameters()]
    return {"loss": loss.item(), "norm": norm.item(), "gradients": gradients, "weights": weights}


def skipped() -> dict:
    """A GradScaler takes no step with a gradient that is infinite."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler("cpu")
    scaler.scale((weight * torch.tensor([1.0, torch.inf])).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return {"weight": weight.tolist(), "scale": scaler.get_scale()}


def cast() -> dict:
    """Autocast by the CPU's lists, and RMSNorm with its gradient."""
    half = torch.ones(4, 4, dtype=torch.bfloat16)
    x = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        kinds = [F.layer_norm(half, (4,)), half.exp(), half.sum(), torch.einsum("ij,jk", x, x)]
        kinds += [half.softmax(-1), F.scaled_dot_product_attention(*[x[None, None]] * 3)]
    norm = F.rms_norm(x, (4,), torch.ones(4))
    norm.square().mean().backward()
    found = {"types": [k.dtype for k in kinds], "on": torch.is_autocast_enabled("cpu")}
    return found | {"values": [k.float().sum().item() for k in kinds]}, norm, x.grad


def libraries() -> dict:
    """Loaders' workers, copies, quantized weights, what models ask of positions and experts."""
    loader = DataLoader(torch.arange(4.0), batch_size=2, num_workers=1)
    linear = bitsandbytes.nn.Linear4bit(64, 64).to("cpu")
    rows = torch.arange(4)[None]
    return {
        "workers": loader.num_workers,
        "batches": [batch.tolist() for batch in loader],
        "quantized": (type(linear.weight), linear.weight.bnb_quantized),
        "table": bitsandbytes.functional.create_dynamic_map().tolist(),
        "tables": type(bitsandbytes.functional.name2qmap),
        "copied": copy.deepcopy(torch.nn.Linear(2, 2)).weight.shape,
        "packed": masking_utils.find_packed_sequence_indices(rows),
        "tracing": masking_utils.is_tracing(rows),
        "foreach": torch_optimizer._get_foreach_kernels_supported_devices(),
        "numbers": torch.tensor([torch.tensor(1), torch.tensor(2)]).tolist(),
        "precision": AcceleratorState().mixed_precision,
        "compiled": torch.compile(lambda x: x * 2, backend="eager")(torch.ones(2)).tolist(),
    }


def beside(function):
    """What a function returns in another thread, in the middle of a simulation."""
    found = []

    def both():
        steps()
        other = Thread(target=lambda: found.append(function()))
        other.start()
        other.join()
        steps()

    simulate(both, (8, 0))
    return found[0]


@pytest.mark.parametrize("function", [trained, skipped])
def test_a_training_is_the_same_beside_a_simulation(function):
    assert beside(function) == function()


def test_autocast_is_the_cpus_beside_a_simulation():
    (found, norm, grad), (alone, alone_norm, alone_grad) = beside(cast), cast()
    assert found == alone
    # There the kernel of RMSNorm is torch's decomposition: other roundings.
    torch.testing.assert_close(norm, alone_norm)
    torch.testing.assert_close(grad, alone_grad)


def test_libraries_are_as_they_were_beside_a_simulation():
    AcceleratorState._reset_state(reset_partial_state=True)
    Accelerator(cpu=True, mixed_precision="bf16")
    try:
        found, alone = beside(libraries), libraries()
        assert found.pop("tables") is DictHere and alone.pop("tables") is dict
        assert found == alone and alone["precision"] == "bf16"
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_a_simulation_is_the_same_beside_a_training():
    def with_one():
        other = Thread(target=trained)
        other.start()
        other.join()
        steps()

    found, alone = simulate(with_one, (8, 0)), simulate(steps, (8, 0))
    assert found.log == alone.log and found.phases == alone.phases
    assert (found.timeline == alone.timeline).all()


def test_what_is_replaced_here_is_not_replaced_there():
    here, everywhere = Here(), Here(everywhere=True)
    functions = [h.instead(lambda: "original", lambda: "ours") for h in (here, everywhere)]
    answers = [function() for function in functions]
    other = Thread(target=lambda: answers.extend(function() for function in functions))
    other.start()
    other.join()
    assert answers == ["ours", "ours", "original", "ours"]
