"""A Python that has torch and transformers loaded when it starts, for tests that start many.

To load them takes five seconds, and what runs then is often done in one. So a server loads them
once and is forked for each start: `executable()` names a program that is called like `python`, with
a script, `-m` or `-c`, and has the arguments, the folder, the environment, the standard files and
the exit status of its caller, and ends with it. Not for tests of what is loaded when, of variables
that a library reads when it loads, or of what other processes see of this one.
"""

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

from warm_client import LENGTH

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ("fake_cuda.scripts.run", "helpers.training", "accelerate.commands.launch")
LIBRARIES += ("torch.distributed.launcher.api", "torch.distributed.fsdp", "datasets")
IN_A_KERNEL = "ipykernel.kernelapp"  # loaded first, it has the others load as in a notebook


# ------------------------------------------------------------------------------- in the test
@cache
def executable(*libraries: str) -> str:
    """The program, whose server starts now and ends with this process; Python elsewhere.
    It has these loaded, or LIBRARIES."""
    if sys.platform != "linux":
        return sys.executable
    folder = tempfile.TemporaryDirectory(prefix="warm")
    program, socket_file = (os.path.join(folder.name, name) for name in ("python", "socket"))
    client = Path(__file__).with_name("warm_client.py")
    Path(program).write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -S -E "{client}" "{socket_file}" "$@"\n'
    )
    os.chmod(program, 0o755)
    # Without a card: what CUDA starts would not survive a fork.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    server = subprocess.Popen(
        [sys.executable, __file__, socket_file, program, *(libraries or LIBRARIES)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        cwd=ROOT,
    )
    assert server.stdout.readline() == b"ready\n"

    def end() -> None:
        server.stdin.close()
        server.wait()
        folder.cleanup()

    atexit.register(end)
    return program


# ----------------------------------------------------------------------------- in the server
class Running(NamedTuple):
    """A process that was asked for."""

    pid: int
    end: int  # a file that can be read when it has ended
    caller: socket.socket


def serve(socket_file: str, program: str, *libraries: str) -> None:
    """Fork for each who asks, until standard input closes."""
    _load(libraries)
    gc.freeze()
    sys.executable = program  # what is started starts others
    door = socket.socket(socket.AF_UNIX)
    door.bind(socket_file)
    door.listen(100)
    os.write(1, b"ready\n")
    running: list[Running] = []
    while True:
        files = [door, 0, *(one.end for one in running), *(one.caller for one in running)]
        ready = select.select(files, [], [])[0]
        if 0 in ready:
            break
        for one in running[:]:
            if one.end in ready:
                running.remove(one)
                _ended(one)
            elif one.caller in ready:  # it hands on a signal, or is gone
                told = one.caller.recv(1)
                os.kill(one.pid, told[0] if told else signal.SIGKILL)
        if door in ready:
            running.append(_started(door, running))
    for one in running:
        os.kill(one.pid, signal.SIGKILL)
    os._exit(0)


def _load(libraries: tuple[str, ...]) -> None:
    """Some ask while they load whether they are in a notebook, by IPython's shell."""
    if IN_A_KERNEL not in libraries:
        list(map(import_module, libraries))
        return
    import IPython

    shell, real = SimpleNamespace(config={"IPKernelApp": {}}), IPython.get_ipython
    with patch("IPython.get_ipython", lambda: shell) as asked:
        list(map(import_module, libraries))
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get("get_ipython") is asked:
                module.get_ipython = real


def _ended(one: Running) -> None:
    status = os.waitstatus_to_exitcode(os.waitpid(one.pid, 0)[1])
    with suppress(OSError):
        one.caller.send(str(status).encode())
    one.caller.close()
    os.close(one.end)


def _started(door: socket.socket, running: list[Running]) -> Running:
    caller = door.accept()[0]
    length, files, _, _ = socket.recv_fds(caller, LENGTH, 3)
    request = b""
    while len(request) < int.from_bytes(length, "big"):
        request += caller.recv(2**20)
    pid = os.fork()
    if not pid:
        for socket_of_server in (door, caller, *(one.caller for one in running)):
            socket_of_server.close()
        _run(files=files, **json.loads(request))
    for file in files:
        os.close(file)
    return Running(pid, os.pidfd_open(pid), caller)


def _run(arguments: list[str], folder: str, environment: dict, files: list[int]) -> None:
    """Be that process; does not return."""
    status = 1
    try:
        os.setsid()
        for number, file in enumerate(files):
            os.dup2(file, number)
        sys.stdout, sys.stderr = (open(n, "w", buffering=1, closefd=False) for n in (1, 2))
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None  # it asks the environment
        if "OMP_NUM_THREADS" in environment:
            import torch

            torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
        _execute([word for word in arguments if word != "-u"])
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(BaseException):
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _execute(arguments: list[str]) -> None:
    """What `python` does with these arguments."""
    above = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*filter(None, above), *(p for p in sys.path[1:] if p != str(ROOT))]
    kind, *rest = arguments
    if kind == "-m":
        sys.argv = rest
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(kind)))
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    serve(*sys.argv[1:])
