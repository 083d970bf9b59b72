"""What is started warm is as if Python were started: arguments, files, folder, end."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest

import warm

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there it is Python itself")
TELLS = "import os, sys; print(os.getcwd(), os.environ['MINE'], sys.argv[1:], __name__)"


def ran(*arguments, **options):
    return subprocess.run(
        [warm.executable(), *arguments], capture_output=True, text=True, timeout=120, **options
    )


@pytest.mark.parametrize("way", ["-c", "-m", "file"])
def test_it_has_arguments_folder_and_environment_of_its_caller(tmp_path, way):
    (tmp_path / "told.py").write_text(TELLS)
    start = {"-c": ["-c", TELLS], "-m": ["-m", "told"], "file": ["-u", "told.py"]}[way]
    done = ran(*start, "one", "two", cwd=tmp_path, env=os.environ | {"MINE": "yes"})
    assert done.stdout == f"{tmp_path} yes ['one', 'two'] __main__\n"
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("code, status, said", [
    ("import sys; sys.exit(7)", 7, ""),
    ("import sys; sys.exit('so')", 1, "so"),
    ("raise KeyError('so')", 1, "KeyError: 'so'"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV, ""),
])  # fmt: skip
def test_its_end_is_that_of_the_program(code, status, said):
    done = ran("-c", code)
    assert done.returncode == status and done.stderr.rstrip().endswith(said)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_ends_with_what_stands_for_it(number):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"
    command = [warm.executable(), "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        pid = int(client.stdout.readline())
        client.send_signal(number)
        assert client.wait(60) == -number
        assert client.stdout.read() == ""  # closed by all who had it
    with suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(60)


def test_libraries_are_there_and_nothing_of_the_one_before_is():
    code = "import sys, torch; print('transformers' in sys.modules, hasattr(torch, 'mine'))"
    assert [ran("-c", f"{code}; torch.mine = 1").stdout for _ in range(2)] == ["True False\n"] * 2
