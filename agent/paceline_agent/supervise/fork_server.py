"""The fork server: imports what a job's ranks import, once, and forks ranks that need not.

Run as a file by the job's own interpreter, with the standard library alone, as
`python FLAGS fork_server.py FD MODULE,... PROGRAM`; PROGRAM is `script.py ARGS` or `-m NAME ARGS`.
The guard starts it beside the first ranks of a job that asks for it (`PACELINE_PRELOAD`) and talks
to it over the packet socket FD: it says `ready` once, and answers each request with the pid of a
rank or with an error. A rank is forked twice, so that it is the guard's child like any other, and
begins when the guard, which knows it by then, writes to the pipe that came with the request.

Of its own a rank has all that a fresh interpreter would have, but for what modules drew at random
while they were imported. `ps` and /proc/PID/environ show its command, RANK and PACELINE_GENERATION.
"""

from __future__ import annotations

import builtins
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
_ARGUMENTS, _ENVIRONMENT = 45, 47  # of the fields of proc_pid_stat(5) from the third on


def main(arguments: list[str]) -> None:
    descriptor, modules, *program = arguments
    connection = socket.socket(fileno=int(descriptor))
    if not sys.flags.isolated and not getattr(sys.flags, "safe_path", False):
        sys.path[0] = _own_directory(program)
    try:
        preload(modules.split(","))
    except BaseException as error:
        sys.exit(f"paceline: every rank imports for itself, {modules} cannot be preloaded: "
                 f"{type(error).__name__}: {error}")  # fmt: skip
    connection.send(b'"ready"')
    request = serve(connection)
    if request is not None:
        run(request, program)


def _own_directory(program: list[str]) -> str:
    """That of the modules beside it."""
    return os.getcwd() if program[0] == "-m" else os.path.dirname(os.path.realpath(program[0]))


def preload(modules: list[str]) -> None:
    """Raises what the imports raise, and RuntimeError where a rank could not be forked."""
    for name in modules:
        importlib.import_module(name)
    if threading.active_count() > 1:
        raise RuntimeError("it starts threads, which no fork would have")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise RuntimeError("it sets up CUDA, which no fork could use")
    gc.collect()
    gc.freeze()  # else the first collection of each rank would copy all of it


def serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork ranks until the guard is gone: None. In a rank: the request that it is to fulfil."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, _REQUEST_BYTES, 1)
        if not message:
            return None
        request: dict[str, Any] = json.loads(message)
        readable, writable = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of numpy's threads, which it sees to itself
            between = os.fork()
            is_rank = not between and _fork_again()
        if is_rank:
            os.close(readable)
            connection.close()
            _prepare(request, writable, descriptors[0])
            return request
        os.close(writable)
        os.waitpid(between, 0)
        with open(readable, "rb") as pipe:
            connection.send(pipe.read())
        os.close(descriptors[0])


def _fork_again() -> bool:
    """True in the second process; the first one has ended."""
    pid = -1
    try:
        pid = os.fork()
    finally:
        if pid:
            os._exit(0)
    return True


def _prepare(request: dict[str, Any], told: int, go: int) -> None:
    """Become what the guard makes of a process before it executes it; wait for its word."""
    try:
        os.setsid()
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        if request["directory"]:
            os.chdir(request["directory"])
    except OSError as error:
        os.write(told, json.dumps({"error": str(error)}).encode())
        os._exit(127)
    os.write(told, json.dumps({"pid": os.getpid()}).encode())
    os.close(told)
    if not os.read(go, 1):
        os._exit(127)  # the guard does not know us
    os.close(go)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != request["guard_pid"]:
        os._exit(127)  # it died before the kernel knew our wish
    libc.prctl(_PR_SET_PTRACER, request["agent_pid"], 0, 0, 0)


def run(request: dict[str, Any], program: list[str]) -> None:
    """The program, as `python PROGRAM` runs it."""
    environment = request["environment"]
    os.environ.clear()
    os.environ.update(environment)
    _be_seen_as(environment, request["argv"])
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
        while trace is not None and trace.tb_frame.f_code.co_filename in _NOT_THE_PROGRAMS:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


def _run_script(path: str) -> None:
    """Not by `runpy.run_path`, which makes the path `sys.argv[0]`."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=builtins)
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


_NOT_THE_PROGRAMS = {__file__, runpy.__file__, "<frozen runpy>"}


def _be_seen_as(environment: dict[str, str], command: list[str]) -> None:
    """Write it where the kernel reads /proc/self/environ and cmdline: at the top of our stack.

    Only over what the guard left room for, as others may hold pointers to the rest.
    """
    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        with open("/proc/self/environ", "rb") as file:
            variables = file.read()
        with open("/proc/self/cmdline", "rb") as file:
            room = len(file.read())
    except OSError:
        return
    for name in ("RANK", "PACELINE_GENERATION"):
        at = (b"\0" + variables).find(f"\0{name}=".encode())
        size = variables.find(b"\0", at) - at
        text = f"{name}={environment[name]}".encode()
        if int(fields[_ENVIRONMENT]) and at >= 0 and len(text) <= size:
            ctypes.memmove(int(fields[_ENVIRONMENT]) + at, text.ljust(size, b"\0"), size)
    text = b"\0".join(map(os.fsencode, command))
    if int(fields[_ARGUMENTS]) and len(text) < room:
        ctypes.memmove(int(fields[_ARGUMENTS]), text.ljust(room, b"\0"), room)


if __name__ == "__main__":
    main(sys.argv[1:])
