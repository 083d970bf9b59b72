"""What is started warm is as if Python were started: arguments, files, folder, end."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import warm
import warm_kernels

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there it is Python itself")
TELLS = "import os, sys; print(os.getcwd(), os.environ['MINE'], sys.argv[1:], __name__)"


def ran(*arguments, program=None, **options):
    command = [program or warm.executable(), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


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


@pytest.mark.parametrize("name, warm", [
    ("12_parameter_efficient_fine_tuning", True),
    ("solutions/12_parameter_efficient_fine_tuning", True),
    ("solutions/19_mixture_of_experts", False),  # asks for `device` alone
    ("solutions/08_data_loading", False),
])  # fmt: skip
def test_a_kernel_has_loaded_nothing_that_its_notebook_does_not_ask_for(name, warm):
    assert warm_kernels.loads_them(NOTEBOOKS / f"{name}.ipynb") == warm


def test_what_a_kernel_has_loaded_was_told_that_it_is_one_and_asks_again_now():
    code = """
import sys, IPython, transformers.trainer
print(transformers.trainer.DEFAULT_PROGRESS_CALLBACK.__name__, "helpers.prediction" in sys.modules)
print({m.get_ipython for m in list(sys.modules.values()) if "get_ipython" in vars(m)}
      == {IPython.get_ipython})
"""
    done = ran("-c", code, program=warm.executable(*warm_kernels.LOADED))
    assert done.stdout == "NotebookProgressCallback True\nTrue\n", done.stderr
