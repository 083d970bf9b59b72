"""A training script that nobody changed: real data, a fake card, nothing of the user's written."""

import json
import os
import sys
import textwrap

import pytest
import torch

from fake_cuda import simulate
from fake_cuda.cost import Card
from fake_cuda.scripts import Script, changes
from fake_cuda.scripts.run import BY_HAND, ONE_UPDATE
from fake_cuda.scripts.changes import COMPILED
from helpers.__main__ import main

MODEL = """
import torch
def build():
    linear, norm = torch.nn.Linear(32, 4096), torch.nn.LayerNorm(4096)
    return torch.nn.Sequential(linear, torch.nn.GELU(), norm, torch.nn.Linear(4096, 4))
"""
LOOP = MODEL + textwrap.dedent("""
    import argparse
    from torch.utils.data import DataLoader, TensorDataset
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=16)
    batch = parser.parse_args().batch
    x, y = torch.randn(256, 32), torch.arange(256) % 4
    assert y[3].item() == 3 and y[:5].tolist() == [0, 1, 2, 3, 0] and x.numpy().std() > 0.5
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model.to(device)
    assert next(model.parameters()).device == torch.device("cuda", 0)
    for a, b in DataLoader(TensorDataset(x, y), batch, num_workers=2, pin_memory=True):
        assert int((b == 1).sum()) == batch // 4
        a, b = a.to(device, non_blocking=True), b.cuda()
        assert a.is_cuda and a.new_zeros(1).device.type == "cuda" and b.cpu().numpy().sum() == batch
        loss = torch.nn.functional.cross_entropy(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.3f} {loss:.2f}", torch.cuda.memory_allocated())
    raise SystemExit("it should have stopped before")
""")
T4 = Card("T4", (7, 5), 40, 320e9, {"fp32": 4.35e12, "fp16": 41.9e12})
UPDATE = """
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(9):
    optimizer.zero_grad()
    model(torch.randn(16, 32, device='cuda')).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text, name="train.py"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_a_loop_needs_what_simulate_says(write):
    def run():
        space = {}
        exec(MODEL, space)
        model = space["build"]()
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        for _ in range(2):
            a, b = torch.zeros(16, 32), torch.zeros(16, dtype=torch.long)
            loss = torch.nn.functional.cross_entropy(model(a), b)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()
        return model, optimizer

    found, known = simulate(Script(write(LOOP)), (8, 0)), simulate(run, (8, 0))
    assert found.peak_allocated == pytest.approx(known.peak_allocated, rel=2e-3)
    assert found.peak_reserved == known.peak_reserved
    for category in ("parameters", "optimizer states"):
        assert found.by_category[category] == pytest.approx(known.by_category[category], abs=4096)


def test_its_arguments_reach_it_and_it_stops(write):
    path = write(LOOP)
    script = Script(path, ["--batch", "64"])
    large = simulate(script, (8, 0)).peak_allocated
    assert script.updates == 2 and script.printed.startswith("1.000 1.00 ")
    assert large > simulate(Script(path), (8, 0)).peak_allocated and script.note == ""


def test_mixed_precision_with_a_scaler(write):
    loop = MODEL + textwrap.dedent("""
        model = build().cuda()
        optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cuda")
        for _ in range(5):
            with torch.autocast("cuda", dtype=torch.float16):
                out = model(torch.randn(16, 32).cuda())
            assert out.dtype == torch.float16
            scaler.scale(out.float().sum()).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    """)
    found = simulate(Script(write(loop)), (8, 0))
    assert found.by_category["parameters"] > 0 and found.peak_by_category["optimizer states"] > 0


def test_a_model_larger_than_this_machine_and_compiled_code_is_marked(write):
    large = MODEL + textwrap.dedent("""
        linears = [torch.nn.Linear(20_000, 20_000) for _ in range(40)]
        model = torch.compile(torch.nn.Sequential(torch.nn.Linear(32, 20_000), *linears).to("cuda"))
    """)
    script = Script(write(large + UPDATE.replace("AdamW", "SGD")))
    assert simulate(script, (8, 0)).peak_allocated > 100 * 2**30 and script.note == COMPILED


def test_nothing_of_the_users_is_changed(write, tmp_path):
    (tmp_path / "log.txt").write_text("old\n")
    (tmp_path / "kept").mkdir()
    body = MODEL + textwrap.dedent("""
        import os, pathlib, shutil, sys
        model = build().cuda()
        os.makedirs("out/deep", exist_ok=True)
        with open("log.txt", "a") as file:
            file.write("new")
        assert pathlib.Path("log.txt").read_text() == "old\\nnew"
        pathlib.Path("out/deep/a.txt").write_text("a")
        os.rename("out/deep/a.txt", "out/b.txt")
        assert os.listdir("out") == ["b.txt", "deep"] and "kept" in os.listdir(".")
        torch.save(model.state_dict(), "out/checkpoint.pt")
        assert os.path.exists("out/checkpoint.pt")
        pathlib.Path("kept/made_here.py").write_text("x = 5")
        sys.path.append("kept")
        assert __import__("made_here").x == 5
        os.remove("log.txt")
        shutil.rmtree("kept")
    """)
    path = write(body + UPDATE)
    before, environment = sorted(tmp_path.rglob("*")), dict(os.environ)
    simulate(Script(path), (8, 0))
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "log.txt").read_text() == "old\n"
    assert dict(os.environ) == environment and os.getcwd() == str(tmp_path)
    assert "made_here" not in sys.modules
    assert not torch.cuda.is_available() and torch.randn(3).device.type == "cpu"


def test_what_is_not_written_in_python_stays_away_from_the_users_files(write, tmp_path):
    body = """
    import glob, os, pathlib, shutil, sqlite3
    import pandas, pyarrow, pyarrow.parquet, tokenizers, torch
    frame = pandas.DataFrame({"a": [1]})
    frame.to_parquet("pandas.parquet")
    pyarrow.parquet.write_table(pyarrow.table(frame), "arrow.parquet")
    assert len(pandas.read_parquet("arrow.parquet")) == 1
    with sqlite3.connect("runs.db") as base:
        base.execute("create table runs(x)")
    tokenizers.Tokenizer(tokenizers.models.BPE()).save("tokenizer.json")
    os.symlink("old/a.bin", "latest")
    assert open("latest").read() == "old"
    pathlib.Path("old/b.bin").write_text("new")
    assert sorted(glob.glob("old/*.bin")) == ["old/a.bin", "old/b.bin"]
    shutil.rmtree("old")
    assert not os.path.exists("old")
    os.makedirs("old")
    assert os.listdir("old") == []
    shutil.move("log.txt", "log.old")
    assert not os.path.exists("log.txt") and os.path.exists("log.old")
    try:
        os.remove("log.txt")
        raise SystemExit("removed twice")
    except FileNotFoundError:
        pass
    model = build().cuda()
    """
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "a.bin").write_text("old")
    (tmp_path / "log.txt").touch()
    path = write(MODEL + textwrap.dedent(body) + UPDATE)
    before = sorted(tmp_path.rglob("*"))
    simulate(Script(path), (8, 0))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "text, said",
    [
        ("print('hello')", "never updates a model"),
        (MODEL + "model = build()" + UPDATE.replace(", device='cuda'", ""), "nothing on the card"),
        (MODEL + "build().cuda()(torch.randn(2, 32).cuda()).sum().backward()", "no optimizer took"),
        (
            MODEL + "x = build().cuda()\nwhile True: x[2].weight.sum().backward()",
            "took a step in 9",
        ),
        ("import torch\ntorch.distributed.init_process_group('nccl')", "several processes"),
        ("import os\nos.environ['LOCAL_RANK']", "several processes"),
        (MODEL + "build().cuda().share_memory()", "several processes"),
        ("raise KeyError", "KeyError"),
        ("input('Which run? ')", "EOF when reading a line"),
        ("raise RuntimeError('got: <urlopen error [Errno -2]>')", "needs a hub or another address"),
        ("import torch\ntorch.multiprocessing.spawn(print, nprocs=2)", "several processes"),
        ("x = 1\nx.y", "fails by itself in line 2: AttributeError"),
        ("import nowhere_to_be_found", "needs the module nowhere_to_be_found"),
        ("raise ConnectionError('no route')", "needs a hub or another address"),
        ("raise ValueError('no template: see https://huggingface.co/docs')", "fails by itself"),
        ("raise SystemExit('not today')", "ended before it took an update: not today"),
        ("import argparse\nargparse.ArgumentParser().parse_args(['-x'])", "unrecognized arguments"),
        ("def", "SyntaxError"),
        (MODEL + "x = build().cuda()(torch.ones(2, 32).cuda())\nx[x > 0]", "tensors' values"),
    ],
)
def test_bad_input_is_one_sentence(write, text, said, capsys, monkeypatch):
    monkeypatch.setattr(changes, "PASSES", 9)
    assert main(["predict", "--gpu", "T4", "--script", write(text)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and said in err and "Traceback" not in err


def test_the_command(write, capsys):
    path = write(LOOP)
    assert main(["predict", "--gpu", "T4", "--json", "--script", path, "--", "--batch", "32"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["script"] == path and facts["fits"] and facts["step_seconds"] > 0
    assert facts["by_category"]["parameters"] > 0
    for arguments, said in (
        (["--gpu", "T4", "--script", "nowhere.py"], "nowhere.py is not a file"),
        (["--gpu", "cpu", "--script", path], "predicted for a card"),
        (["--gpu", "T4", "--script", path, "--batch", "32"], "stand after --"),
    ):
        assert main(["predict", *arguments]) == 2
        assert said in capsys.readouterr().err


def test_states_that_an_optimizer_makes_at_once_are_states(write):
    optimizer = """
    class Own(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})
            for p in self.param_groups[0]["params"]:
                self.state[p]["m"] = torch.zeros_like(p)

        def step(self):
            for p in self.param_groups[0]["params"]:
                self.state[p]["m"] = 0.9 * self.state[p]["m"] + p.grad
                p.data = p.data - self.state[p]["m"]
    model = build().cuda()
    """
    loop = MODEL + textwrap.dedent(optimizer) + UPDATE.replace("torch.optim.AdamW", "Own")
    found = simulate(Script(write(loop)), (8, 0))
    assert found.by_category["optimizer states"] > found.by_category["parameters"] > 0


def test_the_time_is_that_of_a_step_without_an_evaluation(write):
    loop = """
    model, x = build().cuda(), torch.randn(64, 32).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    for k in range(9):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if k % 5 == 0 and EVALUATES:
            with torch.no_grad():
                for _ in range(20):
                    model(x)
    """
    times = []
    for evaluates in ("True", "False"):
        script = Script(write(MODEL + textwrap.dedent(loop).replace("EVALUATES", evaluates)))
        times.append(simulate(script, card=T4).step_seconds)
    assert times[0] == pytest.approx(times[1], rel=0.01)


def test_of_two_optimizers_that_take_turns_a_step_has_both(write):
    turns = """
    models = [build().cuda(), build().cuda()][:MODELS]
    optimizers = [torch.optim.SGD(model.parameters()) for model in models]
    for _ in range(9):
        for model, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            model(torch.randn(64, 32, device="cuda")).sum().backward()
            optimizer.step()
    """
    found = []
    for n in "21":
        script = Script(write(MODEL + textwrap.dedent(turns).replace("MODELS", n)))
        found.append(simulate(script, card=T4))
    assert found[0].step_seconds == pytest.approx(2 * found[1].step_seconds, rel=0.1)
    assert [name for _, name in found[0].phases].count("backward") == 2


def test_a_recurrent_layer_is_marked(write):
    layer = "model = torch.nn.Sequential(build(), torch.nn.LSTM(4, 8)).cuda()\n"
    script = Script(write(MODEL + layer + UPDATE.replace(".sum()", "[0].sum()")))
    assert "recurrent layers cuDNN keeps more" in simulate(script, card=T4).time.note


def test_a_module_in_the_folder_is_pointed_at(write, tmp_path):
    (tmp_path / "scripts").mkdir()
    write("", "beside.py")
    with pytest.raises(ValueError, match="beside, which is not installed: set PYTHONPATH=."):
        simulate(Script(write("import beside", "scripts/train.py")), (8, 0))


def test_files_of_tensors_keep_what_is_known(write, tmp_path):
    body = """
    import safetensors.torch, torch
    from safetensors.torch import save_file
    torch.save({"x": torch.arange(9), "n": [1, "b"]}, "data.pt")
    for where in (None, "cpu", "cuda"):
        x = torch.load("data.pt", map_location=where)["x"]
        assert x.is_cuda if where == "cuda" else x.sum() == 36
    model = build().cuda()
    torch.save(model, "model.pt")
    torch.save(model.state_dict(), open("state.pt", "wb"))
    save_file(model.state_dict(), "model.safetensors")
    """
    simulate(Script(write(MODEL + textwrap.dedent(body) + UPDATE)), (8, 0))
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_one_update_is_marked(write):
    script = Script(write(MODEL + "model = build().cuda()" + UPDATE.replace("9", "1")))
    simulate(script, (8, 0))
    assert script.note == ONE_UPDATE


@pytest.mark.parametrize(
    "write_weight",
    ["p.data.add_(p.grad, alpha=-0.1)", "p -= 0.1 * p.grad", "p.data -= 0.1 * p.grad"],
)
def test_weights_that_the_script_writes_itself_are_updates(write, write_weight):
    plain = MODEL + "model = build().cuda()" + UPDATE.replace("AdamW", "SGD")
    by_hand = f"""with torch.no_grad():
        for p in model.parameters():
            {write_weight}"""
    by_hand = plain.replace("optimizer.step()", by_hand).replace("optimizer.zero", "model.zero")
    script = Script(write(by_hand.replace("optimizer =", "unused =")))
    found, known = (simulate(s, card=T4) for s in (script, Script(write(plain, "sgd.py"))))
    assert script.note == BY_HAND
    assert found.peak_allocated == pytest.approx(known.peak_allocated, rel=0.01)
    gradients = [each.peak_by_category["gradients"] for each in (found, known)]
    assert gradients[0] == gradients[1] > 0
    assert 1 < found.step_seconds / known.step_seconds < 2  # one weight at a time


def test_the_cards_counters_answer_as_the_prediction_does(write):
    asked = """
    ask = torch.cuda
    ask.synchronize()
    print(*(f() for f in (ask.memory_allocated, ask.max_memory_allocated, ask.memory_reserved)))
    print(ask.max_memory_reserved(0), ask.mem_get_info()[1] - ask.mem_get_info()[0])
    torch.accelerator.reset_peak_memory_stats()
    print(ask.max_memory_allocated(), ask.max_memory_reserved())
    ask.empty_cache()
    print(torch.accelerator.memory_reserved(), ask.max_memory_cached())
    """
    script = Script(
        write(
            MODEL
            + "model = build().cuda()"
            + UPDATE.replace("range(9)", "range(2)").replace(
                "optimizer.step()", "optimizer.step() if _ == 0 else None"
            )
            + textwrap.dedent(asked)
        )
    )
    found = simulate(script, (8, 0))
    now, most, held, most_held, taken, peak, peak_held, left, cached = map(
        int, script.printed.split()
    )
    assert most == found.peak_allocated and most_held == found.peak_reserved
    assert now < most and peak == now and held == taken == peak_held == cached
    assert now <= left <= held


def test_a_timeline_is_drawn(write, tmp_path, capsys):
    arguments = ["predict", "--gpu", "T4", "--script", write(LOOP)]
    for name, said in (("no/step.png", "cannot be written"), ("step.doc", "is no picture")):
        assert main([*arguments, "--timeline", name]) == 2
        assert said in capsys.readouterr().err
    assert main([*arguments, "--timeline", "step.png"]) == 0
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
