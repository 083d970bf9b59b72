"""What torch remembers under a shorter key is what it would have worked out anew."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from fake_cuda import mode, simulate
from fake_cuda.compiled import Compiler
from fake_cuda.trace import Trace
from helpers import language_modelling, predict, text_classification

SETTINGS = [
    {},
    {"bf16": True, "gradient_checkpointing": True},
    {"fp16": True, "optim": "adamw_bnb_8bit", "gradient_accumulation_steps": 2},
    {"optim": "adafactor"},
]


class Checked(mode.OneMode):
    """Holds each result against that of the operation itself."""

    def __init__(self, **options):
        super().__init__(**options)
        self.cache_crosscheck_enabled = True


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("make", [language_modelling, text_classification])
def test_what_is_remembered_is_what_the_operation_returns(monkeypatch, make, settings):
    monkeypatch.setattr("fake_cuda.simulation.OneMode", Checked)
    predict(make("tiny"), gpu="A100-40GB", **settings)


class TestKeys:
    """Two calls whose results differ have two keys, whatever differs."""

    def key(self, inside, func, *args, **kwargs):
        return inside._cache_key(None, func, args, kwargs)

    def test_of_all_that_results_depend_on(self):
        with mode.OneMode() as inside:
            x = torch.zeros(4, 6)
            others = [
                torch.zeros(6, 4),
                torch.zeros(6, 4).t(),
                torch.zeros(4, 6, dtype=torch.float64),
                torch.zeros(4, 6, requires_grad=True),
                torch.zeros(5, 6)[:4],
                torch.zeros(5, 6)[1:],
                torch.zeros(4, 6, dtype=torch.complex64),
                torch.zeros(4, 6, dtype=torch.complex64).conj(),
                torch.zeros(4, 6, dtype=torch.complex64).imag,
                torch.zeros(4, 6, dtype=torch.complex64).conj().imag,
                torch.zeros(4, 6, device="meta"),
            ]
            with torch.inference_mode():
                others.append(torch.zeros(4, 6))
            add = torch.ops.aten.add.Tensor
            keys = [self.key(inside, add, one, 1) for one in (x, *others)]
            keys += [self.key(inside, add, x, 1.0), self.key(inside, add, x, True)]
            keys += [self.key(inside, add, x, 1, alpha=2), self.key(inside, add, x, 1, alpha=2.0)]
            keys += [self.key(inside, torch.ops.aten.sub.Tensor, x, 1)]
            keys += [self.key(inside, add, x, (1, 2)), self.key(inside, add, x, [1, 2])]
            keys += [self.key(inside, add, x, [1], 2), self.key(inside, add, x, [[1, 2]])]
            assert len(set(keys)) == len(keys)
            assert self.key(inside, add, torch.ones(4, 6), 1) == keys[0]

    def test_of_uncommon_arguments_it_is_torchs_own(self):
        with mode.OneMode() as inside:
            one = torch.zeros(2, 2)
            state = torch._subclasses.fake_tensor._CacheKeyState(None)
            func = torch.ops.aten.add.Tensor
            key = inside._cache_key(state, func, (one, 1j), {})
            assert key == super(mode.OneMode, inside)._cache_key(state, func, (one, 1j), {})


def test_what_a_fake_tensor_knows_of_itself_is_what_torch_tells_it():
    with mode.OneMode() as inside:
        for device in ("cpu", "cpu", "meta", "meta"):
            meta = torch.empty(2, 3, device="meta", requires_grad=device == "meta")
            found = inside._fake(meta, torch.device(device))
            known = FakeTensor(inside, meta, torch.device(device))
            assert vars(found) == vars(known) and type(found) is FakeTensor
            assert vars(found) is not vars(inside._fake(meta, torch.device(device)))
            assert found.device == known.device and found.requires_grad == known.requires_grad
            keys = torch._C._dispatch_keys
            assert keys(found) == keys(known)


def run():
    layer = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(layer.parameters())

    @torch.compile
    def compiled(x):
        with open(__file__):  # where a break leaves the whole frame to Python, and asks for others
            torch._dynamo.graph_break()
            return layer(x * 2)

    for _ in range(2):
        compiled(torch.zeros(2, 8)).sum().backward()
        optimizer.step()


def test_no_dispatch_is_guarded_and_none_is_compiled(monkeypatch):
    asked, skips = [], Compiler.skips

    def ask(compiler, frame):
        asked.append(frame.f_code.co_name)
        return skips(compiler, frame)

    monkeypatch.setattr(Compiler, "skips", ask)
    simulate(run)
    assert asked and "__torch_dispatch__" not in asked
    for kind in (mode.OneMode, Trace):
        assert kind.__torch_dispatch__.__globals__["__name__"].startswith("fake_cuda.")
