"""What a card raises is raised in a script run: two places, two types, a wrong generator."""

import importlib.util
import re
import textwrap

import pytest

from fake_cuda import simulate
from fake_cuda.scripts import Script

needs_liger = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("triton", "liger_kernel"))), reason="needs Liger"
)
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


def test_of_a_size_that_depends_on_values_in_a_library_its_line_is_told_too(script, tmp_path):
    library = tmp_path / "site-packages"
    library.mkdir()
    (library / "losses.py").write_text("def loss(scores):\n    return scores[scores > 0].sum()\n")
    line = "losses.loss(there)"
    with pytest.raises(ValueError) as told:
        script(f"import sys\nsys.path.append({str(library)!r})\nimport losses\n{line}")
    at = f"in line {START.count(chr(10)) + 4} of train.py: `{line}`, in line 2 of losses.py: "
    assert f"{at}`return scores[scores > 0].sum()`: what it makes there dep" in str(told.value)


def test_packed_sequences_are_refused_by_name_and_line(script):
    line = "torch.nn.utils.rnn.pack_padded_sequence(there, torch.tensor([8, 4, 2, 1, 1, 1, 1, 1]))"
    with pytest.raises(ValueError, match=r"packs sequences with .* in line \d+ of train.py"):
        script(line)


def test_padded_sequences_are_predicted_as_the_refusal_of_packed_ones_says(script):
    lines = """
layer = torch.nn.LSTM(8, 16, batch_first=True, bidirectional=True).cuda()
found, _ = layer(torch.randn(4, 7, 8, device="cuda"))
assert found.shape == (4, 7, 32)
found.sum().backward()
"""
    assert script(lines).updates == 2


OUT_OF_RANGE = {
    "table(torch.tensor([1, 9]).cuda())": "uses index 9 of a dimension with 9 entries",
    "table(rows.cuda() - 1)": "uses index -1 of a dimension with 9 entries",
    "F.embedding_bag(rows.cuda()[None] + 7, table.weight)": "uses index 9 of a dimension with 9",
    "F.cross_entropy(there, torch.arange(1, 9).cuda())": "uses label 8 where there are 8 classes",
    "F.cross_entropy(there, torch.arange(8).cuda() - 1)": "uses label -1 where there are 8",
    "F.nll_loss(there, torch.full((8,), -100).cuda(), ignore_index=0)": "uses label -100",
    "F.cross_entropy(heads, torch.full((1, 8, 8), 1).cuda())": "uses label 1 where there are 1",
    "F.one_hot(rows.cuda() + 6, 8)": "uses label 8 where there are 8 classes",
    "F.one_hot(rows.cuda() - 1, num_classes=8)": "uses label -1 where there are 8 classes",
    "there[rows + 6]": "uses index 8 of a dimension with 8 entries",
    "there[:, rows.cuda() - 9]": "uses index -9 of a dimension with 8 entries",
    "there[rows * 9] = 0.0": "uses index 18 of a dimension with 8 entries",
    "there.index_select(1, rows.cuda() + 7)": "uses index 9 of a dimension with 8 entries",
    "there.gather(1, torch.full((8, 1), 8).cuda())": "uses index 8 of a dimension with 8 entries",
    "there.gather(1, torch.full((8, 1), -1).cuda())": "uses index -1 of a dimension with 8",
    "there.scatter(0, torch.full((1, 8), 8).cuda(), 1.0)": "uses index 8 of a dimension with 8",
    "there.index_add_(0, rows.cuda() + 6, there[:3])": "uses index 8 of a dimension with 8",
    "there.index_fill_(0, rows.cuda() - 9, 1.0)": "uses index -9 of a dimension with 8",
    "there.take(rows.cuda() + 63)": "uses index 65 of a dimension with 64 entries",
}
IN_RANGE = """
ids, labels = torch.arange(9).cuda(), torch.tensor([0, 7, -100, 3, -100, 1, 2, 5]).cuda()
table(ids), torch.nn.Embedding(9, 8, padding_idx=-1).cuda()(ids), table(ids[:0])
F.embedding_bag(ids[None], table.weight)
F.cross_entropy(there, labels), F.cross_entropy(there, labels.clamp(0), ignore_index=0)
F.cross_entropy(there, labels.clamp(max=7).where(labels >= 0, 255), ignore_index=255)
F.cross_entropy(there, there.softmax(1)), F.nll_loss(there, labels)
F.cross_entropy(there[None].transpose(1, 2), labels[None])
there[rows - 8], there[:, rows.cuda() - 8], there[..., ids[:8]], there[None, None, ids[:8]]
there[ids[:8] > 3], there[rows, rows.cuda() + 5], there[ids[:8, None], ids[:8]], there[-1]
there[ids[:8] % 2 == 0, 1], heads[:, [0, -1], 7]
there.index_select(0, ids[:8]), there.gather(1, ids[:8, None]), there.take(ids - 64)
there.scatter_(0, ids[None, :8], 1.0), there.index_fill_(0, ids[:8] - 8, 1.0)
F.one_hot(ids, 9), F.one_hot(ids), F.one_hot(rows + 5, num_classes=8), there.sum().gather(0, ids[0])
with torch.inference_mode():
    F.cross_entropy(there, labels), table(ids), F.one_hot(ids, 9)
# What was written through a view is not known any more.
tokens = torch.full((4, 6), -1, device="cuda")
for k in range(6):
    tokens[:, k] = table.weight[:4].argmax(-1)
table(tokens)
copied = torch.full((4,), -1)
copied.copy_(tokens[:, 0])
table(copied.cuda())
table((tokens[:, 0].cpu() * 100).cuda() // 100)
"""


LIGERS = """
from liger_kernel.transformers import LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss
fused, plain = LigerFusedLinearCrossEntropyLoss(), LigerCrossEntropyLoss()
labels = torch.tensor([0, 7, -100, 3, -100, 1, 2, 5]).cuda()
"""
WITHOUT_LOOKING = {
    "F.ctc_loss(scores, labels + 7, [9, 9], [3, 2])": "uses label 9 where there are 8 classes",
    "F.ctc_loss(scores, labels - 3, nine, nine // 3)": "uses label -2 where there are 8 classes",
    "F.ctc_loss(scores, labels[0] + 7, [9, 9], [1, 2])": "uses label 9 where there are 8 classes",
    "torch.nn.CTCLoss()(scores, labels * 4, nine.cuda(), nine.cuda() // 3)": "uses label 8 where",
}
LIGERS_WRONG = {
    "fused(linear.weight, there, labels - 1)": "uses label -101 where there are 8 classes",
    "fused(linear.weight, there, labels.clamp(0) + 3)": "uses label 10 where there are 8 classes",
}
SCORES = """
scores = there.expand(9, 8, 8)[:, :2].requires_grad_()
labels, nine = torch.tensor([[1, 1, 2], [1, 2, 2]]).cuda(), torch.tensor([9, 9])
"""
CTC_IN_RANGE = """
padded = torch.tensor([[1, 7, 2], [3, -1, 99]]).cuda()
F.ctc_loss(scores, padded, [9, 9], [3, 1]), F.ctc_loss(scores, padded, nine, torch.tensor([3, 1]))
F.ctc_loss(scores, padded, nine.cuda(), torch.tensor([3, 1]).cuda())
F.ctc_loss(scores, padded[0], [9, 9], [1, 2]).backward()
"""


def _stops_beyond(script, before, wrong, says):
    with pytest.raises(ValueError) as error:
        script(f"{before}{wrong}\n")
    line = (START + before).count("\n") + 1
    place = f", in line {line} of train.py: `{wrong}`: this kernel does not look, and a card"
    assert f"train.py {says}" in str(error.value) and place in str(error.value)


@pytest.mark.parametrize("wrong", WITHOUT_LOOKING)
def test_a_label_that_ctc_loss_does_not_look_at_is_told_with_its_line(script, wrong):
    _stops_beyond(script, SCORES, wrong, WITHOUT_LOOKING[wrong])


def test_padding_of_ctc_loss_is_no_label(script):
    assert script(SCORES + CTC_IN_RANGE).updates == 2


GUESSED = "far = labels * 10**12 * int(there.sum().item())\n"  # its kernel would crash


def test_after_a_guess_a_label_of_ctc_loss_is_said_and_not_computed_with(script):
    found = script(SCORES + GUESSED + "F.ctc_loss(scores, far, nine, nine // 3)\n")
    assert found.updates == 2
    assert "uses label 2000000000000 where there are 8 classes, in line" in found.note
    assert "unless the number follows from a value that was guessed" in found.note


def test_after_a_guess_a_label_of_ctc_loss_on_the_host_is_not_computed_with(script):
    wrong = "F.ctc_loss(torch.randn(9, 2, 8), far.cpu(), nine, nine // 3)"
    with pytest.raises(ValueError) as error:
        script(f"{SCORES}{GUESSED}{wrong}\n")
    said = (
        "perhaps by a value of the card that was guessed: IndexError: Target 2000000000000 is out"
    )
    assert said in str(error.value) and f"`{wrong}`" in str(error.value)


@needs_liger
@pytest.mark.parametrize("wrong", LIGERS_WRONG)
def test_a_label_that_ligers_kernel_does_not_look_at_is_told_with_its_line(script, wrong):
    _stops_beyond(script, LIGERS, wrong, LIGERS_WRONG[wrong])


@needs_liger
def test_labels_of_liger_in_range_stop_nothing(script):
    body = LIGERS + "fused(linear.weight, there, labels).backward(), plain(there, labels)\n"
    assert script(body).updates == 2


@pytest.mark.parametrize("wrong", OUT_OF_RANGE)
def test_an_index_out_of_range_stops_the_script_with_its_line(script, wrong):
    with pytest.raises(ValueError) as error:
        script(f"\n{wrong}\n")
    line = START.count("\n") + 2
    place = f", in line {line} of train.py: `{wrong}`: a card stops there with a device-side assert"
    assert f"train.py {OUT_OF_RANGE[wrong]}" in str(error.value)
    assert str(error.value).endswith(place)


def test_an_index_out_of_range_cannot_be_caught(script):
    with pytest.raises(ValueError, match="uses index 9 of .* in line .* of train.py"):
        script("try: table(torch.tensor([9]).cuda())\nexcept BaseException: pass\n")


def test_indices_in_range_stop_nothing(script):
    script(IN_RANGE)


def test_after_a_guess_an_index_out_of_range_is_said_and_stops_nothing(script):
    found = script("n = int(there.sum().item() * 9)\ntable(torch.tensor([n]).cuda())\n")
    assert "uses index 9 of a dimension with 9 entries, in line" in found.note
    assert "unless the number follows from a value that was guessed" in found.note


def test_on_the_host_an_index_out_of_range_is_torchs_error(script):
    body = """
    try:
        torch.nn.Embedding(9, 8)(torch.tensor([9]))
        raise SystemExit("it went on")
    except IndexError as error:
        assert "index 9 is out of bounds" in str(error)
    """
    script(body)
