"""The agent, and the local server, that run beside one command of `paceline watch`.

A process of its own starts them and ends them with the command. It is no child of the command and
has another session, so neither Ctrl-C nor a `wait` of the command reaches it. It reports over its
standard output, a pipe: "ready" once ranks find the agent, or a sentence that says why not.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from paceline_wire.node_directory import RINGS, is_in_use
from paceline_wire.ring import SUFFIX, RingError, RingReader

READY = "ready"
START_SECONDS = 60.0  # for the agent, on a busy machine
STOP_SECONDS = 15.0  # for the agent to send its remaining data, and for the server to store it
POLL_SECONDS = 0.05
RANKS_POLL_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def launch(arguments: Sequence[str], environment: dict[str, str]) -> int:
    """Start this module as a process that is not a child of this one.

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
                command = [sys.executable, "-m", "paceline_cli.companions", *arguments]
                os.execve(sys.executable, command, environment)
        finally:
            os._exit(1)
    os.close(write)
    os.waitpid(child, 0)
    return read


def free_port(wanted: int) -> int:
    """Return `wanted` if that TCP port is free, else any free port.

    Raises OSError if there is none.
    """
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise OSError("no TCP port is free on 127.0.0.1")


def main(pid: int, node_directory: Path, logs: Path, agent: list[str], server: list[str]) -> None:
    """Run the programs until the process `pid` has ended; `server` may be empty.

    Other ranks on this node that began meanwhile are recorded to their end, too.
    """
    watched = os.pidfd_open(pid)
    running = []
    if server:
        running.append(_start(server, logs / "server.log"))
    running.insert(0, _start(agent, logs / "agent.log"))
    try:
        print(_await_agent(running[0], node_directory, logs / "agent.log"), flush=True)
        os.dup2(0, 1)  # the reader's pipe ends: the command does not inherit it
        select.select([watched], [], [])
        while running[0].poll() is None and _has_ranks(node_directory / RINGS):
            time.sleep(RANKS_POLL_SECONDS)
    finally:
        for process in running:
            _stop(process)


def _start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a program that is terminated if this process is killed."""
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
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
    _pid, _node_directory, _logs, *_commands = sys.argv[1:]
    _separator = _commands.index("--")
    main(
        int(_pid),
        Path(_node_directory),
        Path(_logs),
        _commands[:_separator],
        _commands[_separator + 1 :],
    )
