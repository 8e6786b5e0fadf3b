"""The fork server: imports the modules of a job's ranks once, then forks ranks that have them.

The job's interpreter runs it as a file, with only the standard library, as
`python FLAGS fork_server.py FD MODULE,... PROGRAM`; PROGRAM is `script.py ARGS` or `-m NAME ARGS`.
The guard starts it beside the first ranks of a job that sets `PACELINE_PRELOAD` and talks to it
over the packet socket FD: it sends `ready` once, and answers each request with the pid of a rank or
an error. A rank is forked twice, so that it becomes a child of the guard like any other. It starts
when the guard, which knows its pid by then, writes to the pipe that came with the request.

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
# Imported by optimizers and DDP, and by `paceline.Checkpoints`, only when these are used.
_IMPORTED_LATER = ("torch._dynamo", "paceline.checkpoints.checkpoints")
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
            with contextlib.suppress(ImportError):
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
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, _REQUEST_BYTES, 2)
        if not message:
            return None
        request: dict[str, Any] = json.loads(message)
        readable, writable = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about numpy's threads; numpy handles a fork itself
            between = os.fork()
            is_rank = not between and _fork_again()
        if is_rank:
            os.close(readable)
            connection.close()
            go, log = descriptors
            _prepare(request, writable, go, log)
            return request
        os.close(writable)
        os.waitpid(between, 0)
        with open(readable, "rb") as pipe:
            connection.send(pipe.read())
        for descriptor in descriptors:
            os.close(descriptor)


def _fork_again() -> bool:
    """Fork and end the parent. Return True in the new process."""
    pid = -1
    try:
        pid = os.fork()
    finally:
        if pid:
            os._exit(0)
    return True


def _prepare(request: dict[str, Any], reply: int, go: int, log: int) -> None:
    """Set up this process as the guard does for a rank that it executes; wait for its start.

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
        os.write(reply, json.dumps({"error": str(error)}).encode())
        os._exit(127)
    os.write(reply, json.dumps({"pid": os.getpid()}).encode())
    os.close(reply)
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
