"""The agent, and the local server, that run beside the commands of `paceline watch`.

A process of its own starts them for the first command and ends them some seconds after the last
one, when the server has found out why its ranks ended. It is no child of a command and has another
session, so neither Ctrl-C nor a `wait` of a command reaches it. It reports over its standard
output, a pipe: "ready" once ranks find the agent, or a sentence that says why not.

Each command is registered as a file in a directory of the node, below the user's state, which also
has the agent's spool and the logs. The lock of that directory is held while commands are registered
and while the agent ends, so that no command relies on an agent that is about to end.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from paceline_cli.watch_directory import WANTED
from paceline_wire.node_directory import RINGS, is_in_use
from paceline_wire.ring import SUFFIX, RingError, RingReader

READY = "ready"
START_SECONDS = 60.0  # for the agent, on a busy machine
STOP_SECONDS = 15.0  # for the agent to send its remaining data, and for the server to store it
POLL_SECONDS = 0.05
END_POLL_SECONDS = 0.5
RESULT_SECONDS = 5.0  # between two queries of the local server, if no command waits for them
LINGER_SECONDS = 10.0  # the server waits up to 8 s for what explains the end of a job
# ... and longer if it is behind: beside steps of some milliseconds it may lack CPUs.
BEHIND_SECONDS = 60.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def launch(arguments: Sequence[str], environment: dict[str, str], listener: int = 0) -> int:
    """Start this module as a process that is not a child of this one.

    Args:
        listener: file descriptor that it inherits; 0: none.

    Returns:
        The reading end of its standard output.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            if os.fork() == 0:
                nothing = os.open(os.devnull, os.O_RDWR)
                for descriptor, standard in ((nothing, 0), (write, 1), (nothing, 2)):
                    os.dup2(descriptor, standard)
                for name in os.listdir("/proc/self/fd"):  # a lock or a pipe ends with the command
                    with contextlib.suppress(OSError):
                        os.set_inheritable(int(name), int(name) in (0, 1, 2, listener))
                command = [sys.executable, "-P", "-m", "paceline_cli.companions", *arguments]
                os.execve(sys.executable, command, environment)
        finally:
            os._exit(1)
    os.close(write)
    os.waitpid(child, 0)
    return read


def listen(wanted: int) -> socket.socket:
    """Return a socket that listens on `wanted` if that TCP port is free, else on any free port.

    From now on no other program can take the port: a server that starts later inherits the socket.

    Raises:
        OSError: no TCP port is free.
    """
    for port in (wanted, 0):
        with contextlib.suppress(OSError):
            return socket.create_server(("127.0.0.1", port))
    raise OSError("no TCP port is free on 127.0.0.1")


def free_port(wanted: int) -> int:
    """Return `wanted` if that TCP port is free, else any free port. Raises OSError as `listen`."""
    with listen(wanted) as probe:
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the lock of the node's directory."""
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def register(directory: Path, pid: int) -> None:
    """Have the agent run until this process has ended."""
    commands = directory / "commands"
    commands.mkdir(mode=0o700, exist_ok=True)
    (commands / str(pid)).write_text(_started(pid), encoding="ascii")


def _has_commands(directory: Path) -> bool:
    """Return whether a registered process is alive; forget the others."""
    for path in (directory / "commands").glob("*"):
        started = _started(int(path.name))
        if started and path.read_text(encoding="ascii") == started:
            return True
        path.unlink()
    return False


def _started(pid: int) -> str:
    """Return the start time of a process in clock ticks since boot; empty if it does not run."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    state, *fields = stat[stat.rindex(")") + 2 :].split()
    return "" if state in "ZX" else fields[18]


def main(
    node_directory: Path,
    logs: Path,
    address: str,
    listener: int,
    agent: list[str],
    server: list[str],
) -> None:
    """Run the programs until LINGER_SECONDS after all commands and all ranks on this node have
    ended; up to BEHIND_SECONDS if the server has not found out about the end of each job.

    Args:
        node_directory: of the agent.
        logs: the node's directory, as in `locked`.
        address: of the server that the agent sends to.
        listener: file descriptor of the socket that `server` listens on.
        agent: command of the agent.
        server: command of the server; may be empty.
    """
    keep_result = _keeper(logs, address) if server else _nothing
    running = []
    if server:
        running.append(_start(server, logs / "server.log", listener))
        os.close(listener)  # if the server ends, nobody listens
    running.insert(0, _start(agent, logs / "agent.log"))
    try:
        print(_await_agent(running[0], node_directory, logs / "agent.log"), flush=True)
        os.dup2(0, 1)  # the reader's pipe ends: the command does not inherit it
        used, kept, wanted = time.monotonic(), -RESULT_SECONDS, logs / WANTED
        is_behind = False
        while True:
            time.sleep(END_POLL_SECONDS)
            if time.monotonic() - kept >= RESULT_SECONDS or wanted.exists():
                wanted.unlink(missing_ok=True)
                is_behind = not keep_result() and running[-1].poll() is None
                kept = time.monotonic()
            with locked(logs):
                if _has_commands(logs) or _has_ranks(node_directory / RINGS):
                    used = time.monotonic()
                linger = BEHIND_SECONDS if is_behind else LINGER_SECONDS
                if running[0].poll() is None and time.monotonic() - used < linger:
                    continue
                _stop(running[0])
                keep_result()
                for process in running:
                    _stop(process)
                return
    finally:
        for process in running:
            _stop(process)


def _keeper(logs: Path, address: str) -> Callable[[], bool]:
    """Return a function that stores the result of the trainings that the server shows.

    It returns whether all of them have ended.
    """
    from paceline_cli import watched  # noqa: PLC0415 - its imports take memory; only with a server

    return partial(watched.write, logs, address, datetime.now(UTC))


def _nothing() -> bool:
    """Store no result: another server keeps its own."""
    return True


def _start(command: list[str], log: Path, *inherited: int) -> subprocess.Popen[bytes]:
    """Start a program that is terminated if this process is killed.

    `inherited`: file descriptors that it has too.
    """
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=inherited,
            preexec_fn=lambda: _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )


def _await_agent(agent: subprocess.Popen[bytes], node_directory: Path, log: Path) -> str:
    """Return READY once ranks can find the agent, or the last line of its log if it has ended."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if agent.poll() is not None:
            lines = log.read_text(errors="replace").strip().splitlines()
            return lines[-1] if lines else f"the agent ended with status {agent.returncode}"
        if is_in_use(node_directory) and (node_directory / RINGS).is_dir():
            return READY
        time.sleep(POLL_SECONDS)
    return f"the agent did not start within {START_SECONDS:.0f} s; see {log}"


def _has_ranks(rings: Path) -> bool:
    """Return whether a process that writes one of the rings is alive."""
    for path in rings.glob(f"*{SUFFIX}"):
        try:
            reader = RingReader(path)
        except RingError:
            continue
        pid = reader.identity.pid
        reader.close()
        if Path(f"/proc/{pid}").exists():
            return True
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


if __name__ == "__main__":
    _node_directory, _logs, _address, _listener, *_commands = sys.argv[1:]
    _separator = _commands.index("--")
    main(
        Path(_node_directory),
        Path(_logs),
        _address,
        int(_listener),
        _commands[:_separator],
        _commands[_separator + 1 :],
    )
