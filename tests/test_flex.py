"""Flex attention, which trains on a card alone: bytes and blocks by hand, and a model with it."""

import functools
import gc

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from fake_cuda import NotSimulated, refusals, simulate
from fake_cuda.card import Card
from fake_cuda.choices import flex
from fake_cuda.scripts import Script

RATES = {"fp32": 19.5e12, "tf32": 156e12, "fp16": 312e12, "bf16": 312e12}
A100 = Card("A100", (8, 0), 108, 1.555e12, RATES)
LENGTH, BLOCKS = 512, 16  # 4 x 4 blocks of 128


def causal(b, h, query, key):
    return query >= key


def called(query, key, value, change, mask):
    return flex_attention(query, key, value, change, block_mask=mask, enable_gqa=True)


def step(mask_mod=None, width=(64, 64), batch=1, heads=(4, 2), change=None, whole=False):
    """Two steps of attention alone; `whole`: in the graph of a function that is compiled."""

    def once(query, key, value):
        make, attention = torch.compile(create_block_mask), torch.compile(flex_attention)
        mask = mask_mod and make(mask_mod, 1, None, LENGTH, LENGTH, device="cpu")
        if whole:
            out = torch.compile(called)(query, key, value, change, mask)
        else:
            out = attention(query, key, value, change, block_mask=mask, enable_gqa=True)
        out.backward(torch.zeros_like(out))

    def run():
        shapes = [(heads[0], width[0]), (heads[1], width[0]), (heads[1], width[1])]
        tensors = [
            torch.nn.Parameter(torch.zeros(batch, h, LENGTH, w, dtype=torch.bfloat16))
            for h, w in shapes
        ]
        optimizer = torch.optim.SGD(tensors)
        for _ in range(2):
            once(*tensors)
            gc.collect()  # what a compiler leaves in circles, until Python finds it
            optimizer.step()
            optimizer.zero_grad()

    return run


def rounded(*sizes: int) -> int:
    """Bytes of blocks, as the allocator gives them."""
    return sum(-(-size // 512) * 512 for size in sizes)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("width", [(64, 64), (64, 32)])
@pytest.mark.parametrize("batch", [1, 2])
def test_bytes_of_forward_and_backward_are_those_of_inductors_buffers(width, batch, whole):
    """At the peak: what is given, its gradients, the result and its gradient, of each row the sum
    and backward's number in fp32, and four times the numbers of blocks and their places."""
    rows = batch * 4 * LENGTH
    query, key, value = (batch * h * LENGTH * w * 2 for h, w in ((4, 64), (2, 64), (2, width[1])))
    out = rows * width[1] * 2
    mask = [4 * 4, 4 * BLOCKS] * 4
    expected = rounded(*[query, key, value, out] * 2, *[rows * 4] * 2, *mask)
    found = simulate(step(causal, width=width, batch=batch, whole=whole), (8, 0))
    assert found.peak_allocated == expected


def of_documents(known: bool):
    """A mask of documents, whose numbers are those of the data, or computed."""
    numbers = torch.arange(LENGTH) // 256 if known else torch.randn(LENGTH).int()
    return lambda b, h, query, key: numbers[query] == numbers[key]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("mask_mod", "blocks"),
    [
        (None, BLOCKS),
        (lambda: causal, 4 + 3 + 2 + 1),
        (lambda: lambda b, h, query, key: query - key < 128, 4 + 4 + 3 + 2),
        (lambda: and_masks(causal, of_documents(True)), 1 + 2 + 1 + 2),
        (lambda: of_documents(False), BLOCKS),
    ],
)
def test_products_are_those_of_the_blocks_that_are_not_masked(mask_mod, blocks, whole):
    """Two forward and five backward, as in FlashAttention-2; where blocks are not known, of all."""

    def run():
        step(mask_mod and mask_mod(), width=(64, 32), whole=whole)()

    time = simulate(run, A100).time
    pairs = 4 * blocks * 128**2
    assert time.flops == 2 * pairs * (64 + 32 + 3 * 64 + 2 * 32)
    assert (flex.ALL_BLOCKS in time.note) == (mask_mod is not None and blocks == BLOCKS)
    assert flex.RATE in time.note


def test_a_checkpoint_computes_it_again():
    def run():
        query = torch.nn.Parameter(torch.zeros(1, 4, LENGTH, 64, dtype=torch.bfloat16))
        optimizer, attention = torch.optim.SGD([query]), torch.compile(flex_attention)
        for _ in range(2):
            again = checkpoint(attention, query, query, query, use_reentrant=False)
            again.backward(torch.zeros_like(again))
            optimizer.step()
            optimizer.zero_grad()

    pairs = 4 * LENGTH**2
    time = simulate(run, A100).time
    assert time.flops == 2 * pairs * 64 * (2 + 2 + 5) and time.model_flops == 2 * pairs * 64 * 7


def learned(bias):
    return lambda score, b, h, query, key: score + bias[h]


class Bias(torch.nn.Module):
    """A module that is a function of scores, or has one."""

    def __init__(self, train=True):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(4), requires_grad=train)
        self.biases = torch.nn.ParameterList([self.bias])
        self.table = torch.nn.Embedding(2 * LENGTH, 4).requires_grad_(train)

    def forward(self, score, b, h, query, key):
        return score + self.bias[h]

    def apart(self, score, b, h, query, key):
        return score + self.table.weight[query - key + LENGTH, h]

    def helped(self, score, b, h, query, key):
        return score + of_head(self.biases, h)

    def sigmoids(self, score, b, h, query, key):
        return torch.where(query >= key, score * torch.sigmoid(self.bias)[h], -float("inf"))


def of_head(biases, h):
    return next(iter(biases))[h]


GLOBAL = None  # a module with a bias


def by_global(score, b, h, query, key):
    return score + GLOBAL.bias[h]


def computed(module):
    slopes = torch.exp(module.bias)
    return lambda score, b, h, query, key: score + slopes[h] * (query - key)


WAYS = {
    "closure": lambda module: learned(module.bias),
    "list": lambda module: lambda score, b, h, *_: score + [module.bias][0][h],
    "object": lambda module: module,
    "method": lambda module: module.apart,
    "helper": lambda module: module.helped,
    "factor": lambda module: module.sigmoids,
    "argument": lambda module: functools.partial(default, of=dict(bias=module.bias)),
    "global": lambda module: by_global,
    "computed": computed,
}


def default(score, b, h, query, key, of=None):
    return score + of["bias"][h]


@pytest.mark.parametrize("way", WAYS)
def test_a_trained_bias_is_refused_however_it_is_reached(way, monkeypatch):
    """And predicted where it is not trained: with the bytes of no bias at all, since the kernel
    reads it where it lies."""

    def run(train, change=None):
        module = Bias(train)
        monkeypatch.setitem(globals(), "GLOBAL", module)
        made = WAYS[way](module)
        step(change=change or made)()

    with pytest.raises(NotSimulated) as caught:
        simulate(lambda: run(True), (8, 0))
    assert caught.value.what == refusals.FLEX_LEARNED
    frozen, plain = (
        simulate(lambda change=change: run(False, change), (8, 0)).log
        for change in (None, lambda score, *_: score * 2)
    )
    assert [size for _, size in frozen] == [size for _, size in plain]


def test_a_bias_that_is_trained_is_planned_where_its_function_is_compiled_as_a_whole():
    """Its gradient is one more result of backward, in fp32 as it is."""
    found = []
    for trained in (True, False):

        def run(trained=trained):
            bias = torch.nn.Parameter(torch.zeros(2**16), requires_grad=trained)
            query = torch.nn.Parameter(torch.zeros(1, 4, LENGTH, 64, dtype=torch.bfloat16))
            optimizer = torch.optim.SGD([query, bias])
            for _ in range(2):
                out = torch.compile(called)(query, query, query, learned(bias), None)
                out.backward(torch.zeros_like(out))
                optimizer.step()
                optimizer.zero_grad()
                gc.collect()

        found.append(simulate(run, (8, 0)).by_category)
    first, second = found
    assert first["gradients"] - second["gradients"] == 4 * 2**16


SCRIPT = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=1, vocab_size=99,
    num_attention_heads=4, num_key_value_heads=2, attn_implementation="{}")
model = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
compiled = ({})(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    ids = torch.randint(0, 99, (2, 512), device="cuda")
    compiled(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_of_transformers_with_flex_attention(tmp_path):
    """Beside flash attention it keeps the sums in fp32 as that does; its mask's blocks are small,
    its kernel's numbers of rows too."""
    found = {}
    for name in ("flex_attention", "sdpa"):
        (tmp_path / "train.py").write_text(SCRIPT.format(name, "lambda model: model"))
        found[name] = simulate(Script(tmp_path / "train.py"), A100)
    first, second = (f.peak_by_category["activations"] for f in found.values())
    assert first == pytest.approx(second, rel=0.1)
    times = [f.time for f in found.values()]
    assert "flex_attention" not in times[0].note and flex.ALL_BLOCKS not in times[0].note


def test_a_model_that_is_compiled_as_a_whole_has_it_in_its_plan(tmp_path):
    """As with flash attention its graph keeps queries, keys, values, results and sums."""
    found = {}
    for name in ("flex_attention", "sdpa"):
        (tmp_path / "train.py").write_text(SCRIPT.format(name, "torch.compile"))
        found[name] = simulate(Script(tmp_path / "train.py"), A100)
        assert "eager" not in found[name].time.note
    first, second = (f.peak_by_category["activations"] for f in found.values())
    assert first == pytest.approx(second, rel=0.1)
    assert flex.RATE in found["flex_attention"].time.note
