"""What healthy scripts ask of values and libraries, of which fake tensors have none."""

import textwrap

import pytest
import transformers
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from fake_cuda import simulate
from fake_cuda.card import Card
from fake_cuda.scripts import Script, closures, repeats
from fake_cuda.scripts.generation import FULL_LENGTH

T4 = Card("T4", (7, 5), 40, 320e9, {"fp32": 4.35e12, "fp16": 41.9e12})
MODEL = """
import copy, math, torch
def build():
    return torch.nn.Sequential(torch.nn.Linear(32, 4096), torch.nn.Linear(4096, 4))
"""
LOOP = """
model = build().cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for k in range(9):
    x = torch.randn(16, 32, device="cuda")
    loss = model(x).square().mean()
    ASKED
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A function that makes a script of its text, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, *arguments, **options) -> Script:
        (tmp_path / "train.py").write_text(MODEL + textwrap.dedent(text))
        return Script("train.py", arguments, **options)

    return write


def loop(asked: str) -> str:
    """The loop with these lines in it."""
    return LOOP.replace("ASKED", textwrap.indent(textwrap.dedent(asked), "    ").strip())


def test_what_numpy_lends_stays_its_memory(script):
    asked = """
    import numpy
    array = numpy.arange(4.0)
    lent = torch.from_numpy(array)
    array[1] = k
    assert lent.data_ptr() == array.ctypes.data and lent[1].item() == k
    assert type(lent) is torch.Tensor
    """
    found = script(loop(asked))
    simulate(found, T4)
    assert found.updates == 2


def test_numbers_are_finite_however_a_script_asks(script):
    asked = """
    large = model[0].weight.expand(9, 4096, 32)
    for t in (loss, x, large):
        assert torch.isfinite(t).all() and t.isfinite().all().item() and (t == t).all()
        assert not torch.isnan(t).any() and not torch.isinf(t).any().item() and t.isnan().sum() == 0
        assert not (t != t).any() and not (t.isnan() | t.isinf()).any() and (t < math.inf).all()
        assert not (t == math.inf).any() and (t > -math.inf).all() and not t.isnan().any().cpu()
        assert torch.isfinite(t).view(-1)[:4].clone().cpu().numpy().all()
    if not torch.isfinite(loss) or torch.isnan(loss) or not math.isfinite(loss.item()):
        raise FloatingPointError("loss is nan")
    healthy = torch.tensor(True, device="cuda")
    healthy &= torch.isfinite(loss)
    assert healthy and torch.isfinite(x).cpu().all() and torch.isfinite(x).tolist()[0][0]
    loss = loss[~torch.isnan(loss)].mean()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    """
    one = script(loop(asked))
    simulate(one, (8, 0))
    assert one.updates == 2 and one.note == ""


def test_a_question_for_finite_numbers_changes_no_other_answer(script):
    asked = "assert not (loss > 0.5) and not (x > 0).any() and (x > 0).cpu().sum() == 0"
    one = script(loop(asked))
    simulate(one, (8, 0))
    assert one.updates == 2


def test_what_is_known_comes_back_from_the_card(script):
    asked = "assert torch.arange(5, device='cuda').cpu().tolist() == [0, 1, 2, 3, 4]"
    one = script(loop(asked))
    simulate(one, (8, 0))
    assert one.updates == 2


@pytest.mark.parametrize("first", ["", "init_scale=1024.0, growth_interval=1"])
def test_the_scale_of_a_scaler(script, first):
    text = f"""
    scaler = torch.amp.GradScaler("cuda", {first})
    model, start = build().cuda(), {1024.0 if first else 65536.0}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert scaler.get_scale() == start
    for k in range(2):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(torch.randn(16, 32, device="cuda")).float().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print(scaler.get_scale(), scaler.state_dict()["scale"])
    """
    one = script(text)
    simulate(one, (8, 0))
    assert one.printed.split()[:1] == (["2048.0"] if first else ["65536.0"])


def test_copies_of_models_and_states(script):
    text = """
    from torch.optim.swa_utils import AveragedModel
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.stride = build(), torch.tensor([8.0, 16.0])  # no buffer
            self.register_buffer("order", torch.arange(4))

        def forward(self, x):
            return self.layers(x)[:, self.order]

    model = Net()
    early = copy.deepcopy(model).cuda()
    assert early.stride.tolist() == [8, 16] and copy.deepcopy(torch.arange(3)).tolist() == [0, 1, 2]
    shared = torch.arange(6.0)
    pair = copy.deepcopy([shared, shared[2:]])
    pair[0][2] = 9
    assert pair[1][0] == 9 and shared[2] == 2
    model.cuda()
    average, late = AveragedModel(model), copy.deepcopy(model)
    assert late.order.is_cuda and late.stride[0] == 8
    optimizer = torch.optim.AdamW(model.parameters())
    for k in range(9):
        model(torch.randn(16, 32, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        if k == 0:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer.load_state_dict(state)
            saved = copy.deepcopy(model.state_dict())
            model.load_state_dict(saved)
    """
    one = script(text)
    found = simulate(one, (8, 0))
    weights = 4 * (33 * 4096 + 4097 * 4)
    assert one.updates == 2
    # The model, three copies of it, and that of its weights.
    assert found.by_category["parameters"] == pytest.approx(5 * weights, rel=0.3)


def test_weights_that_a_loader_makes_anew(script):
    text = """
    import accelerate, safetensors.torch
    from accelerate.utils import set_module_tensor_to_device
    weights = {name: torch.full_like(p, 2.0) for name, p in build().state_dict().items()}
    with accelerate.init_empty_weights():
        model = build()
    for name, value in weights.items():
        set_module_tensor_to_device(model, name, "cuda", value=value)
    assert model[0].weight.is_cuda and isinstance(model[0].weight, torch.nn.Parameter)
    assert model[0].weight.requires_grad
    set_module_tensor_to_device(model, "0.bias", "cuda", value=torch.zeros(4096))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for k in range(9):
        model(torch.randn(16, 32, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    """
    one = script(text)
    found = simulate(one, (8, 0))
    assert one.updates == 2
    weights = 4 * (33 * 4096 + 4097 * 4)
    assert found.by_category["parameters"] == pytest.approx(weights, rel=0.01)


LLAMA = """
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=99, **sizes)).cuda().eval()
ids = torch.randint(0, 99, (2, 5), device="cuda")
"""


@pytest.mark.parametrize(
    "how",
    [
        "max_new_tokens=4, eos_token_id=7, pad_token_id=0",
        "max_length=9, do_sample=True, top_k=5, top_p=0.9, temperature=0.7",
        "max_new_tokens=4, num_beams=2",
    ],
)
def test_text_is_generated_to_its_stated_length(script, how):
    text = f"""
    lengths = []
    def seen(module, given, out):
        lengths.append(out.past_key_values.get_seq_length())
    model.register_forward_hook(seen)
    out = model.generate(ids, {how})
    print("CACHE", lengths)
    """
    one = script(LLAMA + textwrap.dedent(text))
    found = simulate(one, card=T4)
    assert "CACHE [5, 6, 7, 8]" in one.printed
    assert FULL_LENGTH in one.note and "generation of text" in one.note
    assert found.step_seconds > 0


def test_a_file_that_has_a_tied_weight_twice_is_loaded_with_one(script, tmp_path):
    """As files of torch have, and of safetensors some (`tie_weights` in modeling_utils.py)."""
    text = f"""
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("{tmp_path}/twice").cuda()
    print("TIED", model.lm_head.weight is model.model.embed_tokens.weight)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    """
    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, vocab_size=99)
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True)
    model = transformers.LlamaForCausalLM(config)
    state = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.save_pretrained(tmp_path / "twice")
    save_file(state, tmp_path / "twice" / "model.safetensors", metadata={"format": "pt"})
    one = script(LLAMA + textwrap.dedent(text))
    simulate(one, card=T4)
    assert "TIED True" in one.printed


@pytest.mark.parametrize("config", ["", "generation_config=GenerationConfig(do_sample=True)"])
def test_text_of_no_stated_length_has_20_new_tokens(script, config):
    """As transformers says, and as it does on this CPU with tokens that never end."""
    text = f"""
    from transformers import GenerationConfig
    out = model.generate(ids, {config})
    print("LENGTH", out.shape[1] - ids.shape[1])
    """
    one = script(LLAMA + textwrap.dedent(text))
    simulate(one, card=T4)
    assert "LENGTH 20" in one.printed and FULL_LENGTH in one.note


def test_what_was_generated_ends_nowhere(script):
    """As GRPO's trainer cuts completions (`_generate_single_turn` of grpo_trainer.py in TRL)."""
    text = """
    for k in range(2):
        out = model.generate(ids, max_new_tokens=4, eos_token_id=7, pad_token_id=0)
        new = out[:, ids.shape[1]:]
        end = new == 7
        last = torch.full((len(end),), end.size(1), device="cuda")
        last[end.any(dim=1)] = end.int().argmax(dim=1)[end.any(dim=1)]
        mask = (torch.arange(end.size(1), device="cuda") <= last.unsqueeze(1)).int()
        cut = [row[m].tolist() for row, m in zip(new.cpu(), mask.bool().cpu())]
        assert not torch.isin(new, torch.tensor([7, 0], device="cuda")).any()
        print("LENGTHS", [len(row) for row in cut], (new != 7).all().item())
    """
    one = script(LLAMA + textwrap.dedent(text))
    simulate(one, (8, 0))
    assert "LENGTHS [4, 4] True" in one.printed


@pytest.mark.parametrize(
    "text, said",
    [
        (
            "model.generate(ids, prompt_lookup_num_tokens=2)",
            "lets another model guess tokens (generate in line 10 of train.py",
        ),
        (
            "out = model.generate(ids, max_new_tokens=2)\nout[out > 5]",
            "generates text and picks by its values (generate in line 10 of train.py",
        ),
    ],
)
def test_text_that_cannot_be_predicted_is_refused_by_name(script, text, said):
    with pytest.raises(ValueError) as error:
        simulate(script(LLAMA + text), (8, 0))
    assert said in str(error.value)


def test_text_that_took_all_its_seconds_is_named_whatever_happens_on_the_way_out(script):
    """As TRL's trainers gather and free weights when generation ends, also by an error."""
    text = """
    try:
        model.generate(ids, max_new_tokens=10**6, use_cache=False)
    finally:
        for weight in model.parameters():
            weight.add(1)
    """
    with pytest.raises(ValueError) as error:
        simulate(script(LLAMA + textwrap.dedent(text), seconds=3), (8, 0))
    assert "train.py generates text (generate in line 1" in str(error.value)
    assert "not complete when its seconds were over" in str(error.value)


@pytest.mark.parametrize("back", ["", ".sum().backward()"])
def test_without_updates_the_time_is_that_of_one_pass(script, back):
    text = """
    model = build().cuda()
    for k in range(TIMES):
        with torch.set_grad_enabled(BACK):
            model(torch.randn(512, 32, device="cuda"))
    """.replace('device="cuda"))', f'device="cuda")){back}').replace("BACK", str(bool(back)))
    few, many = (simulate(script(text.replace("TIMES", n)), card=T4) for n in ("3", "30"))
    assert few.step_seconds == pytest.approx(many.step_seconds, rel=0.01)
    assert few.time.note == ""


CLOSURES = """
model, evaluated = build().cuda(), 0
optimizer = OPTIMIZER
def closure():
    global evaluated
    evaluated += 1
    assert evaluated < 99
    optimizer.zero_grad()
    loss = model(torch.randn(16, 32, device="cuda")).square().mean()
    assert loss.item() == 1.0 and not loss > 1e-10
    loss.backward()
    return loss
for k in range(TIMES):
    optimizer.step(closure)
print("EVALUATED", evaluated)
"""
WEIGHTS = 4 * (33 * 4096 + 4097 * 4)


@pytest.mark.parametrize(
    "options, evaluations",
    [("", 20), ("max_iter=4, max_eval=3", 3), ("line_search_fn='strong_wolfe', max_iter=6", 7)],
)
def test_lbfgs_evaluates_as_on_a_loss_that_falls(script, options, evaluations):
    optimizer = f"torch.optim.LBFGS(model.parameters(), history_size=5, {options})"
    text = CLOSURES.replace("OPTIMIZER", optimizer)
    one = script(text.replace("TIMES", "1"))
    simulate(one, card=T4)
    assert f"EVALUATED {evaluations}\n" in one.printed and closures.FALLS in one.note
    two = script(text.replace("TIMES", "9"))
    found = simulate(two, card=T4)
    assert two.updates == 2 and [name for _, name in found.phases].count("backward") == evaluations
    # Five pairs, the direction and the last gradient.
    states = found.peak_by_category["optimizer states"]
    assert 12 * WEIGHTS <= states < 14.1 * WEIGHTS


def test_gradients_that_wait_for_a_step(script):
    asked = """
    if k == 1:
        optimizer.zero_grad()
        model(x.repeat(8, 1)).square().mean().backward()
        raise SystemExit
    """
    one = script(loop(asked))
    found = simulate(one, (8, 0))
    last = 4 * (4096 * 4 + 4)  # the peak is in the second backward pass, after the last layer's
    assert one.updates == 1 and found.by_category["gradients"] >= last


def test_a_closure_is_no_part_of_the_update(script):
    text = CLOSURES.replace("OPTIMIZER", "torch.optim.SGD(model.parameters(), momentum=0.9)")
    closed = script(text.replace("TIMES", "9"))
    found = simulate(closed, card=T4)
    asked = "assert loss.item() == 1.0 and not loss > 1e-10"
    known = simulate(script(loop(asked).replace("0.1", "momentum=0.9")), card=T4)
    assert closed.updates == 2 and closed.note == ""
    names = [name for _, name in found.phases]
    assert names == ["forward", "backward", "optimizer step"] == [n for _, n in known.phases]
    assert found.step_seconds == pytest.approx(known.step_seconds, rel=0.1)
    assert found.peak_allocated == pytest.approx(known.peak_allocated, rel=0.01)


@pytest.mark.parametrize(
    "room, said", [("", ""), (', max_memory={0: "400KB", "cpu": "1GB"}', "cpu")]
)
def test_a_device_map_that_is_automatic(script, tmp_path, room, said):
    sizes = dict(hidden_size=64, intermediate_size=64, num_attention_heads=2, vocab_size=99)
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, **sizes)).save_pretrained(tmp_path / "llama")
    text = f"""
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("llama", device_map="auto"{room})
    assert model.device == torch.device("cuda", 0) and not hasattr(model, "hf_device_map")
    ids = torch.randint(0, 99, (2, 5), device=model.device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for k in range(9):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    """
    one = script(text)
    if not said:
        simulate(one, (8, 0))
        assert one.updates == 2
        return
    with pytest.raises(ValueError, match="a part goes to cpu"):
        simulate(one, (8, 0))


EVALUATES = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(3))
        self.calls, self.kept = 0, []

    def forward(self, x, mask=None):
        self.calls += 1
        for layer in self.layers:
            x = layer(x).relu()
        KEEP
        return {"x": x, "loss": x.sum()}

model, outputs = Net().cuda(), []
optimizer = torch.optim.AdamW(model.parameters())
model.eval()
with torch.no_grad():
    for _ in range(20):
        outputs.append(model(torch.randn(64, 256).cuda())["x"])
    print("called", model.calls)
    model(torch.randn(32, 256).cuda())
    print("called", model.calls)
model.train()
for _ in range(3):
    model(torch.randn(64, 256).cuda())["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()
"""


EVALUATED = [("pass", [4, 5]), ("self.kept.append(x + 1)", [20, 21]), ("HOOK", [20, 21])]


@pytest.mark.parametrize("keep, called", EVALUATED)
def test_passes_that_repeat_others_are_not_run_again(tmp_path, monkeypatch, keep, called):
    """Nor does it change what is predicted. One that piles up or that hooks watch is always run."""
    path = tmp_path / "train.py"
    text = EVALUATES.replace("KEEP", keep.replace("HOOK", "pass"))
    hook = "model.layers[0].register_forward_hook(lambda *_: None)\nmodel.eval()"
    path.write_text(text.replace("model.eval()", hook) if keep == "HOOK" else text)
    found = []
    for alike in (repeats.ALIKE, 10**9):
        monkeypatch.setattr(repeats, "ALIKE", alike)
        script = Script(str(path))
        found.append(simulate(script, card=T4))
        if alike < 10**9:
            assert script.printed.split() == ["called", str(called[0]), "called", str(called[1])]
    one, other = found
    assert (one.peak_allocated, one.peak_reserved) == (other.peak_allocated, other.peak_reserved)
    assert one.by_category == other.by_category
    assert one.step_seconds == pytest.approx(other.step_seconds)
