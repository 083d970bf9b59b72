"""An estimate of a model and a batch: against this CPU, measured, and each refusal in its words."""

import copy
import doctest
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode

import fake_cuda
from fake_cuda import Card, NotSimulated, estimate, files
from fake_cuda.estimates import StepEstimate
from helpers import measure, memory

PACKAGE = Path(fake_cuda.__file__).parent
ADAM, SGD = torch.optim.AdamW, partial(torch.optim.SGD, lr=0.1, momentum=0.9)
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1000}
BERT = transformers.BertConfig(hidden_size=128, intermediate_size=512, **SIZES)
GPT2 = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=128, vocab_size=1000)
LLAMA = transformers.LlamaConfig(hidden_size=128, intermediate_size=384, **SIZES)


class Encoder(torch.nn.Module):
    """Torch's own encoder between an embedding and a head, with the batch in dimension 1."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(1000, 128)
        self.encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(128, 4, 512), 2)
        self.head = torch.nn.Linear(128, 5)

    def forward(self, tokens):
        return self.head(self.encoder(self.embed(tokens)).mean(0))


def perceptron():
    sizes = (784, 2048, 2048, 10)
    layers = [torch.nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False)]
    return torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])


def texts():
    return {"input_ids": torch.randint(1000, (16, 64)), "labels": torch.randint(2, (16,))}


def sequences():
    tokens = torch.randint(1000, (16, 64))
    return {"input_ids": tokens, "labels": tokens.clone()}


def classes():
    return torch.randint(1000, (64, 16)), torch.randint(5, (16,))


def pictures(samples=256):
    return torch.randn(samples, 784), torch.randint(10, (samples,))


MODELS = {  # what builds it, its batch, its loss, the batch's dimension, an optimizer
    "bert": (partial(transformers.BertForSequenceClassification, BERT), texts, None, 0, ADAM),
    "gpt2": (partial(transformers.GPT2LMHeadModel, GPT2), sequences, None, 0, ADAM),
    "llama": (partial(transformers.LlamaForCausalLM, LLAMA), sequences, None, 0, SGD),
    "encoder": (Encoder, classes, F.cross_entropy, 1, ADAM),
    "perceptron": (perceptron, pictures, torch.nn.CrossEntropyLoss(), 0, SGD),
}


def measured(make, batch, loss, optimizer) -> int:
    """The peak of two steps of the plain loop, as README.md has it, on this CPU."""
    memory.free()
    with measure() as usage:
        model, batch = make(), batch()
        updates = optimizer(model.parameters())
        for _ in range(2):
            if loss is None:
                found = model(**batch).loss
            else:
                found = loss(model(batch[0]), batch[1])
            found.backward()
            updates.step()
            updates.zero_grad()
    return usage.peak_allocated - usage.start


# ----------------------------------------------------------------------- against this CPU, measured
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_is_that_of_a_real_run(name):
    make, batch, loss, dimension, optimizer = MODELS[name]
    found = estimate(make, batch(), optimizer, loss, gpu="cpu", batch_dimension=dimension)
    assert found.peak_allocated == pytest.approx(measured(make, batch, loss, optimizer), rel=0.005)
    assert (found.fits, found.headroom, found.peak_reserved, found.largest_batch) == (None,) * 4
    assert "on a CPU" in str(found) and not found.note


def test_convolutions_on_a_cpu_have_scratch_that_is_told():
    picture = torch.zeros(4, 3, 32, 32)
    found = estimate(torch.nn.Conv2d(3, 8, 3), picture, loss=squared, gpu="cpu")
    assert "A CPU's convolutions take scratch" in found.note and found.note in str(found)


# --------------------------------------------------------------------------- what an estimate tells
def linear(samples=8, **options):
    return torch.nn.Linear(1000, 1000), torch.zeros(samples, 1000, **options)


def squared(output):
    return output.square().mean()


def shapes(samples):
    images, labels = torch.empty(samples, 784, device="meta"), torch.empty(samples, device="meta")
    return images, labels.long()


@pytest.mark.parametrize("gpu", ["0.75GiB", "T4"])
def test_the_largest_batch_fits_and_one_more_does_not(gpu):
    make, _, loss, _, optimizer = MODELS["perceptron"]
    most = estimate(make, shapes(8), optimizer, loss, gpu).largest_batch
    ask = partial(estimate, make, optimizer=optimizer, loss=loss, gpu=gpu, largest=False)
    assert most > 8
    assert ask(shapes(most)).fits and not ask(shapes(most + 1)).fits


def test_the_largest_batch_of_what_does_not_fit_is_smaller_or_none():
    make, _, loss, _, optimizer = MODELS["perceptron"]
    found = estimate(make, shapes(200_000), optimizer, loss, "1.5GiB")
    assert not found.fits and found.headroom < 0 and 0 < found.largest_batch < 200_000
    assert "It does not fit the card's 1.50 GiB" in str(found) and "are missing" in str(found)
    assert estimate(make, shapes(8), optimizer, loss, "0.55GiB").largest_batch == 0


def test_other_sizes_that_a_model_refuses_leave_the_largest_batch_open():
    class Eight(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x.view(8, 1000))

    model = Eight(1000, 1000)
    found = estimate(model, torch.zeros(8, 1000), loss=squared)
    assert found.fits and found.largest_batch is None
    assert "Of the largest batch nothing is known: the model refuses" in str(found)


def test_all_forms_of_a_model_and_a_batch_say_the_same():
    make, batch, *_ = MODELS["bert"]
    given = batch()
    with torch.device("meta"):
        on_meta = make()
    with FakeTensorMode() as mode:
        fake = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in given.items()}
    assert all(tensor.fake_mode is mode for tensor in fake.values())
    meta = {name: tensor.to("meta") for name, tensor in given.items()}
    encoding = transformers.BatchEncoding(given)
    model = make()
    instance = torch.optim.AdamW(model.parameters(), lr=1e-5)
    said = [
        str(estimate(*asked, largest=False))
        for asked in (
            (make, given),
            (lambda: make(), meta),
            (on_meta, fake),
            (model, encoding, lambda parameters: torch.optim.AdamW(parameters)),
            (model, given, instance),
        )
    ]
    assert len({text.partition("\n")[2] for text in said}) == 1
    assert said[0] == said[-1] and len(said[0].splitlines()) == 10


def test_a_model_and_its_optimizer_stay_as_they_are():
    model, batch = linear()
    model.tied, model.plain = model.weight, [torch.ones(3)]
    optimizer = torch.optim.AdamW([{"params": [model.weight], "lr": 1e-5}, {"params": model.bias}])
    before = copy.deepcopy(model.state_dict())
    found = estimate(model.eval(), batch, optimizer, squared, "cpu")
    assert not model.training and not optimizer.state and model.weight.grad is None
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert found.by_category["parameters"] == 4 * 1_001_000 + 12  # the tied weight once


def test_a_batch_keeps_its_whole_numbers_in_any_size():
    seen = []

    class Picks(torch.nn.Linear):
        def forward(self, x, picked):
            seen.append(picked.sum().item())
            return super().forward(x[picked])

    model, batch = Picks(10, 10), (torch.zeros(4, 10), torch.tensor([True, False, True, True]))
    estimate(model, batch, loss=squared, gpu="1GiB")
    assert seen[:2] == [3, 3] and max(seen) > 4


def test_categories_add_up_and_the_batch_is_an_activation():
    found = estimate(*linear(), loss=squared)
    assert sum(found.by_category.values()) == found.peak_allocated < found.peak_reserved
    assert found.by_category["parameters"] == pytest.approx(4 * 1_001_000, rel=0.001)
    assert found.headroom == 15360 * 2**20 - found.peak_reserved - found.context
    assert found.time.low < found.time.step_seconds < found.time.high
    wide = torch.zeros(5000, 1000)
    more = estimate(linear()[0], wide, loss=squared, largest=False)
    assert more.peak_by_category["activations"] >= wide.nbytes


def test_a_verdict_is_true_or_false_and_asks_of_other_cards(monkeypatch):
    found = estimate(*linear(), loss=squared, largest=False)
    assert found.fits and found.fits() is True and str(found.fits) == repr(found.fits) == "True"
    assert found.fits("T4") and not found.fits("0.51GiB")
    assert found.fits(Card.of("mine", (8, 0), {}, memory=2**30))
    with pytest.raises(ValueError, match="no card of the number 1: name one"):
        found.fits(1)
    with pytest.raises(ValueError, match="a card must have a memory"):
        found.fits("cpu")
    small = torch.cuda.get_device_properties if torch.cuda.is_available() else None
    assert small or found.fits(device=0)  # the card that was asked about
    there = {"name": "here", "major": 8, "minor": 0, "multi_processor_count": 1}
    there = type("Properties", (), there | {"total_memory": 2**29})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: there)
    assert found.fits and not found.fits(device=0)
    with pytest.raises(ValueError, match="no card of the number 1"):
        found.fits(device=1)


def test_the_example_of_the_request_runs():
    """pytorch/rfcs issue 108, with `estimate_memory` imported from here."""
    from fake_cuda import estimate as estimate_memory

    class Model(torch.nn.Linear):  # which returns its loss
        def forward(self, x):
            return super().forward(x).square().mean()

    model, sample_input = Model(1000, 1000), torch.zeros(8, 1000)
    optimizer = torch.optim.Adam(model.parameters())
    estimate = estimate_memory(model, sample_input, optimizer=optimizer)
    assert isinstance(estimate, StepEstimate) and estimate.fits(device=0)
    parts = estimate.params_mb + estimate.optimizer_mb + estimate.activations_mb
    assert 0 < parts < estimate.total_mb
    assert estimate.optimizer_mb == pytest.approx(2 * estimate.params_mb, rel=0.1)


def test_the_example_of_the_page_says_what_it_says():
    source = (PACKAGE / "README.md").read_text(encoding="utf-8")
    page = source.replace("```", "")
    example = doctest.DocTestParser().get_doctest(page, {}, "README.md", None, None)
    assert doctest.DocTestRunner().run(example).failed == 0 < len(example.examples)
    said = [line for line in source.splitlines() if line.startswith((">>>", "..."))]
    assert len(said) <= 11  # ten lines, and the one that asks further


def test_importing_it_loads_neither_torch_nor_transformers():
    ask = "import fake_cuda, sys; fake_cuda.cards.gpu('T4'); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in run.stdout.split()}
    assert "fake_cuda" in loaded and not {"torch", "transformers", "numpy", "pandas"} & loaded


WITHOUT = """
import sys
HIDDEN = {"transformers", "accelerate", "peft", "bitsandbytes", "datasets", "pandas", "pynvml"}
class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, *more):
        return None if name.partition(".")[0] in HIDDEN else self.finder.find_spec(name, *more)
sys.meta_path[:] = map(Without, sys.meta_path)
import torch, fake_cuda
layer, batch = torch.nn.Linear(1000, 1000), torch.zeros(8, 1000)
print(fake_cuda.estimate(layer, batch, loss=torch.mean, largest=False))
fake_cuda.forget_libraries()
"""


def test_it_works_where_torch_is_installed_and_nothing_of_hugging_face():
    run = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert run.stdout.rstrip() == str(estimate(*linear(), loss=torch.mean, largest=False))


# ------------------------------------------------------------------- what is refused, in a sentence
def on_a_card():
    with FakeTensorMode():
        return torch.nn.ParameterList([torch.empty(10, 10, device="cuda")])


def half_trained():
    model, batch = linear()
    return model.requires_grad_(False), batch


def with_targets():
    targets = torch.zeros(8, dtype=torch.long)
    return dict(loss=lambda output: F.cross_entropy(output, targets))


class Pair(torch.nn.Linear):
    def forward(self, x):
        return {"logits": super().forward(x)}


REFUSED = {
    "on a card": (lambda: (on_a_card(), torch.zeros(8, 10)), {}, "already lives on cuda:0: "),
    "shapes": (
        lambda: (torch.nn.Linear(999, 10), torch.zeros(8, 1000)),
        {"loss": squared},
        r"the model refuses a batch of \[8, 1000\]: ",
    ),
    "names": (
        lambda: (linear()[0], {"x": torch.zeros(8, 1000)}),
        {"loss": squared},
        "the model refuses a batch of .*'x'",
    ),
    "no scalar": (linear, {}, "the loss has 8 x 1000 values and is no scalar"),
    "no scalar of a function": (linear, {"loss": torch.square}, "8 x 1000 values and is no scalar"),
    "no scalar in a dictionary": (
        lambda: (Pair(1000, 10), torch.zeros(8, 1000)),
        {},
        "the loss has 8 x 10 values and is no scalar",
    ),
    "no tensor": (linear, {"loss": lambda _: 1.0}, "of the type float and no tensor: pass loss="),
    "no labels": (
        lambda: (MODELS["bert"][0], {"input_ids": texts()["input_ids"]}),
        {},
        "returns no loss: put labels into the batch",
    ),
    "nothing is trained": (half_trained, {"loss": squared}, "no parameter that is trained"),
    "loss fails": (linear, {"loss": lambda y: y.reshape(7, 7)}, "the loss cannot be made of what"),
    "real targets": (linear, with_targets(), "the loss uses a tensor made outside: give"),
    "no pair": (linear, {"loss": F.cross_entropy}, "needs a batch of two parts"),
    "no samples": (
        lambda: (linear()[0], torch.zeros(())),
        {},
        "no tensor with samples in dimension",
    ),
    "optimizer of another model": (
        linear,
        {"optimizer": torch.optim.AdamW(linear()[0].parameters()), "loss": squared},
        "^the optimizer was made for another model: pass its class, such as torch.optim.AdamW",
    ),
    "optimizer and a function": (
        lambda: (perceptron, torch.zeros(8, 784)),
        {"optimizer": torch.optim.AdamW(linear()[0].parameters()), "loss": squared},
        "^the optimizer was made for another model",
    ),
    "optimizer by its name": (
        linear,
        {"optimizer": "adamw", "loss": squared},
        "of the type str: a",
    ),
    "no optimizer": (
        linear,
        {"optimizer": list, "loss": squared},
        "the optimizer cannot be made of the model's parameters: list is no optimizer",
    ),
    "optimizer that asks for more": (
        linear,
        {"optimizer": torch.optim.LBFGS, "loss": squared},
        "the optimizer makes no plain step: .*closure",
    ),
    "class without arguments": (
        lambda: (torch.nn.Linear, torch.zeros(8, 10)),
        {},
        "cannot be built: .* takes its arguments by functools.partial",
    ),
    "function of no model": (lambda: (dict, torch.zeros(8, 10)), {}, "returns dict and no module"),
    "no model": (lambda: (7, torch.zeros(8, 10)), {}, "the model is of the type int"),
    "sparse": (
        lambda: (torch.nn.ParameterList([torch.eye(3).to_sparse()]), torch.zeros(8, 10)),
        {},
        "holds a tensor of the kind Parameter .*: pass a function that builds it",
    ),
    "unknown card": (linear, {"gpu": "T5"}, "'T5' is not a known GPU"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_one_sentence(name):
    asked, options, words = REFUSED[name]
    with pytest.raises(ValueError, match=words) as caught:
        estimate(*asked(), **options)
    assert "\n" not in str(caught.value)


def test_a_model_that_cannot_be_copied_is_told():
    model = torch.nn.Linear(10, 10)
    model.log = (line for line in "ab")  # nobody can copy a generator
    with pytest.raises(
        ValueError, match="^the model cannot be copied .*: pass a function"
    ) as caught:
        estimate(model, torch.zeros(8, 10), loss=squared)
    assert "\n" not in str(caught.value)


def test_a_model_that_asks_for_values_is_refused():
    class Chooses(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x)[x > 0]

    with pytest.raises(NotSimulated, match="picks by tensors' values"):
        estimate(Chooses(10, 10), torch.zeros(8, 10), loss=squared)


def test_without_rates_there_are_bytes_and_the_time_says_why():
    for gpu in ("24GiB", Card("mine", (8, 9), 58, memory=24 * 2**30)):
        found = estimate(*linear(), loss=squared, gpu=gpu, largest=False)
        assert found.fits and found.time.step_seconds is None
        why = found.time.note
        assert why.startswith("No time is predicted: the ") and str(found).count(why) == 1
    unknown = estimate(*linear(), loss=squared, gpu=Card.like((8, 0)))
    assert unknown.fits is unknown.headroom is unknown.largest_batch is None


def test_a_missing_table_of_cards_is_told_and_a_size_does_without(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "__file__", str(tmp_path / "site-packages" / "fake_cuda" / "x.py"))
    with pytest.raises(FileNotFoundError, match="was not found: give a size such as gpu='24GiB'"):
        estimate(*linear(), loss=squared)
    assert estimate(*linear(), loss=squared, gpu="16 GB", largest=False).fits
