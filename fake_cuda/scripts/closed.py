"""Only one folder may be written, by this process and all that it starts: Linux with Landlock."""

import ctypes
import errno
import os
import socket
import struct
from contextlib import suppress

from .overlay import NO_NEW_PRIVILEGES, call

# linux/landlock.h: all rights to write, make or remove, by the version that brought them
WRITE_FILE, WRITES, RENAMES, TRUNCATES = 1 << 1, 0x1FF2, 1 << 13, 1 << 14
SECCOMP, FILTER = 22, 2  # linux/prctl.h
KIND = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h
# asm/unistd.h: what changes modes, owners, times and attributes; linux: the same on both
META = {
    "x86_64": (*range(90, 95), 132, *range(188, 191), *range(197, 200), 235, 260, 261, 268, 280),
    "aarch64": (5, 6, 7, 14, 15, 16, 52, 53, 54, 55, 88),
}
NEW_META = (452, 463, 466, 469)
TRUNCATE, SOCKET = {"x86_64": 76, "aarch64": 45}, {"x86_64": 41, "aarch64": 198}


def landlock() -> int:
    """The version of this system's Landlock; OSError if it has none."""
    if os.uname().machine not in KIND:
        raise OSError(f"no numbers of calls for {os.uname().machine}")
    return call("syscall", 444, None, 0, 1)


def close(base: str, version: int, network: bool) -> None:
    """Refuse to write outside of `base`."""
    rights = WRITES | (RENAMES if version > 1 else 0) | (TRUNCATES if version > 2 else 0)
    about = struct.pack("Q", rights)
    rules = call("syscall", 444, about, len(about), 0)
    for folder, allowed in ((base, rights), ("/dev/shm", rights), ("/dev", WRITE_FILE)):
        with suppress(FileNotFoundError):
            opened = os.open(folder, os.O_PATH)
            call("syscall", 445, rules, 1, struct.pack("=Qi", allowed, opened), 0)
            os.close(opened)
    call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    call("syscall", 446, rules, 0)
    os.close(rules)
    _filter(os.uname().machine, version > 2, network)


def _filter(machine: str, truncates: bool, network: bool) -> None:
    """What Landlock does not know: changes of modes, owners and times seem to succeed, and there
    are no sockets of the internet. The program is one of linux/filter.h, for linux/seccomp.h."""
    error, allow = 0x50000, (6, 0, 0, 0x7FFF0000)
    program = [(32, 0, 0, 4), (21, 1, 0, KIND[machine]), allow, (32, 0, 0, 0)]
    for number in (*META[machine], *NEW_META):
        program += [(21, 0, 1, number), (6, 0, 0, error)]
    if not truncates:
        program += [(21, 0, 1, TRUNCATE[machine]), (6, 0, 0, error | errno.EACCES)]
    if not network:
        program += [(21, 0, 4, SOCKET[machine]), (32, 0, 0, 16)]
        program += [(21, 1, 0, int(socket.AF_INET)), (21, 0, 1, int(socket.AF_INET6))]
        program += [(6, 0, 0, error | errno.ENETUNREACH)]
    code = b"".join(struct.pack("HBBI", *step) for step in (*program, allow))
    kept = ctypes.create_string_buffer(code)
    about = struct.pack("HP", len(code) // 8, ctypes.addressof(kept))
    call("prctl", SECCOMP, FILTER, about, 0, 0)
