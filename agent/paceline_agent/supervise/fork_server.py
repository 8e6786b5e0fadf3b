"""The fork server: imports the modules of a job's ranks once, then forks ranks that have them.

The job's interpreter runs it as a file, with only the standard library, as
`python FLAGS fork_server.py FD MODULE,... PROGRAM`; PROGRAM is `script.py ARGS` or `-m NAME ARGS`.
The guard starts it beside the first ranks of a job that sets `PACELINE_PRELOAD` and talks to it
over the packet socket FD: it sends `ready` once, and answers each request with the pid of a rank or
an error. A rank is forked twice, so that it becomes a child of the guard like any other, once the
process between has ended. It starts when the guard, which knows its pid by then, writes to the pipe
that came with the request.

A process for the next request is forked ahead, because others may wait for a rank that replaces a
dead one: on a busy node, the two forks of a process with torch take 100 ms.

A forked rank equals one in a new interpreter, except for random numbers that modules drew during
import. `ps` and /proc/PID/environ show its command, RANK and PACELINE_GENERATION.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import types
import warnings
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER = 0x59616D61
_REQUEST_BYTES = 1 << 20
_AHEAD_SECONDS = 0.5  # without a request, until a process is forked for the next one
# Imported by optimizers and DDP, and by `paceline.Checkpoints`, only when these are used; and facts
# that the hooks look up when they begin.
_IMPORTED_LATER = ("torch._dynamo", "paceline.checkpoints.checkpoints", "paceline.preloaded")
_ARGUMENTS, _ENVIRONMENT = 45, 47  # arg_start, env_start in proc_pid_stat(5), from field 3


def main(arguments: list[str]) -> None:
    descriptor, modules, *program = arguments
    connection = socket.socket(fileno=int(descriptor))
    if not sys.flags.isolated and not getattr(sys.flags, "safe_path", False):
        sys.path[0] = _own_directory(program)
    try:
        preload(modules.split(","))
    except BaseException as error:
        sys.exit(f"paceline: {modules} cannot be preloaded, each rank imports for itself: "
                 f"{type(error).__name__}: {error}")  # fmt: skip
    connection.send(b'"ready"')
    request = serve(connection)
    if request is not None:
        run(request, program)


def _own_directory(program: list[str]) -> str:
    """Return the directory that Python puts first in `sys.path` for this program."""
    return os.getcwd() if program[0] == "-m" else os.path.dirname(os.path.realpath(program[0]))


def preload(modules: list[str]) -> None:
    """Import the modules. Raises their errors, and RuntimeError if a fork would not work."""
    for name in modules:
        importlib.import_module(name)
    if "torch" in sys.modules:
        for name in _IMPORTED_LATER:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    if threading.active_count() > 1:
        raise RuntimeError("an import started threads, which a forked rank would not have")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise RuntimeError("an import initialized CUDA, which a forked rank cannot use")
    gc.collect()
    gc.freeze()  # otherwise the first garbage collection of each rank would copy all pages


def serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork ranks until the guard is gone. Return None then; in a rank, return its request."""
    fork: _Fork | None = None
    while True:
        timeout = _AHEAD_SECONDS if fork is None else None
        has_request = bool(select.select([connection], [], [], timeout)[0])
        if fork is None:
            fork = _Fork(connection)
            if fork.is_rank:
                return fork.wait()
        if not has_request:
            continue
        message, descriptors, _, _ = socket.recv_fds(connection, _REQUEST_BYTES, 2)
        if not message:
            return None
        connection.send(fork.start(message, descriptors))
        fork = None
        for descriptor in descriptors:
            os.close(descriptor)


class _Fork:
    """A process that waits for the request of its rank, and one between until the request comes.

    Both end with the fork server.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Fork both. `is_rank` is True in the new rank, which has to call `wait`."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        readable, self._gate = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about numpy's threads; numpy handles a fork itself
            self._between = os.fork()
            self.is_rank = False
            if not self._between:
                connection.close()
                self._socket.close()
                os.close(self._gate)
                self.is_rank = _fork_again(theirs, readable)
                self._socket = theirs
        os.close(readable)
        if not self.is_rank:
            theirs.close()

    def start(self, message: bytes, descriptors: list[int]) -> bytes:
        """Have the process become a rank. Return its answer."""
        os.close(self._gate)
        os.waitpid(self._between, 0)
        with self._socket, contextlib.suppress(OSError):
            socket.send_fds(self._socket, [message], descriptors)
            if answer := self._socket.recv(_REQUEST_BYTES):
                return answer
        return b'{"error": "the process that was forked ahead is gone"}'

    def wait(self) -> dict[str, Any]:
        """Wait for the request, and for the start of the rank. Return the request."""
        message, descriptors, _, _ = socket.recv_fds(self._socket, _REQUEST_BYTES, 2)
        if not message:
            os._exit(0)
        request: dict[str, Any] = json.loads(message)
        go, log = descriptors
        with self._socket:
            _prepare(request, self._socket, log)
        _wait_for_start(request, go)
        return request


def _fork_again(rank: socket.socket, gate: int) -> bool:
    """Fork. Return True in the new process; end the other one when the gate is closed."""
    pid = -1
    try:
        pid = os.fork()
        if pid:
            rank.close()
            os.dup2(gate, 0)
            with contextlib.suppress(OSError):  # the end of a small process takes no time
                os.execv("/bin/cat", ["fork_server.py, between"])
            os.read(gate, 1)
    finally:
        if pid:
            os._exit(0)
    return True


def _prepare(request: dict[str, Any], reply: socket.socket, log: int) -> None:
    """Set up this process as the guard does for a rank that it executes, and answer.

    The process already runs as the ranks' user without capabilities, like the fork server.
    """
    try:
        os.setsid()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        if request["directory"]:
            os.chdir(request["directory"])
    except OSError as error:
        reply.send(json.dumps({"error": str(error)}).encode())
        os._exit(127)
    reply.send(json.dumps({"pid": os.getpid()}).encode())


def _wait_for_start(request: dict[str, Any], go: int) -> None:
    if not os.read(go, 1):
        os._exit(127)  # the guard did not register this rank
    os.close(go)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != request["guard_pid"]:
        os._exit(127)  # the guard died before the parent-death signal was set
    libc.prctl(_PR_SET_PTRACER, request["agent_pid"], 0, 0, 0)


def run(request: dict[str, Any], program: list[str]) -> None:
    """Run the program like `python PROGRAM`."""
    environment = request["environment"]
    os.environ.clear()
    os.environ.update(environment)
    _show_command(environment, request["argv"])
    if "paceline.environment" in sys.modules:
        sys.modules["paceline.environment"].enter_generation({})  # it starts now
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    as_module = program[0] == "-m"
    sys.argv = program[1:] if as_module else program
    try:
        if as_module:
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            _run_script(os.path.abspath(program[0]))
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in _INTERNAL_FILES:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


def _run_script(path: str) -> None:
    """Run a script. Not by `runpy.run_path`, which sets `sys.argv[0]` to the path."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=builtins)
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


_INTERNAL_FILES = {__file__, runpy.__file__, "<frozen runpy>"}


def _show_command(environment: dict[str, str], command: list[str]) -> None:
    """Show the rank's command and environment in /proc/self/cmdline and environ.

    The kernel reads both from the top of the process's stack. Only the space that the guard
    reserved is overwritten: other code may hold pointers to the rest.
    """
    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        with open("/proc/self/environ", "rb") as file:
            variables = file.read()
        with open("/proc/self/cmdline", "rb") as file:
            space = len(file.read())
    except OSError:
        return
    for name in ("RANK", "PACELINE_GENERATION"):
        offset = (b"\0" + variables).find(f"\0{name}=".encode())
        size = variables.find(b"\0", offset) - offset
        text = f"{name}={environment[name]}".encode()
        if int(fields[_ENVIRONMENT]) and offset >= 0 and len(text) <= size:
            ctypes.memmove(int(fields[_ENVIRONMENT]) + offset, text.ljust(size, b"\0"), size)
    text = b"\0".join(map(os.fsencode, command))
    if int(fields[_ARGUMENTS]) and len(text) < space:
        ctypes.memmove(int(fields[_ARGUMENTS]), text.ljust(space, b"\0"), space)


if __name__ == "__main__":
    main(sys.argv[1:])
