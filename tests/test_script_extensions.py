"""Packages of CUDA kernels that nobody can install here: what their source says they need."""

import textwrap

import pytest

from fake_cuda import simulate
from fake_cuda.card import Card
from fake_cuda.scripts import Script

T4 = Card("T4", (7, 5), 40, 320e9, {"fp32": 4.35e12, "fp16": 41.9e12})
RATES = {"fp32": 19.5e12, "tf32": 156e12, "fp16": 312e12, "bf16": 312e12}
A100 = Card("A100", (8, 0), 108, 1555e9, RATES)
START = """
import torch
from torch import nn
import torch.nn.functional as F
"""
ATTENTION = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(256, 768), nn.Linear(256, 256)
    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = (t.view(b, n, 4, 64) for t in self.qkv(x).chunk(3, -1))
        return x + self.out(attend(q, k, v).reshape(b, n, 256))
model = nn.Sequential(*(Block() for _ in range(3))).cuda().bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(9):
    x = torch.randn(64, 512, 256, device="cuda", dtype=torch.bfloat16)
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
PLAIN = """
def attend(q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*parts, card=A100, **options):
        text = START + "".join(textwrap.dedent(part) for part in parts)
        (tmp_path / "train.py").write_text(text)
        return simulate(Script(str(tmp_path / "train.py"), seconds=60, **options), card=card)

    return run


def same(one, other) -> None:
    assert one.peak_allocated == other.peak_allocated
    assert one.peak_reserved == other.peak_reserved
    assert one.time == other.time


def test_flash_attention_is_torchs_own(run):
    flash = """
    from flash_attn import flash_attn_func
    def attend(q, k, v):
        return flash_attn_func(q, k, v, causal=True)
    """
    same(run(flash, ATTENTION), run(PLAIN, ATTENTION))


def test_packed_forms_need_no_more_than_the_others(run):
    """One gradient for all three is written by the package, and put together of three here."""
    taken = ATTENTION.replace(
        "q, k, v = (t.view(b, n, 4, 64) for t in self.qkv(x).chunk(3, -1))", ""
    )
    taken = taken.replace("attend(q, k, v)", "packed(self.qkv(x).view(b, n, 3, 4, 64))")
    one = """
    from flash_attn.flash_attn_interface import flash_attn_qkvpacked_func
    def packed(qkv):
        return flash_attn_qkvpacked_func(qkv, 0.0, causal=True)
    """
    two = """
    from flash_attn import flash_attn_kvpacked_func
    def packed(qkv):
        return flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], causal=True)
    """
    plain = run(PLAIN, ATTENTION).peak_allocated
    assert [run(way, taken).peak_allocated for way in (one, two)] == [plain, plain]


def test_texts_end_to_end_know_their_lengths(run):
    varlen = """
    import flash_attn
    from flash_attn.bert_padding import pad_input, unpad_input
    mask = torch.ones(64, 512, dtype=torch.long)
    mask[:, 384:] = 0
    def attend(q, k, v):
        q, indices, borders, longest, _ = unpad_input(q, mask.cuda())
        k, v = (unpad_input(t, mask.cuda())[0] for t in (k, v))
        assert q.shape == (64 * 384, 4, 64) and longest == 384, (q.shape, longest)
        ends = 2 * (borders,) + 2 * (longest,)
        out = flash_attn.flash_attn_varlen_func(q, k, v, *ends, causal=True)
        return pad_input(out, indices, 64, 512)
    """
    found = run(varlen, ATTENTION)
    whole, unpadded = (r.time.model_flops for r in (run(PLAIN, ATTENTION), found))
    assert 0.5 < unpadded / whole < 1 and "Not timed" not in found.time.note
    # Kept of a layer: its input, three quarters of queries, keys, values and result, and the result
    # put back. The whole attention keeps as much: its input, these three, and the result.
    unit = 64 * 512 * 256 * 2  # bytes of one of them
    varlen, plain = (r.peak_by_category["activations"] for r in (found, run(PLAIN, ATTENTION)))
    assert 0 <= varlen - plain < unit / 8


def test_xformers_takes_flash_on_ampere_and_cutlass_before(run):
    xformers = """
    import xformers.ops as xops
    def attend(q, k, v):
        return xops.memory_efficient_attention(q, k, v, attn_bias=xops.LowerTriangularMask())
    """
    same(run(xformers, ATTENTION), run(PLAIN, ATTENTION))
    half = ATTENTION.replace("bfloat16", "half")
    same(run(xformers, half, card=T4), run(PLAIN, half, card=T4))


NORMS = """
model = nn.Sequential(nn.Linear(256, 256), norm(256), nn.Linear(256, 256), norm(256)).cuda()
optimizer = adam(model)
for _ in range(9):
    model(torch.randn(64, 256, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_apex_norms_and_adam_are_torchs_fused_ones(run):
    apex = """
    from apex.normalization import FusedLayerNorm as norm
    from apex.optimizers import FusedAdam
    adam = lambda model: FusedAdam(model.parameters(), lr=1e-3)
    """
    torchs = """
    norm = nn.LayerNorm
    adam = lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    """
    ours, theirs = run(apex, NORMS), run(torchs, NORMS)
    # A counter of steps a weight, of 512 bytes each, stands in torch's; one flag in apex's.
    assert theirs.peak_allocated - ours.peak_allocated == 7 * 512
    assert ours.by_category["optimizer states"] == ours.by_category["parameters"] * 2


def test_states_of_apex_adam_are_float32(run):
    apex = """
    from apex.normalization import FusedRMSNorm as norm
    from apex.optimizers import FusedAdam
    adam = lambda model: FusedAdam(model.bfloat16().parameters())
    """
    body = NORMS.replace('"cuda")', '"cuda", dtype=torch.bfloat16)')
    found = run(apex, body)
    assert found.by_category["optimizer states"] >= 3.9 * found.by_category["parameters"]


@pytest.mark.parametrize(
    "code, card, words",
    [
        ("from flash_attn import flash_attn_func as f", T4, "only supports Ampere GPUs or newer"),
        ("from flash_attn.ops.rms_norm import rms_norm", A100, "flash_attn.ops of the package"),
        ("from apex import amp", A100, "apex.amp of the package apex"),
        ("import apex.parallel", A100, "apex.parallel of the package apex"),
        ("import xformers.ops as x; x.SwiGLU", A100, "xformers.ops.SwiGLU of the package"),
        ("torch._C._cuda_getCurrentRawStream(0)", A100, "address of the card's stream, as Unsloth"),
    ],
)
def test_what_is_not_known_is_named(run, code, card, words):
    use = "\nq = torch.zeros(1, 8, 2, 64, device='cuda', dtype=torch.float16)\nf(q, q, q)\n"
    with pytest.raises(ValueError, match=words):
        run(code + (use if card is T4 else "\n"), card=card)


def test_what_a_library_imports_in_case_it_is_there_is_missing_and_said(run, tmp_path):
    """As mamba_ssm (modules/mha.py) and flash-linear-attention (ops/moba/parallel.py) ask."""
    code = """
    try:
        from flash_attn.layers.rotary import RotaryEmbedding
    except ImportError:
        RotaryEmbedding = None
    try:
        from flash_attn.flash_attn_interface import _flash_attn_varlen_backward
    except ImportError:
        _flash_attn_varlen_backward = None
    assert RotaryEmbedding is None and _flash_attn_varlen_backward is None
    """
    same(run(code, PLAIN, ATTENTION), run(PLAIN, ATTENTION))
    path = tmp_path / "train.py"
    path.write_text(START + textwrap.dedent(code) + PLAIN + ATTENTION)
    script = Script(str(path), seconds=60)
    simulate(script, card=A100)
    assert "flash_attn.layers of the package flash-attn is not known here: it was" in script.note
    assert "_flash_attn_varlen_backward of the package flash-attn" in script.note


def test_libraries_find_them(run):
    run(
        """
        import importlib.metadata, importlib.util
        from transformers.utils import is_flash_attn_2_available
        assert importlib.metadata.version("flash-attn") == "2.8.3"
        assert importlib.metadata.version("xformers")
        assert importlib.util.find_spec("flash_attn") and is_flash_attn_2_available()
        assert importlib.util.find_spec("flash_attn_interface") is None
        try:
            import flash_attn_nowhere
        except ModuleNotFoundError:
            attend = lambda q, k, v: q
        """,
        ATTENTION,
    )


def test_a_model_of_transformers_takes_them(run):
    model = """
    import transformers
    config = transformers.LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=512,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    config._attn_implementation = way
    model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(9):
        ids = torch.randint(0, 512, (2, 256))
        mask = torch.ones_like(ids).cuda()
        ids = ids.cuda()
        model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    """
    flash, plain = (run(f"way = {way!r}\n", model) for way in ("flash_attention_2", "sdpa"))
    assert flash.peak_allocated == pytest.approx(plain.peak_allocated, rel=0.02)
