"""`helpers.fit`: what it searches, its order and margin, code to paste, the cache, bad input.

Most tests put a formula in the place of the predictions, so that they are about the search alone.
"""

import dataclasses
import functools
import json
import shutil

import peft
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

SHAPE = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
BASE = {"full": 12, "full, 8-bit AdamW": 10, "full, Adafactor": 8, "LoRA": 2, "QLoRA": 1}


def saved(folder, config_kind, model_kind) -> str:
    quiet = {} if config_kind is transformers.LlamaConfig else {"hidden_dropout_prob": 0.0}
    quiet |= {"attention_probs_dropout_prob": 0.0} if quiet else {"pad_token_id": 0}
    config = config_kind(vocab_size=257, max_position_embeddings=64, **SHAPE, **quiet)
    config.initializer_range = 0.2  # attention looks at some tokens more than at others
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
LABELS = (40, 20, 8, 2)  # of four samples, two in a micro-batch: however drawn, no two halves match


def samples(search) -> list[dict]:
    """Four samples of unlike lengths and numbers of labels; half of one is a text of its own."""
    random, found = torch.Generator().manual_seed(0), []
    for n, counted in enumerate(LABELS):
        length = 20 + counted + n
        ids = torch.randint(3, 257, (length,), generator=random)
        sample = {"input_ids": ids, "labels": torch.tensor(n % 2)}
        if search.workload.task == "language_modelling":
            labels = ids.clone()
            labels[: length - counted] = -100
            at = torch.arange(length)
            sample |= {"labels": labels, "position_ids": torch.where(at < 10, at, at - 10)}
        found.append(sample)
    return found


def padded(rows: list[dict]) -> dict:
    """A batch with its mask, padded on the left; without positions of its own on the right."""
    side = "left" if "position_ids" in rows[0] else "right"
    batch, columns = {}, {"input_ids": 0, "labels": -100, "position_ids": 0, "attention_mask": 0}
    for row in rows:
        row["attention_mask"] = torch.ones_like(row["input_ids"])
    for key in columns.keys() & rows[0].keys():
        found = [row[key] for row in rows]
        if found[0].dim():
            options = {"padding_value": columns[key], "padding_side": side}
            found = torch.nn.utils.rnn.pad_sequence(found, True, **options)
        batch[key] = found if torch.is_tensor(found) else torch.stack(found)
    return batch


@dataclasses.dataclass
class Ran:
    """A script that was pasted and run: its names, and the gradients of its first step."""

    names: dict
    gradients: dict
    batch: dict


@pytest.fixture
def pasted(monkeypatch, tmp_path):
    """Runs a script as it stands, but for its data; a machine without a card uses its CPU."""
    arguments = transformers.TrainingArguments
    usual = dict(use_cpu=True, report_to="none", max_grad_norm=0, learning_rate=1e-2)
    here = functools.partialmethod(arguments.__init__, **usual)
    monkeypatch.setattr(arguments, "__init__", here)
    offload = torch.autograd.graph.save_on_cpu
    plain = offload.__init__  # without a card there is no memory to pin
    monkeypatch.setattr(offload, "__init__", lambda hooks, *_, **__: plain(hooks))
    monkeypatch.chdir(tmp_path)

    def run(found, name, micro, edit=lambda text: text):
        text = edit(found.code(name, micro))
        assert all(len(line) <= 100 for line in text.splitlines() if "pytest" not in line), text
        assert text.count("train_dataset = [sample]") == text.count("=train_dataset)") == 1
        assert ("learning_rate=5e-4," in text) == ("LoRA" in name)
        text = text.replace("learning_rate=5e-4", "learning_rate=1e-2")  # few steps
        text = text.replace("train_dataset = [sample]", "_ = [sample]").replace(
            "=train_dataset)", "=SAMPLES, data_collator=padded)"
        )
        rows, seen = samples(found), {}

        class Watch(transformers.TrainerCallback):
            def on_pre_optimizer_step(self, args, state, control, model=None, **_):
                for key, p in model.named_parameters():
                    if p.grad is not None:
                        seen[key] = p.grad.float().clone()

        def step(optimizer, closure=None, plain=transformers.Adafactor.step):
            for p in optimizer.param_groups[0]["params"]:
                if p.grad is not None:
                    seen[id(p)] = p.grad.float().clone()
            return plain(optimizer, closure)

        def trainer(*args, real=transformers.Trainer, **options):
            return real(*args, callbacks=[Watch()], **options)

        names = {"SAMPLES": rows, "padded": padded}
        transformers.set_seed(0)
        with monkeypatch.context() as patch:
            patch.setattr(transformers, "Trainer", trainer)
            patch.setattr(transformers.Adafactor, "step", step)
            exec(compile(text, "pasted", "exec"), names)
        assert names["trainer"].state.global_step == 1
        for key, value in found.settings(name, micro).items():
            assert getattr(names["args"], key) == value
        parameters = names["trainer"].model.named_parameters()
        gradients = {key: seen.get(key, seen.get(id(p))) for key, p in parameters}
        gradients = {key: value for key, value in gradients.items() if value is not None}
        return Ran(names, gradients, padded(rows))

    return run


def prepared(found, name) -> torch.nn.Module:
    """The model of a script, before it is trained; `lora` begins where adapters come."""
    names = {}
    transformers.set_seed(0)
    exec(found.code(name, 1).split("\nsample = ")[0], names)
    return names["model"].train()


def by_hand(found, name, batch) -> dict:
    """The gradient of the mean over all labels of a step, by the plain model in one batch."""
    model = prepared(found, name)
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    with torch.autocast("cpu", torch.bfloat16, enabled="bf16" in found.settings(name, 1)):
        logits = model(**inputs).logits.float()
    logits, labels = (
        (logits[:, :-1], batch["labels"][:, 1:]) if logits.dim() == 3 else (logits, batch["labels"])
    )
    torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten()).backward()
    return {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}


def distance(gradients: dict, wanted: dict) -> float:
    """How far two gradients are apart, as a share of the second."""
    assert gradients.keys() == wanted.keys()
    apart = sum((gradients[n] - wanted[n]).square().sum() for n in wanted)
    return float((apart / sum(g.square().sum() for g in wanted.values())).sqrt())


def answers(model, batch) -> torch.Tensor:
    """Logits, in the 16 bits that Trainer leaves around a model that it trained in them."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return model.eval()(**inputs).logits.float()


def check_method(model, trainer, name):
    """The prepared model is of the method that the recipe names."""
    layers = dict(model.named_modules())
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trained.values()} == {
        torch.bfloat16 if "in bf16" in name else torch.float32
    }
    adapters = {n for n in trained if "lora_" in n}
    heads = {n for n in trained if "classifier" in n or "lm_head" in n}
    assert bool(adapters) == ("LoRA" in name)
    if adapters:
        assert trained.keys() <= adapters | heads and not any("lm_head" in n for n in adapters)
        assert all(f"{part}_proj" in str(adapters) for part in "qkvo") or "query" in str(adapters)
    small = {n: m for n, m in layers.items() if type(m).__name__ == "Linear4bit"}
    assert bool(small) == ("QLoRA" in name)
    assert all(
        m.weight.quant_type == "nf4" and m.weight.dtype == torch.uint8 for m in small.values()
    )
    assert not any("lm_head" in n or "classifier" in n for n in small)
    assert ("checkpoint" in name) == any(
        getattr(m, "gradient_checkpointing", False) for m in layers.values()
    )
    kind = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    if "8-bit" in name:
        assert kind.args.optim_bits == 8
    assert isinstance(kind, transformers.Adafactor) == ("Adafactor" in name and "back" not in name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_the_code_of_every_recipe_keeps_its_promise(kind, way, decoder, pasted):
    """One step of the real Trainer, in two micro-batches where it accumulates: the gradient is
    that of the plain model, the method the one named, and what is saved loads again."""
    name, found = module._name(kind, way), search(decoder, batch=4)
    ran = pasted(found, name, 4 if "backward" in kind else 2)
    model, trainer = ran.names["trainer"].model, ran.names["trainer"]
    rounded = "bf16" in name or "bf16" in found.settings(name, 1)
    assert distance(ran.gradients, by_hand(found, kind, ran.batch)) < (0.03 if rounded else 1e-4)
    check_method(model, trainer, name)
    if "LoRA" in kind:
        base = {}
        exec(found.code(name, 1).split("\nlora = ")[0], base)
        again = peft.PeftModel.from_pretrained(base["model"], "trained")
    else:
        again = transformers.AutoModelForCausalLM.from_pretrained("trained")
    assert type(again) is type(model)
    kept = {n: p for n, p in model.state_dict().items() if "lora_" in n or "LoRA" not in kind}
    assert kept and all(torch.equal(again.state_dict()[n], p) for n, p in kept.items())
    torch.testing.assert_close(answers(again, ran.batch), answers(model, ran.batch))
    moved = answers(prepared(found, name), ran.batch) - answers(model, ran.batch)
    assert moved.abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_the_code_of_a_classifier_keeps_its_promise(kind, encoder, pasted):
    name, found = f"{kind}, checkpointing", search(encoder, text_classification, batch=4)
    ran = pasted(found, name, 4 if "backward" in kind else 2)
    model = ran.names["trainer"].model
    check_method(model, ran.names["trainer"], name)
    assert any(p.requires_grad for n, p in model.named_parameters() if "classifier" in n)
    wanted = by_hand(found, kind, ran.batch)
    assert distance(ran.gradients, wanted) < 0.05


@pytest.mark.parametrize(
    "right, wrong",
    [
        ("total / num_items_in_batch", "total / (targets != -100).sum()"),
        ("total / num_items_in_batch", "total / targets.numel()"),
        ("labels=None, num_items_in_batch=None, **others", "labels=None, attention_mask=None"),
        ("model.base_model(input_ids, **others)", "model.base_model(input_ids)"),
        ("labels[:, 1:]", "labels[:, :-1]"),
    ],
)
def test_a_wrong_loss_is_seen(right, wrong, decoder, pasted):
    """Planted defects: each moves the gradient by more than rounding, or stops the script."""
    name, found = "full, chunked loss", search(decoder, batch=4)
    assert right in found.code(name, 2)
    try:
        ran = pasted(found, name, 2, lambda text: text.replace(right, wrong))
    except (TypeError, NameError):
        return
    assert distance(ran.gradients, by_hand(found, "full", ran.batch)) > 0.05


def test_a_quantized_model_is_put_on_the_card_whole(decoder):
    """With "auto", a fifth of the card is set aside, and what is left over for the host refused."""
    text = search(decoder).code("QLoRA", 1)
    assert "load_in_4bit=True" in text and "device_map" not in text


def test_the_recorded_code_is_what_is_pasted_today():
    for row in load("fits").itertuples():
        model = language_modelling(row.model, length=row.length)
        asked = Search(model, card(row.gpu), row.batch, 0.0, hub_id(row.model))
        code = asked.code(row.recipe, row.micro_batch)
        assert code.split("\n")[2:] == row.code.split("\n")[2:]  # the first name the versions
        assert row.code.startswith("# Predicted with torch ")


def hub_id(name):
    return json.loads(data_file("configs", f"{name}.json").read_text())["_name_or_path"]


@pytest.mark.parametrize("kind", ("full in bf16", "LoRA", "QLoRA"))
@pytest.mark.parametrize("task", (language_modelling, text_classification))
def test_what_is_pasted_is_what_was_predicted(kind, task, decoder, encoder):
    """The same weights in the same types: names, shapes, and which of them learn."""
    found = search(decoder if task is language_modelling else encoder, task)

    def weights(model):
        named = model.named_parameters()
        return {n: (tuple(p.shape), p.dtype, p.requires_grad) for n, p in named}

    assert weights(prepared(found, kind)) == weights(found.changed(kind, found.workload).model())


def test_gpt2_whose_products_are_transposed_is_quantized_too():
    """It writes Conv1D where others write Linear; bitsandbytes replaces both."""
    small = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=257)
    model = module._in_4_bits(transformers.GPT2LMHeadModel(small))
    kinds = {n: type(m).__name__ for n, m in model.named_modules()}
    assert (
        kinds["transformer.h.0.attn.c_attn"] == kinds["transformer.h.1.mlp.c_proj"] == "LinearNF4"
    )
    assert kinds["lm_head"] == "Linear"


def trained(decoder, change=lambda model: model, optimizer=None, **settings):
    """Losses and weights of ten steps of the real Trainer, two micro-batches each."""
    found = search(decoder, batch=4)
    model = change(transformers.AutoModelForCausalLM.from_pretrained(decoder))
    usual = dict(per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=10)
    usual |= dict(logging_steps=1, report_to="none", use_cpu=True, save_strategy="no")
    args = transformers.TrainingArguments("unused", learning_rate=1e-2, **usual | settings)
    rows = samples(found)
    trainer = transformers.Trainer(model, args, train_dataset=rows, data_collator=padded)
    trainer.optimizer = optimizer and optimizer(model, args)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row], model


def test_the_loss_falls_as_that_of_the_plain_model(decoder):
    plain, _ = trained(decoder)
    chunked, model = trained(decoder, functools.partial(module.chunked_loss, size=7))
    assert plain[-1] < 0.7 * plain[0] and chunked == pytest.approx(plain, rel=1e-3)
    ids = torch.arange(3, 9)[None]
    assert model(ids).logits.shape == (1, 6, 257)  # it answers, too
    assert model.generate(ids, max_new_tokens=2, pad_token_id=0).shape == (1, 8)


def test_in_backward_is_trainers_adafactor(decoder):
    once = dict(per_device_train_batch_size=4, gradient_accumulation_steps=1, max_grad_norm=0)
    plain, one = trained(decoder, optim="adafactor", **once)
    inside, other = trained(decoder, optimizer=module.in_backward, **once)
    assert inside == pytest.approx(plain, rel=1e-5) and plain[-1] < plain[0]
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    with pytest.raises(ValueError, match="do not accumulate"):
        trained(decoder, optimizer=module.in_backward)


def test_a_micro_batch_without_labels_counts_nothing(decoder):
    model = module.chunked_loss(transformers.AutoModelForCausalLM.from_pretrained(decoder))
    ids = torch.randint(0, 257, (2, 40))
    loss = model(input_ids=ids, labels=torch.full_like(ids, -100), num_items_in_batch=5)["loss"]
    assert loss.item() == 0


def small(config):
    """The same kind of model with two narrow layers; None where the head is no mere product."""
    shape = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=16)
    shape |= dict(num_key_value_heads=2, intermediate_size=128, vocab_size=257, pad_token_id=0)
    shape |= dict(bos_token_id=1, eos_token_id=2, max_position_embeddings=64)
    told = {key: value for key, value in config.to_dict().items() if "layer_types" not in key}
    return type(config).from_dict(told | shape)


@pytest.mark.parametrize("name", sorted(path.stem for path in data_file("configs").glob("*.json")))
def test_the_chunked_loss_is_that_of_every_model_for_which_it_is_offered(name):
    config = transformers.AutoConfig.from_pretrained(data_file("configs", f"{name}.json"))
    if type(config) not in transformers.AutoModelForCausalLM._model_mapping.keys():
        return
    work = dataclasses.replace(language_modelling("tiny"), config=small(config), length=2**20)
    if not any("chunked" in way for way in Search(work, card("T4"), 64, 0.0, name).ways()):
        return
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(small(config)).eval()
    ids = torch.randint(3, 257, (2, 40))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)
    plain = model(input_ids=ids, labels=labels).loss
    chunked = module.chunked_loss(model, size=16)(input_ids=ids, labels=labels)["loss"]
    torch.testing.assert_close(chunked, plain)


def test_chunks_are_not_offered_where_the_head_is_more_than_a_product(tmp_path):
    shape = SHAPE | {"vocab_size": 4000, "is_decoder": True}
    configs = {"bert": transformers.BertConfig(**shape)}  # its head has a layer of its own
    shape = SHAPE | {"vocab_size": 4000, "head_dim": 16, "final_logit_softcapping": 30.0}
    configs["gemma"] = transformers.Gemma2Config(**shape)
    for name, config in configs.items():
        work = dataclasses.replace(language_modelling("tiny"), config=config, length=2**20)
        ways = Search(work, card("T4"), 64, 0.0, name).ways()
        assert ways and not any("chunked" in way for way in ways), name


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


# --------------------------------------------------------------------------------------- the words
def test_the_margin_is_that_of_the_blind_test():
    keys = ["set", "run", "quantity"]
    blind = load("blind_peaks").merge(load("real_cards")[[*keys, "measured"]], on=keys)
    needed = blind["measured"] / blind["predicted"]
    assert len(blind) == 142 and 0.94 < (needed <= 1 + module.margin()).mean() < 0.96


def test_a_card_without_rates_says_so_once(decoder, by_formula, monkeypatch):
    timed = formula

    def untimed(*asked):
        return dataclasses.replace(timed(*asked), step_seconds=0.0, low=0.0, high=0.0, note="none")

    monkeypatch.setattr(Search, "predict", untimed)
    text = str(fit(decoder, "RTX 4070", length=32))
    assert text.count("rates") == 1 and "tokens/s" not in text and "none\n" not in text
    assert "- to -" not in text and "limited by" not in text


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
        (["--model", "qwen3-1.7b"], "there are qwen3-0.6b, qwen3-14b, qwen3-32b, qwen3-4b"),
        (["--model", "qwen3-1.7b"], "the model's hub id, such as Qwen/Qwen3"),
        (["--model", "llama3.2-1b"], "did you mean 'llama-3.2-1b'"),
        (["--model", "phi-2"], "where there are phi-4-14b"),
        (["--model", "t5-small"], "the hub cannot be reached"),  # no relative of tinyllama
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
