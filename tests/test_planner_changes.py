"""What techniques do to a model: the same loss, the same optimizer, the right layers."""

import dataclasses
import functools

import pytest
import torch
import transformers

from helpers.hardware import data_file
from helpers.workloads import language_modelling
from planned import SHAPE, padded, question, samples, saved_decoder
from planner import changes
from planner.question import Question, find_card
from planner.techniques import CHUNKED_LOSS

T4 = find_card("T4")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return saved_decoder(tmp_path_factory.mktemp("decoder"))


def test_gpt2_whose_products_are_transposed_is_quantized_too():
    """It writes Conv1D where others write Linear; bitsandbytes replaces both."""
    small = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=257)
    model = changes.in_4_bits(transformers.GPT2LMHeadModel(small))
    kinds = {n: type(m).__name__ for n, m in model.named_modules()}
    products = "transformer.h.0.attn.c_attn", "transformer.h.1.mlp.c_proj"
    assert {kinds[name] for name in products} == {"LinearNF4"}
    assert kinds["lm_head"] == "Linear"


def trained(decoder, change=lambda model: model, optimizer=None, **settings):
    """Losses and weights of ten steps of the real Trainer, two micro-batches each."""
    asked = question(decoder, batch=4)
    model = change(transformers.AutoModelForCausalLM.from_pretrained(decoder))
    usual = dict(per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=10)
    usual |= dict(logging_steps=1, report_to="none", use_cpu=True, save_strategy="no")
    args = transformers.TrainingArguments("unused", learning_rate=1e-2, **usual | settings)
    rows = samples(asked)
    trainer = transformers.Trainer(model, args, train_dataset=rows, data_collator=padded)
    trainer.optimizer = optimizer and optimizer(model, args)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row], model


def test_the_loss_falls_as_that_of_the_plain_model(decoder):
    plain, _ = trained(decoder)
    chunked, model = trained(decoder, functools.partial(changes.chunked_loss, size=7))
    assert plain[-1] < 0.7 * plain[0] and chunked == pytest.approx(plain, rel=1e-3)
    ids = torch.arange(3, 9)[None]
    assert model(ids).logits.shape == (1, 6, 257)  # it answers, too
    assert model.generate(ids, max_new_tokens=2, pad_token_id=0).shape == (1, 8)


def test_in_backward_is_trainers_adafactor(decoder):
    once = dict(per_device_train_batch_size=4, gradient_accumulation_steps=1, max_grad_norm=0)
    plain, one = trained(decoder, optim="adafactor", **once)
    inside, other = trained(decoder, optimizer=changes.in_backward, **once)
    assert inside == pytest.approx(plain, rel=1e-5) and plain[-1] < plain[0]
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    with pytest.raises(ValueError, match="do not accumulate"):
        trained(decoder, optimizer=changes.in_backward)


def test_a_micro_batch_without_labels_counts_nothing(decoder):
    model = changes.chunked_loss(transformers.AutoModelForCausalLM.from_pretrained(decoder))
    ids = torch.randint(0, 257, (2, 40))
    loss = model(input_ids=ids, labels=torch.full_like(ids, -100), num_items_in_batch=5)["loss"]
    assert loss.item() == 0


@pytest.mark.parametrize("kind", ("ViT", "DeiT", "Beit", "Dinov2", "Dinov2WithRegisters", "IJepa"))
def test_the_tokens_that_a_vision_transformer_adds_are_no_experts(kind):
    """DINOv2 keeps one that stands for a class and one for what is hidden, as one expert would."""
    told = {"image_size": 32, "patch_size": 8, "architectures": [f"{kind}ForImageClassification"]}
    config = getattr(transformers, f"{kind}Config")(**SHAPE, **told)
    with torch.device("meta"):
        model = transformers.AutoModelForImageClassification.from_config(config)
    assert changes.stacks(model) == {}


def small(config):
    """The same kind of model with two narrow layers; None where the head is no mere product."""
    shape = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=16)
    shape |= dict(num_key_value_heads=2, intermediate_size=128, vocab_size=257, pad_token_id=0)
    shape |= dict(bos_token_id=1, eos_token_id=2, max_position_embeddings=64, use_cache=False)
    each = "layer_types", "per_layer_config", "num_kv_shared_layers"  # of layers that are not there
    told = config.to_dict().items()
    told = {key: value for key, value in told if not any(name in key for name in each)}
    rope = told.get("rope_parameters") or {}
    for key in rope.keys() & {"long_factor", "short_factor"}:  # one for two turned dimensions
        rope[key] = rope[key][: int(shape["head_dim"] * rope["partial_rotary_factor"]) // 2]
    return type(config).from_dict(told | shape)


@pytest.mark.parametrize("name", sorted(path.stem for path in data_file("configs").glob("*.json")))
def test_the_chunked_loss_is_that_of_every_model_for_which_it_is_offered(name):
    config = transformers.AutoConfig.from_pretrained(data_file("configs", f"{name}.json"))
    kinds = transformers.AutoModelForCausalLM._model_mapping.keys()
    if type(config) not in kinds or config.is_encoder_decoder:
        return
    work = dataclasses.replace(language_modelling("tiny"), config=small(config), length=2**20)
    if not any(CHUNKED_LOSS in way.techniques for way in Question(work, T4, 64, 0.0, name).ways()):
        return
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(small(config)).eval()
    ids = torch.randint(3, 257, (2, 40))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)
    plain = model(input_ids=ids, labels=labels).loss
    chunked = changes.chunked_loss(model, size=16)(input_ids=ids, labels=labels)["loss"]
    torch.testing.assert_close(chunked, plain)


def test_chunks_are_not_offered_where_the_head_is_more_than_a_product(tmp_path):
    shape = SHAPE | {"vocab_size": 4000, "is_decoder": True}
    configs = {"bert": transformers.BertConfig(**shape)}  # its head has a layer of its own
    shape = SHAPE | {"vocab_size": 4000, "head_dim": 16, "final_logit_softcapping": 30.0}
    configs["gemma"] = transformers.Gemma2Config(**shape)
    for name, config in configs.items():
        work = dataclasses.replace(language_modelling("tiny"), config=config, length=2**20)
        ways = Question(work, T4, 64, 0.0, name).ways()
        assert ways and not any(CHUNKED_LOSS in way.techniques for way in ways), name
