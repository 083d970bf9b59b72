"""A deep run's log, written from those of few layers: the same to the last event, or refused."""

import pytest
import torch
import transformers

from fake_cuda import simulation
from fake_cuda.depth import MORE, SHALLOW, deeper
from fake_cuda.passages import Irregular, Seen
from fake_cuda.replay import Events
from helpers import tasks
from helpers.workloads import language_modelling, text_classification
from planned import SHAPE, formula, predictions
from planner.layers import DEEP, layers_are_alike
from planner.predictions import Predictions
from planner.techniques import Plan

LAYERS = 7
PLANS = (
    "full, 8-bit AdamW, checkpointing",
    "full in bf16, chunked loss",
    "LoRA",
    "full, Adafactor",
)
PLANS += ("QLoRA, checkpointing", "LoRA, checkpoints on the host, chunked loss")


def saved(folder, layers=LAYERS) -> str:
    # Tensors of one kind and size are told apart by their age alone: few are of one size here.
    shape = SHAPE | {"num_hidden_layers": layers, "num_key_value_heads": 1}
    shape |= {"intermediate_size": 176}
    transformers.Qwen2Config(**shape, vocab_size=520).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", PLANS)
def test_few_layers_tell_the_log_of_many(name, tmp_path, monkeypatch):
    asked, seen = predictions(saved(tmp_path), keep=False, batch=4, length=40), {}
    run = simulation._run

    def watched(*given):
        found = run(*given)
        seen[len(seen)] = found[0]
        return found

    monkeypatch.setattr(simulation, "_run", watched)
    for layers in (*SHALLOW, LAYERS):
        asked.predict(Plan.named(name), 2, layers=("full_attention",) * layers)
    *few, whole = seen.values()
    found = deeper(few, LAYERS)
    assert found.operations == whole.operations and found.phases == whole.phases
    assert found.notes == whole.notes
    for name in ("events", "kinds", "sizes", "made_on"):
        assert list(getattr(found.events, name)) == list(getattr(whole.events, name)), name


@pytest.mark.parametrize("name", ("full, checkpointing", "QLoRA", "full, Adafactor in backward"))
def test_the_planner_predicts_a_deep_model_by_its_few_layers(name, tmp_path, monkeypatch):
    asked = predictions(saved(tmp_path, DEEP), keep=False, batch=2, length=64)
    plan, micro_batch = Plan.named(name), 2
    by_few = asked.predict(plan, micro_batch)
    monkeypatch.setattr(Predictions, "_few", lambda *_: [])
    whole = predictions(saved(tmp_path, DEEP), keep=False, batch=2, length=64)
    assert by_few == whole.predict(plan, micro_batch)


def log(layers: int, odd: int | None = None, dies: bool = True) -> Seen:
    """A layer makes two tensors, of which one dies at once; an odd one makes them larger."""
    events, sizes = ["forward"], []
    for layer in range(layers):
        i = len(sizes)
        events += [i, i + 1, ~i]
        sizes += [100 + 7 * (layer == odd), 200]
    events.append("backward")
    if dies:
        events += [~i for i in range(2 * layers - 1, 0, -2)]
    found = Events(events, ["activations"] * len(sizes), sizes, 0, [0] * len(sizes))
    return Seen(found, ["building the model", "forward", "backward"], [], {})


def test_passages_are_repeated_and_each_tensor_dies_once():
    few = [log(layers) for layers in SHALLOW]
    assert deeper(few, 9).events.events == log(9).events.events
    assert deeper(few, 9).events.sizes == log(9).events.sizes


def test_what_is_not_regular_is_refused():
    few, many = (log(layers) for layers in SHALLOW)
    with pytest.raises(Irregular):  # a layer that the other log has not
        deeper((few, log(SHALLOW[1], odd=1)), 9)
    with pytest.raises(Irregular):  # all of them die in the one, none in the other
        deeper((log(SHALLOW[0], dies=False), many), 9)
    with pytest.raises(Irregular):
        deeper((few, many._replace(phases=few.phases[:2])), 9)
    with pytest.raises(Irregular):
        deeper((few, many._replace(events=many.events._replace(late=frozenset({1})))), 9)


def test_a_run_whose_few_layers_do_not_tell_is_simulated_whole():
    def of(layers: int, odd: bool = False):
        def run():
            wide = [64 + 32 * (odd and k == layers - 2) for k in range(layers)]
            model = torch.nn.Sequential(
                *(torch.nn.Sequential(torch.nn.Linear(64, n), torch.nn.Linear(n, 64)) for n in wide)
            )
            optimizer, calls = torch.optim.AdamW(model.parameters()), called.append(layers)
            for _ in range(2):
                model(torch.zeros(8, 64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return model, calls

        return run

    for odd in (False, True):
        called: list[int] = []
        few = [of(n, odd and n == SHALLOW[1]) for n in SHALLOW]
        found = simulation.simulate(of(9), few=few, layers=9)
        assert called == [*SHALLOW, *([9] if odd else [])]
        assert found.log == simulation.simulate(of(9)).log


@pytest.mark.parametrize(
    ("plan", "length", "firsts"),
    [
        ("QLoRA, checkpointing", 64, (3, 4)),
        # A table of its eight experts takes as much as the norms of four layers' adapters.
        ("QLoRA, checkpointing, Liger kernels", 1024, (3, 4, 5)),
    ],
)
def test_more_layers_tell_where_three_and_four_do_not(plan, length, firsts, tmp_path, monkeypatch):
    """Of a mixture, as the whole one does."""
    shape = SHAPE | {"num_hidden_layers": DEEP, "num_key_value_heads": 1}
    config = transformers.MixtralConfig(**shape, num_local_experts=8, vocab_size=520)
    config.save_pretrained(tmp_path)
    ran, told, plan = [], [], Plan.named(plan)
    run, found = simulation._run, simulation.deeper

    def watched(*given):
        ran.append(run(*given)[0])
        return ran[-1], None

    def tells(seen, layers, **first):
        told.append(first["first"])
        return found(seen, layers, **first)

    monkeypatch.setattr(simulation, "_run", watched)
    monkeypatch.setattr(simulation, "deeper", tells)
    by_few = predictions(str(tmp_path), keep=False, length=length).predict(plan, 2)
    assert tuple(told) == firsts and len(ran) == 1 + len(firsts)
    monkeypatch.setattr(Predictions, "_few", lambda *_: [])
    assert by_few == predictions(str(tmp_path), keep=False, length=length).predict(plan, 2)
    assert len(ran) == 2 + len(firsts)


def test_a_run_whose_few_layers_fail_is_simulated_whole():
    def deep():
        return torch.zeros(8)

    def shallow():
        raise IndexError("a list by layer that nobody cut")

    found = simulation.simulate(deep, few=[shallow, shallow], layers=9)
    assert found.log == simulation.simulate(deep).log


TEXTS = dict(pad_token_id=0, sep_token_id=2, eos_token_id=2, bos_token_id=1)
DEEP_SHAPE = SHAPE | {"num_hidden_layers": DEEP, "vocab_size": 257}


@pytest.mark.parametrize(
    ("config", "task"),
    [
        # Its property `layer_types` follows from the number of layers, and takes no value.
        (transformers.MambaConfig(**DEEP_SHAPE), language_modelling),
        # Its list has to have a window for each layer.
        (
            transformers.LongformerConfig(**DEEP_SHAPE, **TEXTS, attention_window=[16] * DEEP),
            text_classification,
        ),
    ],
)
def test_few_layers_are_built_where_a_configuration_tells_of_each(config, task, tmp_path):
    config.save_pretrained(tmp_path)
    asked = predictions(str(tmp_path), keep=False, task=task)
    assert asked.question.alike
    counts = []
    for few in asked._few(asked.question.workload):
        with torch.device("meta"):
            model = tasks.MODELS[few.task].from_config(few.config)
        counts.append([len(part) for part in model.modules() if type(part) is torch.nn.ModuleList])
    assert counts == [[n] for n in SHALLOW + MORE]


def test_a_model_that_cannot_be_cut_is_estimated_by_itself(tmp_path, monkeypatch):
    """Which layers are attention's is told by their numbers, and no list takes others."""
    config = transformers.BambaConfig(**DEEP_SHAPE, attn_layer_indices=[3, 9], mamba_n_heads=4)
    config.save_pretrained(tmp_path)
    asked, whole = predictions(str(tmp_path), keep=False), []

    def watched(self, plan, micro_batch, *, layers=(), length=0):
        whole.append(layers)
        return formula(self, plan, micro_batch, length=length)

    monkeypatch.setattr(Predictions, "predict", watched)
    assert asked.estimate(Plan.named("LoRA"), 2).need > 0
    assert whole == [()]


def test_layers_are_compared_by_their_parts_shapes_and_attributes():
    shape = SHAPE | {"num_hidden_layers": 4, "num_key_value_heads": 2}

    def model(config):
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config)

    assert layers_are_alike(model(transformers.Qwen2Config(**shape)))
    assert layers_are_alike(model(transformers.GPT2Config(n_layer=4, n_embd=64, n_head=4)))
    assert not layers_are_alike(model(transformers.SmolLM3Config(**shape, pad_token_id=0)))
    kinds = [*3 * ["sliding_attention"], "full_attention"]
    assert not layers_are_alike(model(transformers.Gemma3TextConfig(**shape, layer_types=kinds)))
    for chance in (0.0, 0.1):  # of a layer to be left out
        drops = transformers.OPTConfig(**SHAPE | {"num_hidden_layers": 4}, layerdrop=chance)
        assert layers_are_alike(model(drops)) == (not chance)
    odd = model(transformers.Qwen2Config(**shape))
    odd.model.layers[2].mlp.act_fn = torch.nn.GELU()
    assert not layers_are_alike(odd)
    odd = model(transformers.Qwen2Config(**shape))
    odd.model.layers[2].self_attn.scaling = 0.5
    assert not layers_are_alike(odd)
