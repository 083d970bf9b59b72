"""Whatever a script does, nothing of the user's changes, and nothing of it stays."""

import hashlib
import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import psutil
import pytest
import torch

import warm
from fake_cuda import simulate
from fake_cuda.scripts import Script, apart, overlay, own_folder, view

WAYS = ("overlay", "copy", "watched")
UPDATES = """
import torch
model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(2, 4, device="cuda")).sum().backward()
    optimizer.step()
"""
# Each function writes a file with a library of its own, and reads it back.
WRITERS = """
import atexit, gzip, importlib, json, logging, os, shutil, sqlite3, subprocess, sys, tarfile
import tempfile, zipfile
import numpy as np, pandas, torch
from pathlib import Path

MINE = Path(sys.argv[1])  # the script's folder, as an absolute path
def tar():
    with tarfile.open("data.tar", "w") as file: file.add("text.txt")
    assert tarfile.open("data.tar").getnames() == ["text.txt"]
def zip_():
    with zipfile.ZipFile("data.zip", "w") as file: file.write("text.txt")
    assert zipfile.ZipFile("data.zip").namelist() == ["text.txt"]
def gzip_():
    gzip.open("data.gz", "wb").write(b"new")
    assert gzip.open("data.gz").read() == b"new"
def cv2():
    module = importlib.import_module("cv2")
    module.imwrite("new.png", np.zeros((4, 4, 3), np.uint8))
    assert module.imread("new.png").shape == (4, 4, 3)
def soundfile():
    module = importlib.import_module("soundfile")
    module.write("new.wav", np.zeros(100), 8000)
    assert len(module.read("new.wav")[0]) == 100
def polars():
    module = importlib.import_module("polars")
    module.DataFrame({"a": [1]}).write_parquet("new.polars")
    assert module.read_parquet("new.polars")["a"][0] == 1
def arrow():
    import pyarrow, pyarrow.csv, pyarrow.feather, pyarrow.parquet
    table = pyarrow.table({"a": [1, 2]})
    pyarrow.csv.write_csv(table, "data.csv")
    pyarrow.feather.write_feather(table, "data.feather")
    pyarrow.parquet.write_table(table, "data.parquet")
    assert pyarrow.csv.read_csv("data.csv") == table == pyarrow.parquet.read_table("data.parquet")
    assert pyarrow.feather.read_table("data.feather") == table
def safetensors_numpy():
    from safetensors.numpy import load_file, save_file
    save_file({"a": np.ones(3)}, "data.safetensors")
    assert load_file("data.safetensors")["a"].sum() == 3
def safetensors_torch():
    from safetensors.torch import save_file
    save_file({"a": torch.ones(3)}, "torch.safetensors")
    assert os.path.exists("torch.safetensors")
def torch_save():
    torch.save({"a": torch.ones(3)}, "data.pt")
    assert torch.load("data.pt")["a"].sum() == 3
def from_file():
    torch.from_file("data.bin", shared=True, size=8, dtype=torch.uint8).fill_(7)
    assert set(Path("data.bin").read_bytes()[:8]) == {7}
def memmap():
    np.memmap("data.map", mode="w+", dtype="u1", shape=8)[:] = 1
    assert Path("data.map").read_bytes() == bytes([1] * 8)
def pandas_csv():
    pandas.DataFrame({"a": [1]}).to_csv("frame.csv")
    assert len(pandas.read_csv("frame.csv")) == 1
def at_exit():
    atexit.register(lambda: (MINE / "text.txt").write_text("at exit"))
def rmtree():
    shutil.rmtree("tree")
    assert not os.path.exists("tree")
    os.makedirs("tree/again")
    assert os.listdir("tree") == ["again"]
def removedirs():
    os.makedirs("a/b/c")
    os.removedirs("a/b/c")
    assert not os.path.exists("a")
def move():
    shutil.move("moved.txt", "there.txt")
    assert Path("there.txt").read_text() == "old" and not os.path.exists("moved.txt")
def rotate():
    Path("runs").rename("runs.old")
    os.mkdir("runs")
    assert os.listdir("runs.old") == ["log.txt"] and os.listdir("runs") == []
def truncate():
    os.truncate("long.txt", 2)
    assert Path("long.txt").read_text() == "ol"
def append():
    with open("text.txt", "a") as file: file.write("more")
    assert Path("text.txt").read_text() == "oldmore"
def dir_fd():
    folder = os.open(".", os.O_RDONLY)
    os.unlink("gone.txt", dir_fd=folder)
    number = os.open("other.txt", os.O_WRONLY | os.O_TRUNC, dir_fd=folder)
    os.write(number, b"by its folder")
    assert Path("other.txt").read_text() == "by its folder"
def absolute():
    (Path(__file__).parent / "text2.txt").write_text("new")
    assert Path("text2.txt").read_text() == "new"
def argument():
    (MINE / "text3.txt").write_text("new")
    assert (MINE / "text3.txt").read_text() == Path("text3.txt").read_text() == "new"
def link():
    os.symlink(MINE / "text4.txt", "link")
    Path("link").write_text("new")
    assert Path("text4.txt").read_text() == "new"
def sqlite():
    with sqlite3.connect("data.db") as base:
        base.execute("create table t (a)")
        base.execute("insert into t values (1)")
    assert sqlite3.connect("data.db").execute("select a from t").fetchone() == (1,)
def handlers():
    handler = logging.FileHandler("text.log")
    handler.emit(logging.makeLogRecord(dict(msg="new")))
    assert Path("text.log").read_text() == "oldnew\\n"
def tensorboard():
    if not importlib.util.find_spec("tensorboard"): raise ModuleNotFoundError
    from torch.utils.tensorboard import SummaryWriter
    with SummaryWriter("board") as writer: writer.add_scalar("a", 1, 1)
    assert os.listdir("board")
def wandb():
    run = importlib.import_module("wandb").init(mode="offline", project="x")
    run.log({"a": 1})
    run.finish()
def tokenizers():
    from tokenizers import Tokenizer, models
    Tokenizer(models.WordLevel({"a": 0}, "a")).save("tokens.json")
    assert json.load(open("tokens.json"))
def profiler():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        np.ones(3)
    profile.export_chrome_trace("trace.json")
    assert os.path.exists("trace.json")
def home():
    for folder in (".cache/new", ".config/new", ".local/share", ".triton", ".cache/old/deep"):
        path = Path.home() / folder
        path.mkdir(parents=True, exist_ok=True)
        (path / "file").write_text("new")
        assert (path / "file").read_text() == "new"
    (Path.home() / ".config" / "settings").write_text("new")
def temporary():
    with tempfile.NamedTemporaryFile("w") as file: file.write("new")
def modes():
    os.chmod("text.txt", 0o777)
    os.utime("text.txt", (1, 1))
def system():
    os.system("echo new > system.txt; rm -f by_rm.txt; chmod 777 long.txt; touch -d @1 gone.txt")
    assert Path("system.txt").read_text() == "new\\n" and not os.path.exists("by_rm.txt")
def programs():
    subprocess.run(["sh", "-c", "echo new > program.txt"], check=True)
    assert os.popen("cat program.txt").read() == "new\\n"

NAMES = "NAMES"
done = {}
for name in NAMES.split():
    try:
        globals()[name]()
        done[name] = ""
    except ModuleNotFoundError:
        done[name] = "not installed"
    except BaseException as error:
        done[name] = f"{type(error).__name__} {error}"[:150]
print("DONE" + json.dumps(done))
"""
NAMES = [line[4:-3] for line in WRITERS.splitlines() if line.startswith("def ")]
STARTS_PROGRAMS = ("system", "programs", "wandb")
FILES = "text.txt text2.txt text3.txt text4.txt moved.txt long.txt gone.txt other.txt by_rm.txt"
FILES += " data.tar data.zip data.gz new.png new.wav data.bin data.map text.log tokens.json"
FILES += " tree/deep/leaf.txt runs/log.txt trace.json data.csv data.pt"
HOME = ".cache/old/deep/file .config/settings .bashrc documents/letter.txt .local/share/file"


def seen(*folders: Path) -> dict:
    """All that is in the folders: kinds, modes, times and contents."""
    found = {}
    for path in (p for folder in folders for p in (folder, *folder.rglob("*"))):
        about = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path)] = about.st_mode, about.st_mtime_ns, about.st_uid, content
    return found


def folders(base: Path) -> tuple[Path, Path]:
    """A folder for scripts and a home, with files in them."""
    work, home = base / "home" / "my work, ü: 1", base / "home"
    for folder, names in ((work, FILES), (home, HOME)):
        for name in names.split():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("old")
    return work, home


def predict(work: Path, text: str, way: str, arguments=(), seconds=60.0, **options) -> Script:
    (work / "train.py").write_text(text + UPDATES)
    script = Script("train.py", arguments, ways=(way,), seconds=seconds, **options)
    try:
        simulate(script)
    except ValueError as error:
        if "no private view" in str(error):
            pytest.skip(f"{way}: {error}")
        raise
    assert script.way == way
    return script


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """By way: what the writers said, and the user's folders before and after."""

    @cache
    def run(way):
        work, home = folders(tmp_path_factory.mktemp("writers"))
        names = [n for n in NAMES if way != "watched" or n not in STARTS_PROGRAMS]
        text = WRITERS.replace('"NAMES"', repr(" ".join(names)))
        (work / "train.py").write_text(text + UPDATES)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(work)
            patch.setenv("HOME", str(home))
            before = seen(home)
            script = predict(work, text, way, [str(work)])
            after = seen(home)
        before.pop(str(work / "train.py")), after.pop(str(work / "train.py"))
        said = script.printed[script.printed.index("DONE") + 4 :].splitlines()[0]
        return json.loads(said), before, after

    return run


@pytest.fixture
def work(tmp_path, monkeypatch):
    work, home = folders(tmp_path)
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(home))
    return work


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_a_script_reads_what_it_wrote(written, way, name):
    if way == "watched" and name in STARTS_PROGRAMS:
        pytest.skip("no programs are started there")
    said = written(way)[0][name]
    if said == "not installed":
        pytest.skip(said)
    assert not said


@pytest.mark.parametrize("way", WAYS)
def test_nothing_of_the_users_changes(written, way):
    _, before, after = written(way)
    assert after == before


ODD = [
    "import shutil; shutil.rmtree('.', ignore_errors=True)",
    "import os; [os.remove(name) for name in os.listdir('.') if os.path.isfile(name)]",
    "open('text.txt', 'w').close()",
    "open('long.txt', 'r+').write('new')",
    "import os, pathlib; os.rename('runs', 'old runs'); pathlib.Path('runs').mkdir()",
    "import os; os.replace('text.txt', 'text2.txt')",
    "import os; os.link('text.txt', 'hard'); open('hard', 'a').write('more')",
    "import os; os.symlink('text.txt', 'soft'); open('soft', 'w').write('new')",
    "import os; os.chmod('text.txt', 0); os.utime('runs', (1, 1))",
    "import os; os.fchmod(os.open('text.txt', os.O_RDONLY), 0o777)",
    "import shutil; shutil.copytree('tree', 'copied'); shutil.move('copied', 'tree')",
    "import os; os.chdir('tree'); os.removedirs('../empty') if 0 else os.mkdir('new')",
    "import os; os.chdir('..'); open('letter', 'w').write('new')",
    "import pathlib; (pathlib.Path.home() / '.config' / 'settings').write_text('new')",
    "import pathlib; (pathlib.Path.home() / '.bashrc').open('a').write('new')",
    "import os; os.mkfifo('pipe'); os.truncate('long.txt', 0)",
    "import mmap, os; f = open('long.txt', 'r+b'); mmap.mmap(f.fileno(), 3)[:] = b'new'",
    "import os; os.fork() or (open('by_child', 'w').close(), os._exit(0))",
    "import threading; threading.Thread(target=lambda: open('thread', 'w').write('new')).start()",
    "import logging; logging.basicConfig(filename='text.log', filemode='w'); logging.error('new')",
    "import numpy; numpy.save('data.bin', numpy.ones(9)); numpy.savetxt('text.txt', numpy.ones(9))",
]


@pytest.mark.parametrize("way", WAYS)
def test_odd_scripts_change_nothing(work, way):
    """What they may not do, here or there, is refused: they need not all be predicted."""
    (work / "train.py").touch()
    before = seen(work.parent)
    for text in ODD:
        path = work.parent.parent / "train.py"  # its folder is the one it works in
        path.write_text(text + UPDATES)
        try:
            script = Script(str(path), ways=(way,), seconds=60)
            simulate(script)
        except ValueError as error:
            if "no private view" in str(error):
                pytest.skip(f"{way}: {error}")
            assert way != "overlay", (text, str(error))
        assert seen(work.parent) == before, text


def test_a_hole_is_noticed(work, monkeypatch):
    monkeypatch.setattr(view, "overlay", lambda *_: None)
    before = seen(work.parent)
    predict(work, "open('text.txt', 'w').write('new')", "overlay")
    assert {Path(p).name for p, is_now in seen(work.parent).items() if before.get(p) != is_now} >= {
        "text.txt"
    }


def test_what_is_refused_is_said(work, tmp_path):
    outside = tmp_path / "elsewhere"
    with pytest.raises(ValueError, match=f"writes to {outside}, outside of the copy of its folder"):
        predict(work, f"open({str(outside)!r}, 'w')", "copy")
    with pytest.raises(ValueError, match=f"writes to {outside}, outside of the copy of its folder"):
        predict(work, f"import os; os.mkdir({str(outside)!r})", "watched")
    with pytest.raises(ValueError, match="starts another program, `touch"):
        predict(work, "import subprocess; subprocess.run(['touch', 'new'])", "watched")
    (work / "large").write_bytes(bytes(view.SMALL + 1))
    with pytest.raises(ValueError, match="writes to large, "):
        predict(work, "open('large', 'r+')", "copy")


@pytest.mark.parametrize("way", WAYS)
def test_paths_in_arguments_are_found_in_the_view(work, way):
    text = """
import sys
for argument in sys.argv[1:]:
    open(argument.split("=")[-1], "w").write("new")
assert {open(name).read() for name in ("a", "b", "c")} == {"new"}
"""
    before = seen(work)
    predict(work, text, way, [f"{work}/a", f"--out={work}/b", f"data.out={work}/c"])
    assert seen(work).keys() - before.keys() == {str(work / "train.py")}


@pytest.mark.parametrize("way", WAYS[1:])
def test_a_cache_of_compiled_code_begins_empty(work, tmp_path, monkeypatch, way):
    cache = tmp_path / "compiled"
    (cache / "ab").mkdir(parents=True)
    (cache / "ab" / "code.py").write_text("old")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    text = "import os\ncache = os.environ['TORCHINDUCTOR_CACHE_DIR']\n"
    text += "assert os.listdir(cache) == []\nopen(cache + '/new', 'w').write('new')\n"
    predict(work, text, way)
    assert os.listdir(cache) == ["ab"]


def test_a_database_elsewhere_is_not_attached(work, tmp_path):
    attach = "import sqlite3\nbase = sqlite3.connect('mine.db')\nbase.execute('vacuum')\n"
    attach += "base.execute('attach {} as other').execute('create table other.t (a)')\n"
    predict(work, attach.format('"inside.db"'), "watched")
    with pytest.raises(ValueError, match="attaches a database in line 4 of train.py"):
        predict(work, attach.format(f'"{tmp_path}/outside.db"'), "watched")
    assert not (tmp_path / "outside.db").exists()


@pytest.mark.parametrize(
    "write",
    [
        "open('large', 'wb').write(bytes(2**24))",
        "__import__('numpy').ones(2**21).tofile('large')",
        "torch.save(torch.ones(2**22), 'large')",
    ],
)
def test_what_is_too_large_for_memory_is_said(work, monkeypatch, write):
    monkeypatch.setattr(overlay, "ROOM", "8m")
    with pytest.raises(ValueError, match="writes more than there is room for in line 2 of train"):
        predict(work, f"import torch\n{write}\n", "overlay")


# ------------------------------------------------------------------------------ other systems

TELLS = """
import ctypes, json, os, struct, subprocess, sys
from fake_cuda import simulate
from fake_cuda.scripts import Script
work, setup, user, *files = sys.argv[1:]
if ctypes.CDLL(None, use_errno=True).unshare(0x20000):  # linux/sched.h: CLONE_NEWNS
    sys.exit(f"unshare failed: {os.strerror(ctypes.get_errno())}")
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
subprocess.run(["sh", "-ec", setup, work], check=True)
os.chdir(work)
if user:
    os.setgroups([])
    os.setresgid(*[int(user)] * 3)
    os.setresuid(*[int(user)] * 3)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: or /proc/self is root's
def refuse(error, *numbers):  # by a filter of system calls, as containers do
    steps = [(32, 0, 0, 0)]
    for number in numbers:
        steps += [(21, 0, 1, number), (6, 0, 0, 0x50000 | error)]
    code = b"".join(struct.pack("HBBI", *step) for step in (*steps, (6, 0, 0, 0x7FFF0000)))
    kept = ctypes.create_string_buffer(code)
    about = struct.pack("HP", len(code) // 8, ctypes.addressof(kept))
    assert not ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)
    assert not ctypes.CDLL(None).prctl(22, 2, about, 0, 0)
REFUSE
script = Script("train.py", files, seconds=60)
simulate(script)
print(json.dumps([script.way, script.note, script.printed]))
"""
TRIES = """
import os, sys
for name in sys.argv[1:]:
    try:
        with open(name, "a") as file: file.write("new")
        assert open(name).read().endswith("new")
        print("ok", name)
    except OSError as error:
        print(type(error).__name__, error.errno, name)
"""
USER = "12345"


@pytest.fixture
def elsewhere(monkeypatch):
    """Predicts a script that writes files, in a process and mounts of its own, perhaps as an
    ordinary user: (folder, files, ...) -> way, note, printed. `base` is an open folder."""
    if sys.platform != "linux" or os.getuid():
        pytest.skip("needs root on Linux")
    base = Path(tempfile.mkdtemp(prefix="view test ")).resolve()
    base.chmod(0o755)
    (base / "tmp").mkdir()
    (base / "tmp").chmod(0o777)

    def run(work, files, setup=":", user=False, refuse=""):
        command = [warm.executable(), "-c", TELLS.replace("REFUSE", refuse)]
        command += [str(work), setup, USER if user else ""]
        (work / "train.py").write_text(TRIES + UPDATES)
        environment = os.environ | {"HOME": str(base / "me"), "TMPDIR": str(base / "tmp")}
        done = subprocess.run(
            [*command, *map(str, files)], env=environment, cwd=base, capture_output=True, text=True
        )
        if "no private view" in done.stderr or "unshare failed" in done.stderr:
            pytest.skip(done.stderr.splitlines()[-1])
        assert not done.returncode, done.stderr
        way, note, printed = json.loads(done.stdout.splitlines()[-1])
        return way, note, printed.split("\n")[:-1]

    run.base = base
    yield run
    shutil.rmtree(base)


@pytest.mark.parametrize(
    "kind, user",
    [(kind, False) for kind in ("tmpfs", "bind", "read-only", "file", "overlay")]
    + [("tmpfs", True), ("bind", True)],
)
def test_new_files_beside_a_mount_and_in_it(elsewhere, user, kind):
    """As in Colab: /content is on the disk, /content/drive is not."""
    base = elsewhere.base
    content, other = base / "me" / "content", base / "other"
    for folder in (content / "drive", content / "sample", other, base / "u", base / "w"):
        folder.mkdir(parents=True)
    for name in ("old.txt", "sample/old.txt", "drive/old.txt", "one.txt"):
        (content / name).write_text("old")
    (other / "old.txt").write_text("old")
    setup = {
        "tmpfs": "mount -t tmpfs none me/content/drive; echo old > me/content/drive/old.txt",
        "bind": "mount --bind other me/content/drive",
        "read-only": "mount --bind other me/content/drive; mount -o remount,ro,bind other "
        "me/content/drive",
        "file": "mount --bind other/old.txt me/content/one.txt",
        "overlay": "mount -t tmpfs none u; mkdir u/u u/w; mount -t overlay none "
        "-o lowerdir=other,upperdir=u/u,workdir=u/w me/content/drive",
    }[kind]
    if user:
        setup = "chown -R 12345:12345 me other; " + setup
        setup += "; chown -R 12345:12345 me/content/drive || true"
    files = "old.txt new sample/old.txt sample/new drive/old.txt drive/new one.txt ../beside"
    way, _, said = elsewhere(content, files.split(), setup, user)
    assert (way, said) == ("overlay", [f"ok {name}" for name in files.split()])
    assert not (content / "new").exists() and not (base / "me" / "beside").exists()
    assert {p.read_text() for p in (content / "old.txt", other / "old.txt")} == {"old"}


@pytest.mark.parametrize("kind, user", [("folder", False), ("tmpfs", True)])
def test_a_name_that_options_of_a_mount_may_not_hold(elsewhere, user, kind):
    work = elsewhere.base / "others" / "me" / "a\\b, c:d ü [1]"
    (work / "sub").mkdir(parents=True)
    (work / "sub" / "old").write_text("old")
    setup = 'cp -r "$0/." saved; mount -t tmpfs none "$0"; cp -r saved/. "$0"'
    setup = (":" if kind == "folder" else setup) + "; chown -R 12345:12345 others/me"
    files = ["new", "sub/new", "../beside"]
    way, _, said = elsewhere(work, files, setup, user)
    assert (way, said) == ("overlay", [f"ok {name}" for name in files])
    assert os.listdir(work / "sub") == ["old"] and os.listdir(work.parent) == [work.name]


def test_files_of_others_that_a_user_may_change_are_copied(elsewhere):
    work = elsewhere.base / "group"
    (work / "sub").mkdir(parents=True)
    (work / "sub" / "old").write_text("old")
    way, _, said = elsewhere(work, ["sub/old", "sub/new"], "chmod -R a+rwX group", user=True)
    assert (way, said) == ("copy", ["ok sub/old", "ok sub/new"])
    assert (work / "sub" / "old").read_text() == "old" and os.listdir(work / "sub") == ["old"]


@pytest.mark.parametrize("landlock", [True, False])
def test_a_container_without_namespaces(elsewhere, landlock):
    numbers = {"x86_64": (165, 272), "aarch64": (40, 97)}.get(os.uname().machine)
    if not numbers:
        pytest.skip("no numbers of calls")
    refuse = f"refuse(1, *{numbers})\n" + ("" if landlock else "refuse(38, 444)\n")
    work = elsewhere.base / "app"
    work.mkdir()
    way, note, said = elsewhere(work, ["train.py", "new"], refuse=refuse)
    assert said == ["ok train.py", "ok new"] and os.listdir(work) == ["train.py"]
    assert (way, note) == (("copy", "") if landlock else ("watched", view.WATCHED))


def test_windows_says_what_is_needed(work):
    """Everything but scripts is imported and used there too."""
    (work / "train.py").write_text(UPDATES)
    code = """
import sys
from transformers import Trainer  # which looks for them here, as this is no Windows
sys.modules["fcntl"] = sys.modules["termios"] = None
from fake_cuda import simulate
from fake_cuda.scripts import Script
simulate(Script("train.py"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == (
        "ValueError: train.py cannot be run here: a script needs Linux or macOS"
    )


# --------------------------------------------------------------------------------- how it ends

LEAVES = """
import os, signal, subprocess, sys, threading, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
if not os.fork():
    os.setsid()
    if os.fork():
        os._exit(0)
    time.sleep(1000)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", "MARK"])
threading.Thread(target=time.sleep, args=(1000,)).start()
"""
CALLER = """
import sys
from fake_cuda import simulate
from fake_cuda.scripts import Script
simulate(Script("train.py", ways=("WAY",), seconds=SECONDS))
"""


def ours() -> list[int]:
    """Processes that run in folders of this test, or once did."""
    here, found = os.getcwd(), []
    for process in psutil.process_iter(["pid", "cwd", "environ"]):
        mark = (process.info["environ"] or {}).get("VIEW_TEST")
        if mark == here and process.pid != os.getpid():
            found.append(process.pid)
    return found


def nothing_left(seconds: float = 60) -> bool:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if not ours() and not list(Path(os.environ["TMPDIR"]).glob("fake_cuda_*")):
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def caller(work, tmp_path, monkeypatch):
    """Predicts in a process of its own: (text, way, seconds) -> the process."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))

    def start(text, way="overlay", seconds=60):
        (work / "train.py").write_text(text)
        code = CALLER.replace("WAY", way).replace("SECONDS", str(seconds))
        environment = os.environ | {"VIEW_TEST": os.getcwd()}
        return subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True
        )

    return start


@pytest.mark.parametrize("way", WAYS[:2])
def test_what_a_script_leaves_behind_ends_with_it(caller, way):
    process = caller(LEAVES + UPDATES, way)
    _, said = process.communicate(timeout=300)
    if "no private view" in said:
        pytest.skip(said.splitlines()[-1])
    assert process.returncode == 0, said
    assert nothing_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_everything_ends_with_the_caller(caller, number):
    process = caller(LEAVES + "while True: time.sleep(1)", "copy", seconds=900)
    ends = time.monotonic() + 240
    while len(ours()) < 5 and process.poll() is None and time.monotonic() < ends:
        time.sleep(0.05)  # caller, keeper, worker and the two that it leaves
    process.send_signal(number)
    _, said = process.communicate(timeout=240)  # long before the script's own time is over
    if "no private view" in said:
        pytest.skip(said.splitlines()[-1])
    assert process.returncode == -number, said
    assert nothing_left()


STARTING = """
import os, signal, sys
from fake_cuda.scripts import apart
def told(*given):  # the caller gets a signal where its folder is named, and where it is forked
    os.kill(os.getpid(), signal.SIGNAL)
    return real(*given)
real = apart.WHAT
apart.WHAT = told
with apart.Process("fake_cuda.scripts.attempt", 60):
    pass
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("what", ["os.fork", "own_folder.name"])
def test_a_caller_that_ends_while_it_starts_leaves_nothing(work, tmp_path, monkeypatch, name, what):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("VIEW_TEST", os.getcwd())
    code = STARTING.replace("SIGNAL", name).replace("WHAT", what)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -getattr(signal, name), done.stderr
    assert nothing_left()


@pytest.mark.parametrize("way", WAYS[:2])
def test_a_keeper_that_is_killed_leaves_no_folder(work, tmp_path, monkeypatch, way):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    text = "import os, time\nopen('large', 'wb').write(bytes(2**20))\n"
    text += "os.kill(os.getppid(), 9)\ntime.sleep(90)\n"
    with pytest.raises(ValueError, match="the process that keeps it was ended by SIGKILL"):
        predict(work, text, way)
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere work outlives a keeper")
def test_what_a_killed_caller_and_keeper_left_is_removed_by_the_next_run(caller, monkeypatch):
    process = caller("import time\nopen('large', 'w').write('x')\ntime.sleep(900)\n", "copy", 900)
    left, ends = Path(os.environ["TMPDIR"]), time.monotonic() + 240
    while len(ours()) < 3 and process.poll() is None and time.monotonic() < ends:
        time.sleep(0.05)  # caller, keeper and worker
    keeper = psutil.Process(process.pid).children()
    for one in (process, *keeper):
        one.kill()
    _, said = process.communicate(timeout=60)
    if "no private view" in said:
        pytest.skip(said.splitlines()[-1])
    while ours() and time.monotonic() < ends:
        time.sleep(0.05)
    assert len(list(left.glob("fake_cuda_*"))) == 1
    monkeypatch.setattr(tempfile, "tempdir", str(left))
    with apart.Process("fake_cuda.scripts.attempt", 60):
        pass
    assert not list(left.iterdir())


def test_only_what_nobody_holds_is_removed(tmp_path, monkeypatch):
    user = tmp_path / "mine"
    user.mkdir()
    (user / "data").write_text("old")
    stale, held, others, link, file = (tmp_path / own_folder.name() for _ in range(5))
    for folder in (stale, others, tmp_path / "fake_cuda_held_results", tmp_path / "fake_cuda"):
        folder.mkdir()
    (stale / "copied").write_text("new")
    number = own_folder.make(str(held))
    link.symlink_to(user)
    file.write_text("old")
    monkeypatch.setattr(os, "getuid", lambda: -1)
    own_folder.sweep(str(tmp_path))
    assert stale.exists() and others.exists()
    monkeypatch.undo()
    others.rmdir()
    before = {path.name for path in tmp_path.iterdir()}
    own_folder.sweep(str(tmp_path))
    assert before - {path.name for path in tmp_path.iterdir()} == {stale.name}
    assert (user / "data").read_text() == "old"
    os.close(number)
    own_folder.sweep(str(tmp_path))
    assert not held.exists()


def test_a_script_that_does_not_react_is_ended(work, monkeypatch):
    monkeypatch.setattr(apart, "GRACE", 1.0)
    stuck = "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True: pass\n"
    (work / "train.py").write_text(stuck)
    script = Script("train.py", seconds=1)
    with pytest.raises(ValueError, match="came to no end in 1 s and does not react: .*train.py"):
        simulate(script)


def test_much_is_printed_and_every_file_closed(work):
    text = "import os\nprint('x' * 10**8, end='')\nos.closerange(3, 800)\n"
    script = predict(work, text, "overlay")
    assert script.updates == 2 and script.printed.endswith("x" * 100)


def test_predictions_from_threads_at_once(work):
    a = torch.randn(400, 400, requires_grad=True)
    (a @ a).sum().backward()
    (work / "train.py").write_text(UPDATES)
    scripts = [Script("train.py", seconds=60) for _ in range(3)]
    threads = [threading.Thread(target=simulate, args=(script,)) for script in scripts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [script.updates for script in scripts] == [2, 2, 2]


def test_where_nothing_can_be_forked_a_fresh_python_runs_it(work, monkeypatch):
    monkeypatch.setattr(apart, "_forkable", lambda: False)
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    before = seen(work.parent)
    (work / "train.py").write_text("open('text.txt', 'w').write('new')" + UPDATES)
    script = Script("train.py", seconds=60)
    simulate(script)
    (work / "train.py").unlink()
    assert script.updates == 2
    assert seen(work.parent).keys() == before.keys()
    assert (work / "text.txt").read_text() == "old"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is shared")
@pytest.mark.parametrize("cards, early", [((), False), (("/",), True)])
def test_libraries_are_loaded_twice_only_where_they_cannot_be_shared(
    work, monkeypatch, cards, early
):
    monkeypatch.setattr(apart, "CARDS", cards)
    monkeypatch.setattr(apart, "Process", lambda *_: nullcontext("a process"))
    (work / "train.py").write_text(UPDATES)
    script = Script("train.py")
    with script.started():
        assert script._waiting == ("a process" if early else None)


# --------------------------------------------------------------------------------- the network


@pytest.fixture
def server():
    asked = []

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/", asked
    server.shutdown()


@pytest.mark.parametrize("way", WAYS)
def test_the_network_is_closed_unless_asked_for(work, server, way):
    address, asked = server
    ask = f"""
    import subprocess, sys, urllib.request
    ask = "import urllib.request as r; r.urlopen('{address}NAME', timeout=5)"
    try:
        exec(ask.replace("NAME", "python"))
    except OSError:
        pass
    if {way != "watched"}:
        subprocess.run([sys.executable, "-c", ask.replace("NAME", "program")])
    """
    predict(work, textwrap.dedent(ask), way)
    assert asked == []
    predict(work, textwrap.dedent(ask), way, network=True)
    assert asked == (["/python"] if way == "watched" else ["/python", "/program"])
