"""torch.compile in a script that nobody changed: planned for the card, or run eager and said."""

import textwrap

import pytest

from fake_cuda import simulate
from fake_cuda.scripts import Script

BLOCK = """
import torch
from torch.nn.functional import gelu, scaled_dot_product_attention

class Block(torch.nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.norm, self.wide = torch.nn.LayerNorm(width), torch.nn.Linear(width, 4 * width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        at = torch.arange(x.shape[1], device=x.device)[:, None]
        return x + self.out(gelu(self.wide(self.norm(x + at))))
"""
LOOP = """
torch.manual_seed(0)
model = Block().to(DEVICE)
called = torch.compile(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
for _ in range(3):
    x = torch.zeros(64, 128, 64).to(DEVICE)
    called(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.wide, self.out = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return self.out(change(torch.nn.functional.gelu(self.wide(x))))

def change(x):
    return x

model = Net().cuda()
optimizer, sizes = torch.optim.AdamW(model.parameters()), [512] * 4
"""
STEPS = """
for size in sizes:
    out = called(torch.randn(size, 128).cuda())
    assert out.is_cuda and out.device.type == "cuda"
    out.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def ran(tmp_path):
    """A function: the simulation of a script's text, and its note."""

    def run(*parts: str):
        path = tmp_path / "train.py"
        path.write_text("\n".join(map(textwrap.dedent, parts)))
        script = Script(str(path))
        return simulate(script, (8, 0)), script.note

    return run


def test_it_is_planned_as_the_same_code_in_a_function(ran):
    def run():
        names = {"__name__": "here", "DEVICE": "cpu"}
        exec(BLOCK + LOOP, names)
        return names

    script, note = ran("DEVICE = 'cuda'", BLOCK, LOOP)
    function = simulate(run, (8, 0))
    eager, _ = ran("DEVICE = 'cuda'", BLOCK, LOOP.replace("torch.compile(model)", "model"))
    assert script.peak_allocated == function.peak_allocated < eager.peak_allocated
    assert script.peak_reserved == function.peak_reserved
    assert script.by_category == function.by_category and "eager" not in note


WAYS = {
    "the module's own": "model.compile()\ncalled = model",
    "its forward": "called = model.forward = torch.compile(model.forward)",
    "whole": "called = torch.compile(model, fullgraph=True)",
    "sizes that change": "called = torch.compile(model)\nsizes = [256, 512, 384, 512]",
    "a break, and names of the card": """
        def change(x):
            torch._dynamo.graph_break()
            return x.to("cuda") + torch.ones(x.shape[-1], device="cuda")
        called = torch.compile(model)""",
    "a value, and what it prints": """
        def change(x):
            print(x.device, x.shape)
            return x / x.abs().max().item()
        called = torch.compile(model)""",
    "one rank": """
        torch.distributed.init_process_group("nccl")
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[0])
        called = torch.compile(model)""",
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_compile(way, ran):
    _, note = ran(NET, WAYS[way], STEPS)
    assert "eager" not in note


@pytest.mark.parametrize(
    "asked", ["mode='reduce-overhead'", "mode='max-autotune'", "backend='cudagraphs'"]
)
def test_a_mode_that_takes_more_is_planned_as_the_default_and_named(asked, ran):
    usual, _ = ran(NET, "called = torch.compile(model)", STEPS)
    found, note = ran(NET, f"called = torch.compile(model, {asked})", STEPS)
    assert found.peak_allocated == usual.peak_allocated
    assert f"({asked}) was planned as torch.compile's default mode" in note


def test_code_that_picks_by_values_of_a_plan_is_run_eager_and_that_is_said(ran):
    picks = """
    def change(x):
        if not torch.isfinite(x).all():
            raise ValueError("not finite")
        return x
    called = torch.compile(model)
    """
    eager, _ = ran(NET, picks.replace("torch.compile(model)", "model"), STEPS)
    found, note = ran(NET, picks, STEPS)
    assert found.peak_allocated == eager.peak_allocated
    assert note.startswith("torch.compile was run as eager code")


def test_what_cannot_be_compiled_is_run_eager_and_named(ran):
    broken = """
    import torch._inductor.graph
    torch._inductor.graph.GraphLowering.run = None
    called = torch.compile(model)
    """
    found, note = ran(NET, broken, STEPS)
    assert "in Net.forward" in note and "was run as eager code" in note and found.peak_reserved


@pytest.mark.parametrize("lists", [True, False])
def test_an_optimizer_that_is_compiled_has_no_temporaries(lists, ran):
    """Of lists of tensors Inductor makes one kernel for several, which has a writer of its own."""
    model = f"""
    called, sizes = torch.compile(model), [8] * 4
    optimizer = torch.optim.AdamW(model.parameters(), foreach={lists})
    """
    eager, _ = ran(NET, model, STEPS)
    found, note = ran(NET, model, "optimizer.step = torch.compile(optimizer.step)", STEPS)
    assert "eager" not in note and found.peak_allocated < eager.peak_allocated


def test_code_for_the_host_computes(ran):
    host = """
    @torch.compile
    def prepared(x):
        return torch.relu(x) + 1
    ready = prepared(torch.tensor([-1.0, 2.0]))
    assert ready.tolist() == [1.0, 3.0]
    called = model
    """
    assert ran(NET, host, STEPS)[0].peak_reserved


def test_a_script_that_fails_by_itself_fails_in_its_own_words(ran):
    with pytest.raises(ValueError, match="line .* of train.py.*mine"):
        ran(NET, "torch.compile(model)(torch.randn(4, 128).cuda())\nraise RuntimeError('mine')")
