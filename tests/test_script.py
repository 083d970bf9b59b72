"""A training script that nobody changed: real data, a fake card, nothing of the user's written."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import torch

from fake_cuda import simulate
from fake_cuda.card import Card
from fake_cuda.scripts import Script, apart, changes, host
from fake_cuda.scripts import script as of_scripts
from fake_cuda.scripts.changes import SCRIPTED
from fake_cuda.scripts.run import Run
from fake_cuda.scripts.verdict import BY_HAND, ONE_UPDATE
from helpers import gpu, predict
from helpers.prediction import CONTEXT
from planner.__main__ import main

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
        assert a.is_cuda and a.new_zeros(1).is_cuda and a.cpu().numpy().sum() == a.numel()
        assert b.cpu().tolist()[:5] == [0, 1, 2, 3, 0]  # numbers that only the host made stay known
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


def test_a_model_larger_than_this_machine_and_scripted_code_is_marked(write):
    large = MODEL + textwrap.dedent("""
        linears = [torch.nn.Linear(20_000, 20_000) for _ in range(40)]
        model = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(32, 20_000), *linears).cuda())
    """)
    script = Script(write(large + UPDATE.replace("AdamW", "SGD")))
    assert simulate(script, (8, 0)).peak_allocated > 100 * 2**30 and script.note == SCRIPTED


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


@pytest.mark.parametrize("forked", [True, False])
def test_a_library_of_another_version_in_the_scripts_process_is_one_sentence(
    write, tmp_path, monkeypatch, capsys, forked
):
    """It is found where the script's process loads what it needs, before the script is read."""
    said = "peft 0.18.1 is here, and the course needs <1,>=0.21: make install"
    (tmp_path / "loads_peft.py").write_text(f"raise ImportError({said!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(of_scripts, "RUN", "loads_peft")
    monkeypatch.setattr(apart, "_forkable", lambda: forked)
    assert main(["predict", "--gpu", "T4", "--script", write("print()")]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {said}"


@pytest.mark.parametrize(
    "text, said",
    [
        ("print('hello')", "never runs a model"),
        (MODEL + "model = build()" + UPDATE.replace(", device='cuda'", ""), "nothing on the card"),
        (MODEL + "x = build().cuda()[2]\nwhile True: x.weight.sum().backward()", "never runs a"),
        ("import os\nassert os.environ['LOCAL_RANK'] == '1'", "`: AssertionError"),
        (MODEL + "build().cuda().share_memory()", "several processes"),
        ("raise KeyError", "KeyError"),
        ("x = [\n    input('Which run? ')]", "waits for input in line 2 of train.py: `input('Wh"),
        ("raise OSError(25, 'Inappropriate ioctl for device')", "needs a terminal in line 1"),
        ("from . import x", "as in `-m package.module`"),
        ("raise RuntimeError('got: <urlopen error [Errno -2]>')", "needs a hub or another address"),
        ("import torch\ntorch.multiprocessing.spawn(print, nprocs=2)", "several processes"),
        ("x = 1\nx.y", "fails by itself in line 2 of train.py: `x.y`: Attrib"),
        ("import nowhere_to_be_found", "needs the module nowhere_to_be_found"),
        ("raise ModuleNotFoundError('pack>=2')", "needs what is not installed in line 1 of"),
        (
            "import psutil\nfrom psutil import no_name",
            f"asks psutil {psutil.__version__} for what it",
        ),
        ("from train import no_name", "fails by itself in line 1 of train.py: `from train import"),
        ("raise ConnectionError('no route')", "needs a hub or another address"),
        ("raise ValueError('no template: see https://huggingface.co/docs')", "fails by itself"),
        ("raise SystemExit('not today')", "ended before it took an update: not today"),
        ("import argparse\nargparse.ArgumentParser().parse_args(['-x'])", "unrecognized arguments"),
        ("import torch\ndef", "fails by itself in line 2 of train.py: `def`: SyntaxError"),
        (MODEL + "x = build().cuda()(torch.ones(2, 32).cuda())\nx[x > 0]", "tensors' values"),
        ("import os\nos.system('torchrun --nproc-per-node 2 x.py')", "another program to train"),
        ("import subprocess, sys\nsubprocess.run([sys.executable, 'x.py'])", "x.py`: give that"),
        ("import os\nos.execvp('ls', ['ls'])", "another program to train, `ls`"),
        ("import os\nos.kill(os.getpid(), 9)", "was ended by SIGKILL, as the sys"),
        ("import ctypes, torch\nctypes.string_at(0)", 'SIGSEGV, File "'),
        (
            "import os, time\nos.kill(os.getppid(), 9)\ntime.sleep(90)",
            "the process that keeps it was ended by SIGKILL",
        ),
        ("x = 1\nopen('/dev/tty')", "needs a terminal in line 2 of train.py: `open('/dev/tty')`"),
        ("if x; then", "is no Python: it cannot be read in line 1 of train.py: `if x; then`"),
        ("set -e\npython x.py", "starts another program to train, `python x.py`: give that one"),
        ("#!/bin/sh\ntorchrun \\\n --n 2 x.py > o\n", "to train, `torchrun --n 2 x.py`: give"),
        ("export A=1\nuv run x.py --lr 1", "to train, `uv run x.py --lr 1`: give that one"),
        ('"python x.py"\nimprt torch', "is no Python: it cannot be read in line 2"),
        ("model: bert\nlr: 0.1\n", "is no script of Python: it states values"),
        ("# nothing\n", "has no line of code"),
        ("import os\nos.system('uv run --with torch x.py')", "torch x.py`: give that one"),
        ("import os\nos.system('poetry run accelerate launch x.py')", "launch x.py`: give that"),
        ("import os\nos.system('cd . && python x.py')", "train, `python x.py`: give that"),
        ("import subprocess as s\ns.run('echo; torchrun x.py', shell=True)", "`torchrun x.py`:"),
        ("import subprocess as s\ns.run(['bash', '-c', 'A=1 python x.py'])", "`python x.py`:"),
        ("import os\nos._exit(3)", "ended before it took an update: status 3"),
        ("import torch\nx = torch.zeros(2).to('cuda:1')", "one card is predicted, which is cuda:0"),
        (
            "inputs = {}\ninputs['RANK']",
            "fails by itself in line 2 of train.py: `inputs['RANK']`: K",
        ),
        ("import io, pickle\ninputs = pickle.load(io.BytesIO())", "EOFError: Ran out of input"),
        ("import getpass\ngetpass.getpass()", "waits for input in line 2"),
        ("breakpoint()", "waits for input in line 1 of train.py: `breakpoint()`"),
        ("raise KeyboardInterrupt", "fails by itself in line 1"),
        ("raise BrokenPipeError('of a worker')", "fails by itself in line 1"),
        ("import subprocess\nsubprocess.run('nvidia-smi')", "asks the driver of a card in line 2"),
        ("import torch\ntorch.ones(2).cuda().numpy()", "TypeError: can't convert cuda:0 device"),
        ("raise RuntimeError('Torch not compiled with CUDA enabled')", "asks CUDA in line 1"),
    ],
)
def test_bad_input_is_one_sentence(write, text, said, capsys, monkeypatch):
    monkeypatch.setattr(changes, "PASSES", 9)
    assert main(["predict", "--gpu", "T4", "--script", write(text)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and said in err and "Traceback" not in err


@pytest.mark.parametrize(
    "command",
    ["sh x.sh", "bash x.sh", "uv run x.py", "poetry run python x.py", "accelerate launch x.py"]
    + ["torchrun --nproc-per-node 2 x.py", "python x.py"],
)
def test_a_command_in_the_place_of_a_script_is_told(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    first, *rest = command.split()
    for given in ([command], [first, "--", *rest]):
        assert main(["predict", "--gpu", "T4", "--script", *given]) == 2
        assert f"{command} is a command, and a script of Python is" in capsys.readouterr().err


def test_a_package_that_cannot_be_run_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["predict", "--gpu", "T4", "-m", "json.decoder", "--", "x"]) == 2
    assert "never runs a model" in capsys.readouterr().err
    assert main(["predict", "--gpu", "T4", "-m", "email"]) == 2
    assert "needs the module email.__main__, which is not" in capsys.readouterr().err


@pytest.mark.parametrize(
    "asks, hub",
    [
        ("transformers.AutoModel.from_pretrained('models/mine')", True),
        ("transformers.AutoTokenizer.from_pretrained('mine')", True),
        ("datasets.load_dataset('data/mine')", True),
        ("transformers.AutoTokenizer.from_pretrained('./models/mine/x')", None),
        ("urllib.request.urlopen('http://example.org')", False),
    ],
)
def test_a_folder_that_is_not_there_may_be_meant_where_a_hub_is_asked(write, asks, hub, capsys):
    path = write(f"import datasets, transformers, urllib.request\n{asks}")
    assert main(["predict", "--gpu", "T4", "--script", path]) == 2
    said = capsys.readouterr().err
    assert ("needs a hub or another address in line 2" in said) == (hub is not None)
    assert ("if a folder of this machine is meant, there is none of that" in said) == (hub is True)
    assert ("names what is no folder of this machine, and what no hub" in said) == (hub is None)


@pytest.mark.parametrize("name, said", [("a folder", "is a folder"), ("no text", "is not Python")])
def test_what_is_no_script_is_one_sentence(write, tmp_path, name, said, capsys):
    path = tmp_path if name == "a folder" else Path(write("x = 1"))
    if name == "no text":
        path.write_bytes(b"\x7fELF\0\0")
    assert main(["predict", "--gpu", "T4", "--script", str(path)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("closed", ["the script", "its folder"])
def test_a_script_that_may_not_be_read_is_one_sentence(closed):
    with tempfile.TemporaryDirectory() as name:  # which other users find, unlike pytest's own
        path = Path(name, "work", "train.py")
        path.parent.mkdir()
        path.write_text("x = 1")
        os.chmod(name, 0o755)
        (path if closed == "the script" else path.parent).chmod(0)
        command = [sys.executable, "-m", "planner", "predict", "--gpu", "T4", "--script", str(path)]
        user = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups"]
        if os.getuid() == 0:  # who may read everything
            if not shutil.which("setpriv"):
                pytest.skip("needs setpriv where root runs the tests")
            command = [*user, *command]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=Path(__file__).parents[1]
        )
        path.parent.chmod(0o755)
    assert done.returncode == 2 and done.stderr == f"error: {path} may not be read\n"


@pytest.mark.parametrize(
    "text, said",
    [
        ("[]", "is no notebook of today's format: it has no list of cells"),
        ('{"cells": [1]}', "is no notebook of today's format"),
        ("print('hello')", "is no notebook: it is not JSON"),
    ],
)
def test_what_is_no_notebook_is_one_sentence(write, text, said, capsys):
    assert main(["predict", "--gpu", "T4", "--script", write(text, "lesson.ipynb")]) == 2
    assert said in capsys.readouterr().err


def test_the_fault_is_named_in_a_file_beside_the_script(write):
    write("def mix(x):\n    return x.no_such_thing\n", "beside.py")
    path = write(MODEL + "import beside\nbeside.mix(build().cuda()[0].weight)")
    with pytest.raises(ValueError, match="line 2 of beside.py: `return x.no_such_thing`: Attr"):
        simulate(Script(path), (8, 0))


def test_a_fault_of_the_simulation_is_not_the_scripts(write, monkeypatch):
    monkeypatch.setattr(host, "math", None)
    path, said = (
        write(MODEL + "build().cuda()"),
        "line . of train.py.* because of the simulation, not",
    )
    with pytest.raises(ValueError, match=said):
        simulate(Script(path), (8, 0))


@pytest.mark.parametrize(
    "wrong, said",
    [
        ("for p in build().cuda().parameters(): p.add_(1)", "a leaf Variable"),
        ("build().cuda()(torch.ones(2, 31).cuda())", "same reduction dim"),
        ("torch.ones(3).cuda() + torch.ones(4).cuda()", "broadcast"),
        ("torch.nn.Conv2d(3, 4, 3).cuda()(torch.ones(2, 4, 8, 8).cuda())", "to have 3 channels"),
        ("torch.nn.functional.linear([1], torch.ones(2, 2).cuda())", "must be Tensor, not list"),
    ],
)
def test_what_torch_refuses_is_the_scripts_fault(write, wrong, said):
    with pytest.raises(ValueError, match=rf"fails by itself in line \d of train.py: .*{said}"):
        simulate(Script(write(MODEL + wrong)), (8, 0))


def test_a_fault_after_a_guess_may_be_the_guess(write):
    asserts = "assert build().cuda()(torch.ones(2, 32).cuda()).max() < 9, 'too large'"
    with pytest.raises(ValueError, match="perhaps by a value of the card that was guessed: Asser"):
        simulate(Script(write(MODEL + asserts)), (8, 0))


def test_a_hub_that_an_open_network_does_not_reach(write):
    path = write("raise ConnectionError('no route')")
    with pytest.raises(ValueError, match="needs a hub .* and does not reach it"):
        simulate(Script(path, network=True), (8, 0))


def test_a_thread_is_not_followed_and_that_is_said(write):
    body = "import threading\nthread = threading.Thread(target=lambda: build().cuda())\n"
    with pytest.raises(ValueError, match="uses the card in line . of train.py.* in a thread of"):
        simulate(Script(write(MODEL + body + "thread.start()\nthread.join()")), (8, 0))


def test_what_a_script_logs_it_can_read(write):
    body = """
    import logging
    logging.basicConfig(filename="log.txt", level=logging.INFO)
    logging.info("seen")
    assert "seen" in open("log.txt").read()
    torch.compiler.cudagraph_mark_step_begin()
    model = build().cuda()
    """
    simulate(Script(write(MODEL + textwrap.dedent(body) + UPDATE)), (8, 0))


def test_time_over_is_not_raised_while_torch_is_at_work(write):
    slow = """
    import time
    class Slow(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            try:
                time.sleep(2)
            except BaseException:
                print("raised inside")
                raise
            return super().__torch_function__(func, types, args, kwargs)
    slow = torch.ones(2).as_subclass(Slow)
    while True:
        slow + 1
    """
    script = Script(write(MODEL + textwrap.dedent(slow)), seconds=1)
    with pytest.raises(ValueError, match="in 1 s, in line .* of train.py"):
        simulate(script, (8, 0))
    assert script.printed == ""


def test_time_may_be_over_before_anything_lies_on_the_card(write):
    waits = """
    import time
    class Waits(torch.nn.Linear):
        def forward(self, x):
            x.add_(1)
            time.sleep(9)
    model, x = Waits(2, 2).cuda(), torch.ones(2).cuda()
    model(x)
    """
    script = Script(write(MODEL + textwrap.dedent(waits)), seconds=1)
    assert simulate(script, card=T4).peak_allocated > 0 and "stopped after 1 s" in script.note


def test_time_over_says_where_the_script_stood(write, capsys):
    never = ["predict", "--gpu", "T4", "--timeout", "1", "--script"]
    assert main([*never, write("while True:\n    pass")]) == 2
    assert re.search(r"in 1 s, in line \d of train.py: `.*`: --timeout", capsys.readouterr().err)
    forwards = "model, x = build().cuda(), torch.randn(4, 32).cuda()\nwhile True: model(x)"
    assert main([*never, write(MODEL + forwards)]) == 0
    assert re.search(r"stopped after 1 s, in line \d of train.py: `", capsys.readouterr().out)


def test_passes_of_a_model_that_was_made_on_the_card_are_an_answer(write):
    passes = """
    with torch.device("cuda"):
        model, x = build(), torch.ones(4, 32)
        while True:
            model(x)
    """
    script = Script(write(MODEL + textwrap.dedent(passes)), seconds=1)
    assert simulate(script, card=T4).peak_allocated > 0 and "Nothing was updated" in script.note


def test_what_is_raised_on_the_way_out_does_not_hide_what_ended_the_script(write):
    text = """
    try:
        while True:
            torch.ones(2) + 1
    finally:
        raise OSError("no room for the last checkpoint")
    """
    with pytest.raises(ValueError, match="ran no model on the card in 1 s, in line .*train.py"):
        simulate(Script(write(MODEL + textwrap.dedent(text)), seconds=1), (8, 0))


def test_a_script_that_does_not_react_is_ended(write, monkeypatch):
    monkeypatch.setattr(apart, "GRACE", 1.0)
    deaf = "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True:\n    pass"
    with pytest.raises(
        ValueError, match=r"no end in 3 s and does not react: .*train.py\", line [34]"
    ):
        simulate(Script(write(deaf), seconds=3), (8, 0))


def test_time_ends_a_script_that_catches_its_end(write):
    deaf = "import time\nwhile True:\n    try: time.sleep(9)\n    except BaseException: pass"
    with pytest.raises(ValueError, match="ran no model on the card in 1 s, in line 3 of train.py"):
        simulate(Script(write(deaf), seconds=1), (8, 0))


CATCHES = """
model, x = build().cuda(), torch.randn(4, 32).cuda()
optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
while RUNS:
    try:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    except BaseException as error:
        print("caught", type(error).__name__)
"""


@pytest.mark.parametrize("sleeps", [False, True])
def test_updates_end_a_script_that_catches_its_end(write, sleeps):
    text = MODEL + "import time\n" + CATCHES
    if sleeps:  # in the except clause, where nothing is raised
        text = text.replace("type(error).__name__)", "time.sleep(1000))")
    caught = Script(write(text.replace("RUNS", "True")), seconds=100)
    found = simulate(caught, (8, 0))
    line = text[: text.index("optimizer.step()")].count("\n") + 1
    said = f"stopped after 2 updates in line {line} of train.py: `optimizer.step()`, and went on"
    assert said in caught.note and caught.updates == 2
    plain = Script(
        write(text.replace("RUNS", "True").replace("BaseException", "ZeroDivisionError"))
    )
    assert simulate(plain, (8, 0)).peak_allocated == found.peak_allocated and not plain.note


def test_a_tick_after_the_end_raises_nothing(write, monkeypatch):
    ended = Run.ended

    def late(run):
        signal.raise_signal(signal.SIGALRM)
        return ended(run)

    monkeypatch.setattr(Run, "ended", late)
    script = Script(write(MODEL + "model = build().cuda()" + UPDATE))
    assert simulate(script, (8, 0)).peak_allocated > 0 and script.note == ""


def test_an_end_on_the_way_out_is_not_going_on(write):
    text = CATCHES.replace("RUNS", "True").replace("print(", "raise SystemExit(")
    script = Script(write(MODEL + text))
    simulate(script, (8, 0))
    assert script.note == ""


def test_a_script_that_does_not_react_is_told_by_its_own_thread_and_updates(write, monkeypatch):
    monkeypatch.setattr(apart, "GRACE", 1.0)
    deaf = """
    import signal, threading, time
    def waits():
        threading.Event().wait()
    threading.Thread(target=waits, daemon=True).start()
    model, x = build().cuda(), torch.randn(4, 32).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    model(x).sum().backward()
    optimizer.step()
    time.sleep(1)  # the number of updates is told
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    while True:
        time.sleep(9)  # here
    """
    text = MODEL + textwrap.dedent(deaf)
    line = text[: text.index("# here")].count("\n") + 1
    said = rf"took 1 of 2 updates in 3 s and does not react: .*train.py\", line {line} in"
    with pytest.raises(ValueError, match=said):
        simulate(Script(write(text), seconds=3), (8, 0))


def test_to_work_out_an_answer_takes_time_of_its_own(write, monkeypatch):
    monkeypatch.setattr(apart, "GRACE", 1.0)
    unused = Run.unused
    monkeypatch.setattr(Run, "unused", lambda run: (time.sleep(2), unused(run)))
    forwards = "model, x = build().cuda(), torch.randn(4, 32).cuda()\nwhile True: model(x)"
    script = Script(write(MODEL + forwards), seconds=2)
    assert simulate(script, card=T4).peak_allocated > 0 and "stopped after 2 s" in script.note


def test_progress_is_said(write):
    lines = []
    simulate(Script(write(LOOP + "import time"), say=lines.append), (8, 0))
    slow = "import time\ntime.sleep(1.2)\n" + LOOP
    simulate(Script(write(slow), say=lines.append), (8, 0))
    assert any("forward passes, 0 of 2 updates" in line for line in lines), lines


def test_a_script_that_updates_nothing_is_answered_and_says_so(write):
    evaluates = """
    model, x = build().cuda().eval(), torch.randn(64, 32).cuda()
    with torch.no_grad():
        for _ in range(PASSES):
            model(x)
    """
    found = []
    for passes in "17":
        script = Script(write(MODEL + textwrap.dedent(evaluates).replace("PASSES", passes)))
        found.append(simulate(script, card=T4))
        assert "Nothing was updated" in script.note and "forward passes" in script.note
    assert found[0].peak_allocated == found[1].peak_allocated
    assert found[0].by_category["gradients"] == found[0].by_category["optimizer states"] == 0


def test_a_script_leaves_no_process_and_no_thread_behind(write):
    ends = MODEL + "model = build().cuda()\nimport os, threading, time\n"
    ends += "threading.Thread(target=lambda: [time.sleep(1) for _ in iter(int, 1)]).start()\n"
    ends += "if os.fork() == 0: time.sleep(1000)\n"
    script = Script(write(ends + UPDATE.replace("range(9)", "range(1)") + "os._exit(0)"))
    before = psutil.Process().children(recursive=True)  # other tests' server (`warm`) among them
    simulate(script, (8, 0))
    assert script.note == ONE_UPDATE
    after = [p for p in psutil.Process().children(recursive=True) if p not in before]
    assert not [p for p in after if p.status() != "zombie"]


LARGER = """
optimizer, batch = torch.optim.SGD((model := build().cuda()).parameters()), 2**24
while batch:
    try:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(batch, 32, device="cuda")).sum().backward()
            optimizer.step()
        break
    except torch.OutOfMemoryError as error:
        assert "CUDA out of memory" in str(error)
        optimizer.zero_grad()
        torch.cuda.empty_cache()
        batch //= 2
"""


def test_a_script_that_looks_for_its_batch_finds_the_one_that_fits(write):
    script = Script(write(MODEL + LARGER), memory=2**30)
    found = simulate(script, (8, 0))
    batch = int(script.note.split("it came to, ")[1].split()[0].replace(",", ""))
    at_once = MODEL + LARGER.replace("2**24", "batch")
    one, two = (at_once.replace("batch\n", f"{n}\n", 1) for n in (batch, 2 * batch))
    assert "out of memory" in script.note and found.peak_reserved <= 2**30
    known = simulate(Script(write(one), memory=2**30), (8, 0))
    assert found.peak_allocated == pytest.approx(known.peak_allocated, rel=0.05)
    twice = simulate(Script(write(two)), (8, 0))
    assert twice.peak_reserved > 2**30


def test_accelerate_finds_a_batch_that_fits(write):
    search = """
    from accelerate.utils import find_executable_batch_size
    @find_executable_batch_size(starting_batch_size=2**24)
    def train(batch_size):
        model = build().cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(batch_size, 32, device="cuda")).sum().backward()
            optimizer.step()
    train()
    """
    script = Script(write(MODEL + textwrap.dedent(search)), memory=2**30)
    assert simulate(script, (8, 0)).peak_reserved <= 2**30 and "and went on" in script.note


def test_one_that_does_not_fit_says_how_much_it_would_need(write):
    path = write(MODEL + "model = build().cuda()" + UPDATE)
    small, large = (Script(path, memory=n) for n in (2**20, 2**35))
    needs = [simulate(script, (8, 0)).peak_reserved for script in (small, large)]
    assert needs[0] == needs[1] > 2**20 and small.note == large.note == ""


def test_a_notebook_runs_its_code_cells(write):
    def cell(text, kind="code"):
        return {"cell_type": kind, "source": text.splitlines(keepends=True)}

    magic = "%matplotlib inline\n!pip install nothing\nmodel = build().cuda()"
    cells = [cell("# Title", "markdown"), cell(MODEL), cell("%%bash\nexit 1"), cell(magic)]
    path = write(json.dumps({"cells": [*cells, cell(UPDATE)]}), "lesson.ipynb")
    assert simulate(Script(path), (8, 0)).by_category["optimizer states"] > 0
    path = write(json.dumps({"cells": [*cells, cell("x = 1\nx.y")]}), "lesson.ipynb")
    with pytest.raises(ValueError, match="line 2 of lesson.ipynb, cell 4: `x.y`"):
        simulate(Script(path), (8, 0))


@pytest.mark.parametrize("line", ["files = !ls", "await nothing()", "get_ipython().magic('x')"])
def test_what_only_ipython_runs_is_named(write, line):
    cell = {"cell_type": "code", "source": [line]}
    with pytest.raises(ValueError, match="line 1 of lesson.ipynb, cell 1: .* is for IPython"):
        simulate(Script(write(json.dumps({"cells": [cell]}), "lesson.ipynb")), (8, 0))


def test_a_link_to_a_script_finds_what_is_beside_the_script(write, tmp_path):
    (tmp_path / "deep folder").mkdir()
    write("x = 5", "deep folder/beside.py")
    body = "import beside\nmodel = build().cuda()"
    os.symlink(write(MODEL + body + UPDATE, "deep folder/train.py"), "link.py")
    simulate(Script("link.py"), (8, 0))


def test_a_module_of_a_package(write, tmp_path, capsys):
    (tmp_path / "pack").mkdir()
    write("", "pack/__init__.py")
    write(MODEL, "pack/parts.py")
    write("from .parts import build, torch\nmodel = build().cuda()" + UPDATE, "pack/train.py")
    assert main(["predict", "--gpu", "T4", "-m", "pack.train"]) == 0
    assert "optimizer states" in capsys.readouterr().out
    assert main(["predict", "--gpu", "T4", "-m", "pack.nothing"]) == 2
    assert "needs the module pack.nothing" in capsys.readouterr().err


def test_a_script_may_delete_itself(write, tmp_path):
    path = write(MODEL + "import os\nos.remove(__file__)\nmodel = build().cuda()" + UPDATE)
    simulate(Script(path), (8, 0))
    assert os.path.exists(path)


def test_a_scripts_own_modules_come_before_ours(write):
    write("x = 5", "helpers.py")
    script = Script(
        write(MODEL + "import helpers\nassert helpers.x == 5\nmodel = build().cuda()" + UPDATE)
    )
    simulate(script, (8, 0))


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


ASKS = """
cuda = torch.cuda
print(cuda.get_device_name(), *(n // 2**20 for n in cuda.mem_get_info()))
model = build().cuda()
"""


def test_a_script_is_the_same_for_any_card(write):
    """Its card is told for each prediction."""
    script = Script(write(MODEL + ASKS + UPDATE), seconds=60)
    before = script._asked()
    for name in ("T4", "A100-80GB", "T4"):
        found, card = predict(script, gpu=name), gpu(name)
        context = CONTEXT if card.context is None else card.context
        room = card.memory // 2**20, (card.memory - context) // 2**20
        assert script.printed.split() == [name, str(room[1]), str(room[0])]
        assert found.device == name and found.capacity == card.memory
        assert script._asked() == before
    simulate(script, (8, 0))
    assert script.printed.split() == ["a", "card", "81920", "81920"]


def test_what_looks_like_a_script_is_a_function():
    """Whoever makes a run tells `simulate` what is put around it: attributes tell nothing."""

    def run():
        return torch.nn.Linear(8, 8)

    run.simulated = run.inside = run.compiler = None
    assert simulate(run, (8, 0)).peak_allocated >= 8 * 8 * 4


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


def test_passes_without_gradients_in_each_update_are_no_evaluation(write):
    loop = """
    from torch.utils.checkpoint import checkpoint
    model, x = build().cuda(), torch.randn(64, 32, requires_grad=True).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    for k in range(9):
        checkpoint(model, x, use_reentrant=True).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if k % 5 == 0 and EVALUATES:
            with torch.no_grad():
                model(x)
    """
    for evaluates, updates in ((False, 2), (True, 3)):
        text = textwrap.dedent(loop).replace("EVALUATES", str(evaluates))
        script = Script(write(MODEL + text))
        simulate(script, card=T4)
        assert script.updates == updates


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
