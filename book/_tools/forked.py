"""Kernels that are forked from one process which has imported torch already.

    with forked.kernels(python, variables) as command:
        manager.kernel_spec.argv = [*command, "-f", "{connection_file}"]

torch, its compiler (which the first optimizer imports), matplotlib and ipykernel take a
core four seconds, and each of 33 chapters would spend them. A forked kernel has their
modules in memory, and no names; the library itself it imports anew.

The command connects to that process, which forks a kernel into the folder and the
variables that the command was started with; what it is sent, signals and its end, the
kernel is sent too. It needs Linux.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

BACKEND = "module://matplotlib_inline.backend_inline"  # what ipykernel would set


@contextlib.contextmanager
def kernels(python: Path, variables: dict[str, str]) -> Iterator[list[str]]:
    """The beginning of a command that starts a kernel.

    Args:
        python: Whose packages the kernels have.
        variables: What the environment says while torch is imported.
    """
    with tempfile.TemporaryDirectory(prefix="kernels-") as place:
        address = str(Path(place) / "socket")
        server = subprocess.Popen(
            [str(python), __file__, "serve", address],
            env=variables | {"MPLBACKEND": BACKEND},
            cwd=place,
            stdout=subprocess.PIPE,
        )
        try:
            if not server.stdout.readline():  # it listens now
                raise RuntimeError("the process that kernels are forked from ended.")
            yield [sys.executable, "-S", "-E", __file__, "ask", address]
        finally:
            server.kill()
            server.wait()
            server.stdout.close()


def serve(address: str) -> list[str]:
    """Fork a kernel for each that asks; returns, in a kernel alone, its arguments."""
    # Called last. To take torch's modules apart, object by object, in memory that
    # is shared until it is written to, took seconds.
    atexit.register(os._exit, 0)
    import ipykernel.kernelapp  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import torch._dynamo  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    print("listening", flush=True)
    while True:
        asking, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return watch(asking)
        asking.close()


def watch(asking: socket.socket) -> list[str]:
    """Fork a kernel, and hand on signals and its end; returns in the kernel alone."""
    with asking.makefile("rb") as lines:
        wanted = json.loads(lines.readline())
    watcher = os.getpid()
    kernel = os.fork()
    if kernel == 0:
        import numpy

        numpy.random.seed()  # Python's own generator does so after each fork
        asking.close()
        os.setsid()
        os.chdir(wanted["folder"])
        os.environ.clear()
        os.environ.update(wanted["variables"])
        return [*wanted["arguments"], f"--IPKernelApp.parent_handle={watcher}"]
    ended = os.pidfd_open(kernel)
    while True:
        ready, _, _ = select.select([asking, ended], [], [])
        if ended in ready:
            code = os.waitstatus_to_exitcode(os.waitpid(kernel, 0)[1])
            with contextlib.suppress(OSError):  # nobody may be there any more
                asking.send(bytes([code % 256]))
            os._exit(0)
        sent = asking.recv(1)
        os.kill(kernel, sent[0] if sent else signal.SIGKILL)
        if not sent:
            os._exit(1)


def ask(address: str, arguments: list[str]) -> int:
    """Be a kernel to whoever started this; its exit status."""
    asking = socket.socket(socket.AF_UNIX)
    asking.connect(address)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda sent, _: asking.send(bytes([sent])))
    wanted = {"folder": os.getcwd(), "variables": dict(os.environ)}
    asking.sendall(json.dumps(wanted | {"arguments": arguments}).encode() + b"\n")
    return (asking.recv(1) or b"\1")[0]


if __name__ == "__main__":
    task, address, *rest = sys.argv[1:]
    if task == "ask":
        sys.exit(ask(address, rest))
    del sys.path[0]  # this folder
    rest = serve(address)
    from ipykernel.kernelapp import launch_new_instance

    sys.argv = ["ipykernel_launcher", *rest]
    launch_new_instance(argv=rest)
