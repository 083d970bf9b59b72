"""What stands for Python in a command: it asks the server of `warm` to run it, and ends as it does.

It is started with the server's socket and the arguments of Python, and loads next to nothing.
"""

import json
import os
import signal
import socket
import sys

LENGTH = 8  # bytes that say how long a request is


def main() -> None:
    server = socket.socket(socket.AF_UNIX)
    server.connect(sys.argv[1])
    request = {"arguments": sys.argv[2:], "folder": os.getcwd(), "environment": dict(os.environ)}
    text = json.dumps(request).encode()
    socket.send_fds(server, [len(text).to_bytes(LENGTH, "big")], [0, 1, 2])
    server.sendall(text)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: server.send(bytes([number])))
    status = int(server.recv(16) or b"1")
    if status < 0:  # it was ended by a signal
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
