"""What a card raises is raised in a script run: two places, two types, a wrong generator."""

import re
import textwrap

import pytest

from fake_cuda import simulate
from fake_cuda.scripts import Script

START = """
import torch
import torch.nn.functional as F
linear, table = torch.nn.Linear(8, 8).cuda(), torch.nn.Embedding(9, 8).cuda()
norm, conv = torch.nn.LayerNorm(8).cuda(), torch.nn.Conv1d(8, 8, 1).cuda()
there, here = torch.randn(8, 8, device="cuda"), torch.randn(8, 8)
heads = there[None, None]
number, rows = torch.tensor(2.0), torch.arange(3)
on_card, on_host = torch.Generator("cuda"), torch.Generator()
optimizer = torch.optim.AdamW(linear.parameters())
"""
END = """
for _ in range(3):
    linear(there).sum().backward()
    optimizer.step()
"""
PLACES = "Expected all tensors to be on the same device"
REFUSED = {
    "linear(here)": PLACES,
    "linear(model_of_the_host(there.cpu()))": PLACES,
    "there + here": PLACES,
    "there + torch.ones(1)": PLACES,
    "here.add_(there)": PLACES,
    "number.clone().add_(there.sum())": PLACES,
    "torch.add(there, there, out=here)": PLACES,
    "here @ there": PLACES,
    "torch.cat([there, here])": PLACES,
    "torch.stack([there.sum(), number])": PLACES,
    "table(rows)": PLACES,
    "norm(here)": PLACES,
    "conv(here[None])": PLACES,
    "F.cross_entropy(there, torch.arange(8))": PLACES,
    "F.mse_loss(there, here)": PLACES,
    "torch.where(here > 0, there, there)": PLACES,
    "there.masked_fill(here > 0, 0.0)": PLACES,
    "there.index_select(0, rows)": PLACES,
    "there[there.new_zeros(3).long()].__setitem__(rows, here[:3])": PLACES,
    "here[rows.cuda()]": "indices should be either on cpu or on the same device",
    "linear(there.half())": "same dtype, but got Half and Float",
    "there.bfloat16() @ there": "same dtype, but got BFloat16 and Float",
    "norm(there.half())": "expected scalar type Half but found Float",
    "F.scaled_dot_product_attention(heads, heads.half(), heads.half())": "Expected query, key, and",
    "torch._foreach_add_([there, there], [there, here])": PLACES,
    "torch._foreach_addcmul_([there], [here], [there])": PLACES,
    "torch._fused_adamw_([there], [there], [here], [there], [], [number], lr=1.0, beta1=0.9,"
    " beta2=0.9, weight_decay=0.0, eps=0.1, amsgrad=False, maximize=False)": "params, grads, "
    "exp_avgs, and exp_avg_sqs must have same dtype, device, and layout",
    "torch._fused_adam_([there], [there], [here], [there], [there], [number], lr=1.0, beta1=0.9,"
    " beta2=0.9, weight_decay=0.0, eps=0.1, amsgrad=True, maximize=False)": "params, grads, "
    "exp_avgs, exp_avg_sqs, and max_exp_avg_sqs must have same dtype, device, and layout",
    "linear(torch.zeros(8, 8, dtype=torch.long, device='cuda'))": "same dtype, but got Long and",
    "torch.randn(4, device='cuda', generator=on_host)": "Expected a 'cuda' device type for gen",
    "there.normal_(generator=on_host)": "Expected a 'cuda' device type for generator but",
    "torch.randperm(4, generator=on_card)": "Expected a 'cpu' device type for generator but found",
    "here.normal_(generator=on_card)": "Expected a 'cpu' device type for generator but",
}
LEGAL = """
there + number, number * there, number ** there, there.add_(number), there > number
there[rows], there[here > 0], there[1, rows]
there[rows] = 0.0
there[rows] = number
there[0] = here[0]
there.masked_fill(there > 0, number), torch.where(there > 0, number, there)
there.copy_(here), here.copy_(there), there.fill_(number), there.clamp(min=number)
here[rows] = there[rows].cpu()
there.half() + there, there.half() @ there.half()
torch.randn(4, device="cuda", generator=on_card), torch.randn(4, generator=on_host).cuda()
torch.randperm(4, generator=on_host), there.normal_(generator=on_card)
F.cross_entropy(there, torch.arange(8).cuda(), label_smoothing=0.1)
list(torch.utils.data.DataLoader(rows, shuffle=True, generator=on_host))
with torch.autocast("cuda", dtype=torch.float16):
    linear(there.half())
torch._foreach_copy_([there], [here]), torch._foreach_add_([number], [number])
torch._foreach_mul_([there, there], number)
with torch.autocast("cuda", dtype=torch.float16):
    norm(there.half())
    F.scaled_dot_product_attention(heads, heads.half(), heads.half())
with torch.inference_mode(), torch.autocast("cuda", dtype=torch.bfloat16):
    torch.einsum("ij,jk->ik", linear(there), linear.weight)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A script of this code between the building of a model and its updates, simulated."""
    monkeypatch.chdir(tmp_path)

    def run(body):
        (tmp_path / "train.py").write_text(START + textwrap.dedent(body) + END)
        found = Script(str(tmp_path / "train.py"), seconds=60)
        simulate(found)
        return found

    return run


def test_what_a_card_refuses_is_refused_in_torchs_words(script):
    script(f"""
        model_of_the_host = torch.nn.Linear(8, 8)
        for asked, says in {REFUSED!r}.items():
            try:
                eval(asked)
            except RuntimeError as error:
                assert says in str(error), (asked, str(error))
            else:
                raise SystemExit(asked + " was not refused")
    """)


def test_what_a_card_takes_from_the_host_is_taken(script):
    assert script(LEGAL).updates == 2


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("loss = F.cross_entropy(linear(there), torch.arange(8))", PLACES),
        ("linear(there.half())", "same dtype, but got Half and Float"),
        ("torch.rand(8, device='cuda', generator=on_host)", "Expected a 'cuda' device type"),
    ],
)
def test_the_script_is_at_fault_in_its_own_line(script, line, says):
    number = START.count("\n") + 2
    sentence = f"fails by itself in line {number} of train.py: `{line}`: RuntimeError: "
    with pytest.raises(ValueError, match=re.escape(sentence) + ".*" + re.escape(says)):
        script(f"there.sum().item()  # a value that is guessed\n{line}")


def test_a_size_that_depends_on_the_cards_values_is_told_with_the_line_alone(script):
    line = "chosen = there.nonzero()"
    at = f"cannot be predicted in line {START.count(chr(10)) + 1} of train.py: `{line}`: what"
    with pytest.raises(ValueError, match=re.escape(at)) as told:
        script(line)
    assert "expert" not in str(told.value)


def test_packed_sequences_are_refused_by_name_and_line(script):
    line = "torch.nn.utils.rnn.pack_padded_sequence(there, torch.tensor([8, 4, 2, 1, 1, 1, 1, 1]))"
    with pytest.raises(ValueError, match=r"packs sequences with .* in line \d+ of train.py"):
        script(line)
