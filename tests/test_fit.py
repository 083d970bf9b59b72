"""`helpers.fit`: what it searches, its order and margin, code to paste, the cache, bad input.

Most tests put a formula in the place of the predictions, so that they are about the search alone.
"""

import functools
import json
from types import SimpleNamespace

import pytest
import transformers

from helpers import fit as module
from helpers.__main__ import main
from helpers.fit import KINDS, WAYS, Facts, Recipe, Search, card, code, fit
from helpers.hardware import GIB
from helpers.workloads import language_modelling, text_classification

SHAPE = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
KIND = {kind.name: kind for kind in KINDS}
BASE = {"full": 12, "full, 8-bit AdamW": 10, "full, Adafactor": 8, "LoRA": 2, "QLoRA": 1}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decoder")
    config = transformers.LlamaConfig(vocab_size=257, max_position_embeddings=64, **SHAPE)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    config = transformers.BertConfig(vocab_size=257, max_position_embeddings=64, **SHAPE)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    return str(folder)


def formula(search, kind, way, micro, layers=0, length=0):
    """GiB and seconds that are linear in the micro-batch and the length."""
    tokens = (length or search.workload.length) / 32
    each = (1 if "checkpoint" in way else 4) - 0.5 * ("chunked" in way) - 0.2 * ("host" in way)
    size = int((BASE.get(kind.name, 6) + micro * tokens * each) * GIB)
    speed = 1.0 - 0.3 * kind.adapters + 0.3 * ("checkpoint" in way) + 0.2 * ("host" in way)
    seconds = search.batch * (speed + 0.1 / micro)
    return Facts(size, size, {"parameters": size}, {}, seconds, seconds, seconds, "the formula")


@pytest.fixture
def by_formula(monkeypatch):
    monkeypatch.setattr(Search, "predict", formula)
    monkeypatch.setattr(Search, "ways", lambda search: [w for w in WAYS if w[-4:] != "host"])


def search(model, task=language_modelling, gpu="RTX 4090", **options):
    options = {"batch": 2, "margin": 0.03, "hub_id": model} | options
    return Search(task(model, length=16), card(gpu), **options)


# -------------------------------------------------------------------------------------- the search
def test_least_change_comes_first_and_all_leave_their_margin(decoder, by_formula):
    found = fit(decoder, "24GiB", length=32, batch=8)
    names = [r.kind.name for r in found.recipes]
    assert names == sorted(names, key=[k.name for k in KINDS].index)
    assert names[0] == "full" and names[-2:] == ["LoRA", "QLoRA"] and found.miss is None
    assert 0.01 < found.search.margin < 0.1  # computed from what was judged
    for r in found.recipes:
        assert r.facts.peak_reserved * (1 + found.search.margin) + 2**29 <= r.need + 1
        assert r.need <= 24 * GIB and r.micro_batch * r.accumulation == 8
        assert r.largest_micro_batch >= r.micro_batch


def test_more_change_that_is_no_faster_is_not_shown(decoder, by_formula):
    names = [r.kind.name for r in fit(decoder, "80GiB", length=32, batch=8).recipes]
    assert names == ["full", "LoRA", "QLoRA"]  # all plain: no other full run is faster


def test_plain_is_taken_where_it_fits(decoder, by_formula):
    found = fit(decoder, "80GiB", length=32, batch=8)
    assert {r.way for r in found.recipes} == {""} and found.recipes[0].price == "nothing"
    tight = fit(decoder, "24GiB", length=32, batch=8).recipes[0]
    assert tight.micro_batch < 8 or "checkpoint" in tight.way


def test_nothing_fits(decoder, by_formula):
    found = fit(decoder, "1.5GiB", length=32)
    assert found.recipes == [] and found.miss.kind.name == "QLoRA" and found.miss.need > 1.5 * GIB
    assert "Nothing fits" in str(found) and found.miss.smallest_card in str(found)
    assert json.loads(found.to_json())["recipes"][0]["fits"] is False


def test_the_longest_sample(decoder, by_formula):
    found = fit(decoder, "16GiB", length=32, longest=True)
    for kind, tokens in found.longest.items():
        last = found.search.ways()[-1]
        one = Search(found.search.workload, found.search.card, 1, found.search.margin, "")
        need = one.need(one.predict(KIND[kind], last, 1, 0, tokens).peak_reserved)
        assert 0 < tokens <= 64 and need <= 16 * GIB  # 64 positions


def test_the_smallest_card(decoder, by_formula):
    recipe = fit(decoder, "80GiB", length=32, batch=1).recipes[-1]
    assert recipe.kind.name == "QLoRA"
    small = module.hardware.gpu(recipe.smallest_card)
    assert recipe.need <= small.memory < 80 * GIB
    again = fit(decoder, recipe.smallest_card, length=32, batch=1)
    assert "QLoRA" in {r.kind.name for r in again.recipes}


def test_a_card_without_bf16_gets_fp16_and_no_16_bit_weights(decoder, by_formula):
    found = search(decoder, gpu="T4")
    assert found.precision == "fp16" and all(k.adapters or not k.sixteen for k in found.kinds())
    used = module.settings(KIND["full, Adafactor in backward"], "", 2, 1, "fp16")
    assert "fp16" not in used and module.settings(KIND["LoRA"], "", 2, 1, "fp16")["fp16"]


def test_the_lines_of_two_twins_meet_the_full_prediction(tmp_path):
    config = transformers.LlamaConfig(
        **SHAPE | {"num_hidden_layers": 6, "hidden_size": 256}, vocab_size=512
    )
    config.save_pretrained(tmp_path)
    found = search(str(tmp_path), cache=False)
    need, seconds = found.lines(KIND["LoRA"], "", 2)
    full = found.predict(KIND["LoRA"], "", 2)
    assert need == pytest.approx(found.need(full.peak_reserved), rel=0.02)
    assert seconds == pytest.approx(full.step_seconds, rel=0.05)


# ----------------------------------------------------------------------------------- code to paste
@pytest.fixture
def pasted(monkeypatch, tmp_path):
    """Runs a script as it stands; a machine without a card is told to use its CPU."""
    arguments = transformers.TrainingArguments
    here = functools.partialmethod(arguments.__init__, use_cpu=True, report_to="none")
    monkeypatch.setattr(arguments, "__init__", here)
    monkeypatch.chdir(tmp_path)

    def run(found, kind, way, micro, accumulation):
        recipe = Recipe(kind, way, micro, accumulation, None, 0, micro, None, None, None, None)
        text = code(found, recipe)
        assert all(len(line) <= 100 for line in text.splitlines()), text
        names = {}
        exec(compile(text, "pasted", "exec"), names)
        assert names["trainer"].state.global_step == 2
        return names

    return run


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_code_of_every_kind_runs_as_it_is(kind, decoder, pasted):
    way = "checkpointing, chunked loss" if kind.adapters or kind.inside else ""
    found = search(decoder)
    accumulation = 1 if kind.inside else 2
    names = pasted(found, kind, way, found.batch // accumulation, accumulation)
    trained = [p for p in names["trainer"].model.parameters() if p.requires_grad]
    assert kind.adapters == (len(trained) < len(list(names["trainer"].model.parameters())))


@pytest.mark.parametrize("kind", ("full", "LoRA"))
def test_the_code_of_a_classifier_runs_as_it_is(kind, encoder, pasted):
    names = pasted(search(encoder, text_classification), KIND[kind], "checkpointing", 1, 2)
    assert "label" not in kind and names["args"].activation_checkpointing


def test_the_chunked_loss_is_the_loss(decoder):
    import torch

    model = transformers.AutoModelForCausalLM.from_pretrained(decoder)
    ids = torch.randint(0, 257, (2, 40))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)
    plain = model(input_ids=ids, labels=labels).loss
    chunked = module.chunked_loss(model).forward(ids, labels)["loss"]
    assert float(chunked) == pytest.approx(float(plain), rel=1e-5)


# --------------------------------------------------------------------------------------- the cache
@pytest.fixture
def folders(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_folders", lambda: [tmp_path / "a", tmp_path / "b"])
    return tmp_path


def test_a_second_call_is_read_and_damage_is_ignored(decoder, folders, monkeypatch):
    calls = []
    real = module.predict
    monkeypatch.setattr(module, "predict", lambda *a, **k: calls.append(1) or real(*a, **k))
    ask = functools.partial(search(decoder).predict, KIND["LoRA"], "", 2)
    first = ask()
    assert ask() == first and len(calls) == 1
    (path,) = (folders / "a").iterdir()
    foreign = json.loads(path.read_text()) | {"key": "someone else's"}
    strange = json.loads(path.read_text()) | {"peak_reserved": "much"}
    for text in ("", "{", "[]", json.dumps(foreign), json.dumps(strange)):
        path.write_text(text)
        assert ask() == first
    assert len(calls) == 6


def test_other_settings_and_other_code_are_asked_anew(decoder, folders, monkeypatch):
    keys = []
    monkeypatch.setattr(module, "_kept", lambda key: keys.append(key) or SimpleNamespace())
    search(decoder).predict(KIND["LoRA"], "", 2)
    search(decoder).predict(KIND["LoRA"], "", 1)
    search(decoder, gpu="T4").predict(KIND["LoRA"], "", 2)
    monkeypatch.setattr(module, "_code", lambda: "edited")
    search(decoder).predict(KIND["LoRA"], "", 2)
    assert len(set(keys)) == 4


def test_a_folder_that_cannot_be_written_is_no_error(decoder, folders):
    (folders / "a").write_text("a file in its place")
    facts = Facts(1, 1, {"parameters": 1}, {})
    module._keep("k", facts)
    assert module._kept("k") == facts and (folders / "b" / "k.json").is_file()
    (folders / "b" / "k.json").unlink()
    (folders / "b").rmdir()
    (folders / "b").write_text("here too")
    module._keep("k", facts)
    assert module._kept("k") is None


# ------------------------------------------------------------------------------------- the command
def test_the_command(decoder, by_formula, capsys):
    assert main(["fit", "--model", decoder, "--gpu", "24GiB", "--length", "32"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "LoRA" in out and "tokens/s" in out and "effective batch 8" in out
    arguments = ["fit", "--model", decoder, "--gpu", "24GiB", "--length", "32", "--json"]
    assert main(arguments) == 0
    rows = json.loads(capsys.readouterr().out)["recipes"]
    assert rows[0]["fits"] and "TrainingArguments(" in rows[0]["code"] and rows[0]["price"]
    assert main(["fit", "--model", decoder, "--gpu", "1.5GiB", "--length", "32"]) == 3
    assert "nearest miss" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "qwen3-9b"], "did you mean 'qwen3-8b'"),
        (["--model", "someone/some-model"], "the hub cannot be reached"),
        (
            ["--model", "vit-large-patch16-224", "--task", "language_modelling"],
            "is not a model for",
        ),
        (["--model", "gpt2", "--gpu", "A101"], "did you mean 'A10'"),
        (["--model", "gpt2", "--gpu", "24 apples"], "is not a known GPU"),
        (["--model", "gpt2", "--gpu", "here"], "name the card"),
        (["--model", "gpt2", "--gpu", "P100"], "no hardware for 16 bits"),
        (["--model", "gpt2", "--length", "1025"], "reads 1024 tokens at most"),
        (["--model", "gpt2", "--batch", "0"], "batch"),
        (["--model", "gpt2", "bf16=True"], "is not an option of fit"),
        ([], "--model"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_bad_input_is_one_sentence(arguments, message, capsys):
    assert main(["fit", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err
