"""Python programs that are forked from a process that has imported their libraries.

Importing torch, or the server, costs seconds of CPU time per program. A program that is forked here
starts with them imported, but otherwise as `python` does: with its own arguments, environment,
`__main__`, output and exit. Use `subprocess` where the test is about the start of the interpreter
or the order of imports.

python -m tests.forked_python SOCKET MODULE ...
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import paceline_autostart

TORCH = (
    "torch",
    "torch._dynamo",  # imported by the first optimizer
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
)
SERVER = ("paceline_server.app",)
_REQUEST_BYTES = 1 << 20


class ForkedPython:
    """A running program, with the part of the interface of `subprocess.Popen` that tests use."""

    def __init__(
        self,
        arguments: Sequence[object],
        env: Mapping[str, str],
        *,
        modules: Sequence[str] = TORCH,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> None:
        """Start a program.

        Args:
            arguments: of Python: a path or -c SOURCE or -m MODULE, after -W error or not.
            env: the whole environment.
            modules: that are imported before.
            stdout: a descriptor; without one, `communicate` returns the output.
            stderr: likewise.
        """
        self.args = [str(argument) for argument in arguments]
        self.returncode: int | None = None
        self._output = [os.memfd_create("stdout"), os.memfd_create("stderr")]
        outputs = [
            own if given is None else given
            for given, own in zip((stdout, stderr), self._output, strict=True)
        ]
        self._status, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self._server = _server(tuple(modules))
        request = {"arguments": self.args, "env": dict(env), "directory": os.getcwd()}
        self._server.send(request, [*outputs, theirs.fileno()])
        theirs.close()
        self.pid = int(self._answer())

    def _answer(self) -> str:
        answer = self._status.recv(100).decode()
        assert answer, f"no answer about {self.args}"
        return answer

    def poll(self) -> int | None:
        if self.returncode is None and self._has_ended(0):
            self.returncode = int(self._answer())
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not self._has_ended(timeout):
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        returncode = self.poll()
        assert returncode is not None
        return returncode

    def _has_ended(self, timeout: float | None) -> bool:
        poll = select.poll()  # not select.select: a pytest worker may have 1024 descriptors
        poll.register(self._status, select.POLLIN)
        return bool(poll.poll(None if timeout is None else timeout * 1000))

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return self.output(), self.errors()

    def output(self) -> str:
        """Return what the program has printed until now."""
        return self._read(self._output[0])

    def errors(self) -> str:
        return self._read(self._output[1])

    def _read(self, descriptor: int) -> str:
        # Not os.read: the program writes where the shared file offset is.
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        self._status.close()
        for descriptor in self._output:
            os.close(descriptor)


def run(
    arguments: Sequence[object], env: Mapping[str, str], timeout: float = 150, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; kill it after the timeout."""
    program = ForkedPython(arguments, env, **options)
    try:
        output, errors = program.communicate(timeout)
    finally:
        program.kill()
    return subprocess.CompletedProcess(program.args, program.wait(), output, errors)


class _Server:
    def __init__(self, modules: Sequence[str]) -> None:
        self._socket, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked_python", str(theirs.fileno()), *modules],
            env=_without_paceline(os.environ) | {"OMP_NUM_THREADS": "1"},  # so that it may fork
            cwd=Path(__file__).parents[1],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        atexit.register(self.close)

    def send(self, request: dict[str, Any], descriptors: list[int]) -> None:
        socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


def _without_paceline(environment: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in environment.items() if not k.startswith("PACELINE")}


@functools.cache
def _server(modules: tuple[str, ...]) -> _Server:
    """Return the process that forks programs with these modules: one per pytest worker."""
    return _Server(modules)


def _main(descriptor: int, modules: list[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # so that collections in programs do not copy the pages of what they share
    with socket.socket(fileno=descriptor) as requests:
        request = _serve(requests)
    if request is not None:
        _become(**request)


def _serve(requests: socket.socket) -> dict[str, Any] | None:
    """Fork a program per request. Return its request in a program, None at the end."""
    while True:
        content, descriptors, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, 3)
        if not content:
            return None
        if os.fork() == 0:
            *outputs, status = descriptors
            _fork_program(socket.socket(fileno=status))
            for own, given in zip((1, 2), outputs, strict=True):
                os.dup2(given, own)
                os.close(given)
            request: dict[str, Any] = json.loads(content)
            return request
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _fork_program(status: socket.socket) -> None:
    """Return in a child. The parent reports the child's process id and how it ended, and ends."""
    with status:
        pid = os.fork()
        if pid == 0:
            return
        status.send(str(pid).encode())
        _, ended = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):  # if the test is over
            status.send(str(os.waitstatus_to_exitcode(ended)).encode())
    os._exit(0)


def _become(arguments: list[str], env: dict[str, str], directory: str) -> None:
    """Run a program in this process, up to the exit of the interpreter."""
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(env)
    sys.orig_argv = [sys.executable, *arguments]
    if "PACELINE" in env:
        paceline_autostart.load()  # as `import torch` does at its end
    if arguments[:2] == ["-W", "error"]:
        del arguments[:2]
        warnings.simplefilter("error")
    elif env.get("PYTHONWARNINGS") == "ignore":
        warnings.simplefilter("ignore")
    if arguments[0] == "-m":
        sys.path[0] = directory
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    if arguments[0] == "-c":
        source, name = arguments[1], "<string>"
        sys.path[0], sys.argv = "", ["-c", *arguments[2:]]
    else:
        name = arguments[0]
        source = Path(name).read_text()
        main.__file__ = name
        sys.path[0], sys.argv = os.path.dirname(os.path.abspath(name)), arguments
    sys.modules["__main__"] = main
    exec(compile(source, name, "exec"), main.__dict__)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2:])
