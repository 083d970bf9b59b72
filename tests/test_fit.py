"""`helpers.fit`: what it searches, its order and margin, code to paste, the cache, bad input.

Most tests put a formula in the place of the predictions, so that they are about the search alone.
"""

import dataclasses
import functools
import json
import shutil

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from helpers import fit as module
from helpers.__main__ import main
from helpers.fit import KINDS, WAYS, Facts, Search, card, fit
from helpers.hardware import GIB, data_file
from helpers.prediction import predict
from helpers.runs import load
from helpers.workloads import language_modelling, text_classification

SHAPE = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
BASE = {"full": 12, "full, 8-bit AdamW": 10, "full, Adafactor": 8, "LoRA": 2, "QLoRA": 1}


def saved(folder, config_kind, model_kind) -> str:
    config = config_kind(vocab_size=257, max_position_embeddings=64, **SHAPE)
    model_kind(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decoder")
    return saved(folder, transformers.LlamaConfig, transformers.LlamaForCausalLM)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    return saved(folder, transformers.BertConfig, transformers.BertForSequenceClassification)


def formula(search, name, micro, layers=0, length=0):
    """GiB and seconds that are linear in the micro-batch and the length."""
    tokens, kind = (
        (length or search.workload.length) / 32,
        max(k for k in KINDS if name.startswith(k)),
    )
    each = (1 if "checkpoint" in name else 4) - 0.5 * ("chunked" in name) - 0.2 * ("host" in name)
    size = int((BASE.get(kind, 6) + micro * tokens * each) * GIB)
    speed = 1.0 - 0.3 * ("LoRA" in name) + 0.3 * ("checkpoint" in name) + 0.2 * ("host" in name)
    seconds = search.batch * (speed + 0.1 / micro)
    phases = {"forward": size}
    return Facts(size, size, {"parameters": size}, phases, seconds, seconds, seconds, "the formula")


@pytest.fixture
def by_formula(monkeypatch):
    monkeypatch.setattr(Search, "predict", formula)
    monkeypatch.setattr(Search, "ways", lambda search: WAYS)


def search(model, task=language_modelling, gpu="RTX 4090", **options):
    options = {"batch": 2, "margin": 0.03, "hub_id": model} | options
    return Search(task(model, length=16), card(gpu), **options)


# -------------------------------------------------------------------------------------- the search
def test_least_change_comes_first_and_all_leave_their_margin(decoder, by_formula):
    found = fit(decoder, "24GiB", length=32, batch=8)
    names = [r.kind for r in found.recipes]
    assert names == sorted(names, key=list(KINDS).index)
    assert names[0] == "full" and names[-2:] == ["LoRA", "QLoRA"] and found.miss is None
    assert 0.01 < found.search.margin < 0.1  # computed from what was judged
    for r in found.recipes:
        assert r.facts.peak_reserved * (1 + found.search.margin) + 2**29 <= r.need + 1
        assert r.need <= 24 * GIB and r.micro_batch * r.accumulation == 8
        assert r.largest_micro_batch >= r.micro_batch


def test_more_change_that_is_no_faster_is_not_shown(decoder, by_formula):
    names = [r.kind for r in fit(decoder, "80GiB", length=32, batch=8).recipes]
    assert names == ["full", "LoRA", "QLoRA"]  # all plain: no other full run is faster


def test_plain_is_taken_where_it_fits(decoder, by_formula):
    found = fit(decoder, "80GiB", length=32, batch=8)
    assert {r.name for r in found.recipes} == {"full", "LoRA", "QLoRA"} and found.recipes[
        0
    ].price == "nothing"
    tight = fit(decoder, "24GiB", length=32, batch=8).recipes[0]
    assert tight.micro_batch < 8 or "checkpoint" in tight.name


def test_nothing_fits(decoder, by_formula):
    found = fit(decoder, "1.5GiB", length=32)
    assert found.recipes == [] and found.miss.kind == "QLoRA" and found.miss.need > 1.5 * GIB
    assert "Nothing fits" in str(found) and found.miss.smallest_card in str(found)
    assert json.loads(found.to_json())["recipes"][0]["fits"] is False


def test_the_longest_sample(decoder, by_formula):
    found = fit(decoder, "16GiB", length=32, longest=True)
    one = dataclasses.replace(found.search, batch=1)
    for kind, tokens in found.longest.items():
        facts = one.predict(module._name(kind, one.ways()[-1]), 1, 0, tokens)
        assert 0 < tokens <= 64 and one.need(facts.peak_reserved) <= 16 * GIB


def test_the_smallest_card(decoder, by_formula):
    recipe = fit(decoder, "80GiB", length=32, batch=1).recipes[-1]
    assert recipe.kind == "QLoRA"
    small = module.hardware.gpu(recipe.smallest_card)
    assert recipe.need <= small.memory < 80 * GIB
    again = fit(decoder, recipe.smallest_card, length=32, batch=1)
    assert "QLoRA" in {r.kind for r in again.recipes}


def test_a_card_without_bf16_gets_fp16_and_no_16_bit_weights(decoder, by_formula):
    found = fit(decoder, "T4", length=32)
    assert found.search.precision == "fp16" and found.search.candidates("full in bf16") == []
    used = found.search.settings("full, Adafactor in backward", 2)
    assert "fp16" not in used and found.search.settings("LoRA", 2)["fp16"]
    assert "bf16" not in used and "fp16=True" in found.recipes[-1].code


@pytest.mark.parametrize("name", ("LoRA", "full, Adafactor in backward, checkpointing"))
def test_the_lines_of_two_twins_meet_the_full_prediction(name, tmp_path):
    shape = SHAPE | {"num_hidden_layers": 6, "hidden_size": 256}
    transformers.LlamaConfig(**shape, vocab_size=512).save_pretrained(tmp_path)
    found = search(str(tmp_path), cache=False)
    need, seconds = found.lines(name, 2)
    full = found.predict(name, 2)
    assert need == pytest.approx(found.need(full.peak_reserved), rel=0.02)
    assert seconds == pytest.approx(full.step_seconds, rel=0.05)


def test_layers_of_two_kinds_need_a_twin_for_each(tmp_path, monkeypatch):
    shape = SHAPE | {"num_hidden_layers": 8, "hidden_size": 256, "head_dim": 64}
    config = transformers.Gemma3TextConfig(**shape, vocab_size=512, sliding_window=8)
    assert config.layer_types.count("sliding_attention") == 7  # every sixth sees everything
    config.save_pretrained(tmp_path)
    found, asked = search(str(tmp_path), cache=False), []
    real = Search.predict

    def predict(self, name, micro, layers=(), length=0):
        asked.append(layers)
        return real(self, name, micro, layers, length)

    monkeypatch.setattr(Search, "predict", predict)
    need, seconds = found.lines("LoRA", 2)
    assert [len(layers) for layers in asked] == [2, 3, 3]  # and not six and twelve
    full = found.predict("LoRA", 2)
    assert need == pytest.approx(found.need(full.peak_reserved), rel=0.02)
    assert seconds == pytest.approx(full.step_seconds, rel=0.05)


@pytest.mark.parametrize("name", ("full, checkpointing", "LoRA", "QLoRA, checkpointing"))
def test_what_is_kept_is_the_prediction_with_the_same_settings(name, decoder):
    found = search(decoder, batch=4, cache=False)
    facts, settings, work = found.predict(name, 1), found.settings(name, 1), found.workload
    if "LoRA" in name:
        work = work.with_model(lambda model: model.bfloat16())
    for change in [change for word, change in module.CHANGES.items() if word in name]:
        work = work.with_model(change)
    whole = predict(work, gpu="RTX 4090", **settings)
    assert facts.peak_allocated == pytest.approx(whole.peak_allocated, rel=0.01)
    assert facts.peak_reserved == pytest.approx(whole.peak_reserved, rel=0.01)
    assert facts.step_seconds == pytest.approx(whole.step_seconds, rel=0.02)
    assert sum(facts.by_category.values()) == facts.peak_allocated
    assert facts.by_category == pytest.approx(whole.by_category, rel=0.03, abs=2**16)


def test_data_are_read_for_their_lengths(decoder, by_formula, tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(json.dumps({"text": "abc " * n}) for n in (1, 2, 3, 20)))
    with pytest.raises(ValueError, match="no tokenizer of"):
        fit(decoder, "24GiB", length=8, data=path)
    vocabulary = {"[UNK]": 0, "abc": 1}
    words = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    folder = shutil.copytree(decoder, tmp_path / "model")
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    found = fit(str(folder), "24GiB", length=8, data=path, batch=2)
    assert "25.0% of 4 samples have more than 8 tokens. The longest, of 20, needs" in str(found)
    assert found.data in found.to_json()


# ----------------------------------------------------------------------------------- code to paste
@pytest.fixture
def pasted(monkeypatch, tmp_path):
    """Runs a script as it stands; a machine without a card is told to use its CPU."""
    arguments = transformers.TrainingArguments
    here = functools.partialmethod(arguments.__init__, use_cpu=True, report_to="none")
    monkeypatch.setattr(arguments, "__init__", here)
    offload = torch.autograd.graph.save_on_cpu
    plain = offload.__init__  # without a card there is no memory to pin
    monkeypatch.setattr(offload, "__init__", lambda hooks, *_, **__: plain(hooks))
    monkeypatch.chdir(tmp_path)

    def run(found, name, micro):
        text = found.code(name, micro)
        assert all(len(line) <= 100 for line in text.splitlines() if "pytest" not in line), text
        names = {}
        exec(compile(text, "pasted", "exec"), names)
        assert names["trainer"].state.global_step == 2
        for key, value in found.settings(name, micro).items():
            assert getattr(names["args"], key) == value
        return names["trainer"].model

    return run


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_the_code_of_every_recipe_runs_as_it_is(kind, way, decoder, pasted):
    name = module._name(kind, way)
    model = pasted(search(decoder), name, 2 if "backward" in kind else 1)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert ("LoRA" in kind) == (len(trained) < len(list(model.parameters())))
    kept = torch.bfloat16 if "in bf16" in kind else torch.float32
    assert {p.dtype for p in trained} == {kept}


@pytest.mark.parametrize("kind", KINDS)
def test_the_code_of_a_classifier_runs_as_it_is(kind, encoder, pasted):
    found = search(encoder, text_classification)
    model = pasted(found, f"{kind}, checkpointing", 2 if "backward" in kind else 1)
    assert any(p.requires_grad for name, p in model.named_parameters() if "classifier" in name)


def test_a_quantized_model_is_put_on_the_card_whole(decoder):
    """With "auto", a fifth of the card is set aside, and what is left over for the host refused."""
    text = search(decoder).code("QLoRA", 1)
    assert "load_in_4bit=True" in text and "device_map" not in text


def test_the_recorded_code_is_what_is_pasted_today():
    for row in load("fits").itertuples():
        model = language_modelling(row.model, length=row.length)
        asked = Search(model, card(row.gpu), row.batch, 0.0, hub_id(row.model))
        assert asked.code(row.recipe, row.micro_batch) == row.code


def hub_id(name):
    return json.loads(data_file("configs", f"{name}.json").read_text())["_name_or_path"]


def test_the_chunked_loss_is_the_loss(decoder):
    ids, found = torch.randint(0, 257, (2, 40)), []
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)
    for change in (lambda model: model, module.chunked_loss):
        model = change(transformers.AutoModelForCausalLM.from_pretrained(decoder))
        loss = model(input_ids=ids, labels=labels)["loss"]
        loss.backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
        found.append((loss.detach(), gradients))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


# --------------------------------------------------------------------------------------- the cache
@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "data_file", lambda *parts: tmp_path.joinpath("data", *parts))
    return tmp_path / "build" / "predictions"


def test_a_second_call_is_read_and_damage_is_ignored(folder):
    facts, calls = Facts(3, 4, {"parameters": 2}, {"forward": 1}, 0.5), []

    def ask(what="a question"):
        return module._kept(what, lambda: calls.append(1) or facts)

    assert ask() == ask() == facts and len(calls) == 1
    (path,) = folder.iterdir()
    whole = path.read_text()
    ask("another")
    (foreign,) = set(folder.iterdir()) - {path}
    for text in ("", "{", "[]", "{}\n{}", whole[:-1], whole.replace("4", "5"), foreign.read_text()):
        path.write_text(text)
        assert ask() == facts
    path.write_bytes(b"\xff\xfe\n\x00")
    assert ask() == facts and len(calls) == 10


def test_a_folder_that_cannot_be_written_is_no_error(folder):
    folder.parent.write_text("a file in its place")
    facts = Facts(1, 1, {"parameters": 1}, {})
    assert module._kept("k", lambda: facts) == facts


def test_other_settings_and_other_code_are_asked_anew(decoder, monkeypatch):
    keys = []
    monkeypatch.setattr(module, "_kept", lambda asked, make: keys.append(asked))
    search(decoder).predict("LoRA", 2)
    search(decoder).predict("LoRA", 1)
    search(decoder, gpu="T4").predict("LoRA", 2)
    search(decoder).predict("LoRA", 2, (1,))
    monkeypatch.setattr(module, "_code", lambda: "edited")
    search(decoder).predict("LoRA", 2)
    assert len(set(keys)) == 5


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
        (["--model", "gpt-oss-20b"], "is published in mxfp4"),
        (["--model", "gpt2", "--gpu", "A101"], "did you mean 'A10'"),
        (["--model", "gpt2", "--gpu", "24 apples"], "is not a known GPU"),
        (["--model", "gpt2", "--gpu", "here"], "is not a known GPU"),
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


def test_the_longest_is_found_where_the_twins_see_no_slope(monkeypatch):
    """The allocator's jumps may hide it: then full predictions show the way down."""
    known = card("T4")
    search = Search(language_modelling("llama-3.2-1b"), known, 1, 0.0, "x")
    monkeypatch.setattr(Search, "lines", lambda *_: (2**30, 1.0))
    empty = Facts(0, 0, {}, {})
    peak = lambda length: dataclasses.replace(empty, peak_reserved=2**30 + 10**6 * length)  # noqa: E731
    monkeypatch.setattr(Search, "predict", lambda *a: peak(a[-1]))
    longest = search.longest("LoRA")
    room = known.memory - (known.context or module.CONTEXT) - 2**30
    assert 0.9 * room < 10**6 * longest <= room
