"""The guard: the small process that holds a node's ranks, so that none outlives the agent.

Run as a file with the standard library alone (`python -I -S guard.py FD AGENT_PID GRACE PATH`): it
is up in some tens of milliseconds and has nothing that could break. Three processes watch each
other:

    agent ── sentinel (subreaper) ── guard (subreaper) ── ranks ── their children

- The agent goes (end of file, or its pidfd fires): the guard kills all its descendants and exits,
  unless there is a grace and the agent did not say `end`. Then it keeps the ranks that long for the
  next agent of this node, which finds it at the socket PATH: it is told what runs and what ended
  meanwhile, and is then the agent. Nobody came: all are killed.
- The guard goes: its ranks die by their parent-death signal; the sentinel, to whom their children
  now belong, kills those and exits.
- The sentinel goes: the guard sees that and does as if the agent had gone.
- Both go: the ranks die as above; their children now belong to the agent, which is a subreaper
  too, sweeps them and starts anew.

Messages are lines of JSON over a Unix socket. The agent sends `start`, `preload`, `signal` and
`end`, the guard answers `started`, `failed`, `exited` (at once) and `gone` (nothing of that rank is
left); to an agent that adopts its ranks it says `adopted` first.

Where a job asks for it (`PACELINE_PRELOAD`), the ranks of its later generations are forked by a
process that has imported their modules already: see fork_server.py. Whatever is wrong with that,
they are executed like the first ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER = 0x59616D61
_CREDENTIALS = struct.Struct("iII")  # ucred: pid, uid, gid
_SOCKET_PATH_BYTES = 107  # sockaddr_un
_SWEEP_SECONDS = 0.02  # between two looks at whether the killed are gone

_PRELOAD = "PACELINE_PRELOAD"  # paceline_wire.commands.PRELOAD
_FORK_SERVER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fork_server.py")
_FORK_SECONDS = 2.0  # tens of milliseconds are usual
_IDLE_SECONDS = 900.0  # a fork server without ranks is kept for the next generation
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_FLAGS = re.compile(r"-[bBEIOPsSuv]+|-[WX].+")
_WIDE = "0" * 20  # room for any number
_RANKS_OWN = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
              "PACELINE_GENERATION", "PACELINE_DP", "PACELINE_PP", "PACELINE_TP",
              "PACELINE_GPU_INDEX", "PACELINE_GPU_UUID"}  # fmt: skip

_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Descendants whose parent dies become our children rather than init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signal_number: int) -> None:
    """Have the kernel send us `signal_number` when the thread that forked us ends."""
    _prctl(_PR_SET_PDEATHSIG, signal_number)


def may_be_read_by(pid: int) -> None:
    """Let a process and its descendants read our stacks, where Yama's ptrace_scope is 1.

    It is most distributions' default, and otherwise only lets ancestors do so. Kept across exec.
    """
    with contextlib.suppress(OSError):  # a kernel without Yama asks for nothing
        _prctl(_PR_SET_PTRACER, pid)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


class Process(NamedTuple):
    pid: int
    parent: int
    session: int
    state: str
    started: int  # clock ticks since boot: tells a reused pid from the old one


def read_process(pid: int) -> Process | None:
    """None if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            content = file.read()
    except OSError:
        return None
    fields = content[content.rindex(b")") + 2 :].split()
    return Process(pid, int(fields[1]), int(fields[3]), fields[0].decode(), int(fields[19]))


def everyone() -> list[Process]:
    names = [name for name in os.listdir("/proc") if name.isdigit()]
    return [process for name in names if (process := read_process(int(name)))]


def descendants(root: int) -> list[Process]:
    """Every process below `root`, zombies included."""
    children: dict[int, list[Process]] = {}
    for process in everyone():
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    open_pids = [root]
    while open_pids:
        below = children.pop(open_pids.pop(), [])
        found += below
        open_pids += [process.pid for process in below]
    return found


def send_signal(process: Process, number: int) -> None:
    """Signal exactly this process, not a later one that got its pid."""
    descriptor = open_pidfd(process.pid)
    now = read_process(process.pid)
    if now is not None and now.started == process.started:
        with contextlib.suppress(ProcessLookupError):
            if descriptor is None:
                os.kill(process.pid, number)
            else:
                signal.pidfd_send_signal(descriptor, number)
    if descriptor is not None:
        os.close(descriptor)


def open_pidfd(pid: int) -> int | None:
    """None if it is gone, or where the kernel or this Python cannot."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # some builds of Python leave pidfd_open out
        return None


def carries(pid: int, marks: Collection[bytes]) -> bool:
    """Whether the process was started with all of these `NAME=value` in its environment."""
    if not marks:
        return False
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environment = file.read().split(b"\0")
    except OSError:
        return False
    return all(mark in environment for mark in marks)


def kill_all(root: int) -> None:
    """Kill every descendant of `root` and reap our own, until none is left."""
    while True:
        left = [process for process in descendants(root) if process.state != "Z"]
        for process in left:
            send_signal(process, signal.SIGKILL)
        reap()
        if not left:
            return
        time.sleep(_SWEEP_SECONDS)


def reap() -> list[tuple[int, int]]:
    """(pid, wait status) of every child that has ended."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if not pid:
            return ended
        ended.append((pid, status))


def split_command(command: Sequence[str]) -> tuple[list[str], list[str]] | None:
    """`python -u train.py --lr 1` is `python -u` and `train.py --lr 1`; None: it is no script."""
    if not _PYTHON.fullmatch(os.path.basename(command[0])):
        return None
    at = 1
    while at < len(command) and (command[at] in ("-W", "-X") or _FLAGS.fullmatch(command[at])):
        at += 2 if command[at] in ("-W", "-X") else 1
    program = list(command[at:])
    if not program or program == ["-m"] or (program[0] != "-m" and program[0].startswith("-")):
        return None
    return list(command[:at]), program


class ForkServer:
    """Our end of a fork server: of one job, and of ranks that differ in `_RANKS_OWN` only."""

    def __init__(self, start: dict[str, Any], agent_pid: int) -> None:
        """Raises OSError and ValueError where there can be none."""
        split = split_command(start["argv"])
        if split is None:
            raise ValueError(f"no script of Python's: {start['argv']}")
        python, program = split
        self._common = _common(start)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_FORK_SECONDS)
        self._is_ready = False
        with theirs:
            theirs.set_inheritable(True)
            modules = start["environment"][_PRELOAD]
            argv = [*python, _FORK_SERVER, str(theirs.fileno()), modules, *program]
            environment = start["environment"] | {"RANK": _WIDE, "PACELINE_GENERATION": _WIDE}
            try:
                pid = _spawn({**start, "argv": argv, "environment": environment}, agent_pid)
            except OSError:
                self._socket.close()
                raise
        self._process = read_process(pid)

    def is_for(self, start: dict[str, Any]) -> bool:
        return _common(start) == self._common and self._answers()

    def fork(self, start: dict[str, Any], agent_pid: int) -> int | None:
        """Start a rank: its pid, or None if that is not possible (now)."""
        if not self.is_for(start) or not self._is_ready:
            return None
        about = {name: start[name] for name in ("argv", "environment", "directory", "log")}
        request = json.dumps({**about, "agent_pid": agent_pid, "guard_pid": os.getpid()})
        readable, writable = os.pipe()
        try:
            socket.send_fds(self._socket, [request.encode()], [readable])
            pid: int = json.loads(self._socket.recv(1 << 16))["pid"]
            os.write(writable, b"!")  # until now it has not begun, and otherwise never will
        except (OSError, ValueError, KeyError, TypeError):
            self.close()
            return None
        finally:
            os.close(readable)
            os.close(writable)
        return pid

    def close(self) -> None:
        self._socket.close()
        if self._process is not None:
            send_signal(self._process, signal.SIGKILL)

    def _answers(self) -> bool:
        """Not after it could not import, nor after its end."""
        try:
            if not select.select([self._socket], [], [], 0)[0]:
                return True
            self._is_ready = bool(self._socket.recv(1 << 16))
        except (OSError, ValueError):  # closed
            return False
        return self._is_ready


def _common(start: dict[str, Any]) -> dict[str, Any]:
    """What one rank's start has in common with that of the others, and of later generations."""
    environment = start["environment"].items()
    return {
        "argv": start["argv"],
        "directory": start["directory"],
        "environment": {name: value for name, value in environment if name not in _RANKS_OWN},
    }


class Guard:
    """Starts ranks, tells of their ends, and cleans up after each."""

    def __init__(self, agent: socket.socket, agent_pid: int) -> None:
        self._agent: socket.socket | None = agent
        self._agent_pid = agent_pid
        self.told_to_end = False
        self._untold: list[dict[str, Any]] = []  # while there is no agent
        self._gone_untold: list[tuple[int, dict[str, Any]]] = []
        self._running: dict[int, dict[str, Any]] = {}  # pid -> the start message
        self._ended: dict[int, dict[str, Any]] = {}  # children of these may still be alive
        self._sweeps = 0
        self._forks: ForkServer | None = None
        self._forks_of: list[Any] = []  # job and generation that it was last looked at for
        self._busy_at = 0.0  # when there last was a rank

    @property
    def patience_milliseconds(self) -> float | None:
        """Until the next look at whether the killed are gone; None: nothing to look for.

        Longer each time: a process in an uninterruptible wait may take its time.
        """
        if self._ended:
            return min(500.0, 20.0 * 2.0**self._sweeps)
        return None if self._running or self._forks is None else _IDLE_SECONDS * 1000

    @property
    def holds_any(self) -> bool:
        return bool(self._running or self._ended)

    def detach(self) -> None:
        """The agent is gone; keep what there is to tell for the next."""
        self._agent = None

    def attach(self, agent: socket.socket, agent_pid: int) -> None:
        """Hand all ranks, and what became of them meanwhile, to another agent."""
        self._agent, self._agent_pid = agent, agent_pid
        held = [*self._running.items(), *self._ended.items(), *self._gone_untold]
        ranks = [
            {"pid": pid, **{name: start[name] for name in ("key", "marks", "log")}}
            for pid, start in held
        ]
        self._tell(event="adopted", session=os.getsid(0), ranks=ranks)
        untold, self._untold, self._gone_untold = self._untold, [], []
        for message in untold:
            self._tell(**message)

    def handle(self, line: bytes) -> None:
        message = json.loads(line)
        self.told_to_end |= message["do"] == "end"
        if message["do"] == "start":
            self._start(message)
        elif message["do"] == "preload":
            self._preload(message)
        elif message["do"] == "signal":
            for table in (self._running, self._ended):
                for pid, start in table.items():
                    if start["key"] == message["key"]:
                        self._signal(pid, start, message["signal"])

    def tend(self) -> None:
        """Tell of the ranks that ended, and kill what they left behind."""
        for pid, status in reap():
            start = self._running.pop(pid, None)
            if start is None:
                continue  # a grandchild that had come to us
            self._ended[pid] = start
            killed = os.WIFSIGNALED(status)
            self._tell(
                event="exited",
                key=start["key"],
                pid=pid,
                exit_code=None if killed else os.waitstatus_to_exitcode(status),
                signal=os.WTERMSIG(status) if killed else None,
            )
        self._sweeps = self._sweeps + 1 if self._ended else 0
        for pid, start in list(self._ended.items()):
            if not self._signal(pid, start, signal.SIGKILL):
                del self._ended[pid]
                if self._agent is None:
                    self._gone_untold.append((pid, start))
                self._tell(event="gone", key=start["key"], pid=pid)
        if self.holds_any:
            self._busy_at = time.monotonic()
        elif self._forks is not None and time.monotonic() - self._busy_at >= _IDLE_SECONDS:
            self._forks.close()
            self._forks = None

    def _signal(self, rank_pid: int, start: dict[str, Any], number: int) -> int:
        """Signal a rank and all that came from it; how many there were."""
        marks = [mark.encode("utf-8", "surrogateescape") for mark in start["marks"]]
        processes = descendants(os.getpid())
        family = {rank_pid}
        reached = 0
        for process in processes:  # parents come before their children
            if process.parent in family:
                family.add(process.pid)
            if process.state == "Z":
                continue
            theirs = process.pid in family or process.session == rank_pid
            if theirs or carries(process.pid, marks):
                send_signal(process, number)
                reached += 1
        return reached

    def _start(self, message: dict[str, Any]) -> None:
        try:
            forked = self._forks and self._forks.fork(message, self._agent_pid)
            pid = forked or _spawn(message, self._agent_pid)
        except OSError as error:
            self._tell(event="failed", key=message["key"], error=str(error))
            return
        self._running[pid] = message
        self._tell(event="started", key=message["key"], pid=pid)
        self._preload(message)

    def _preload(self, start: dict[str, Any]) -> None:
        """Have a fork server for the generations after this one, if the job wants one."""
        if start["key"][:2] == self._forks_of:
            return
        self._forks_of = start["key"][:2]
        self._busy_at = time.monotonic()
        if self._forks is not None and not self._forks.is_for(start):
            self._forks.close()
            self._forks = None
        if self._forks is None and start["environment"].get(_PRELOAD):
            with contextlib.suppress(OSError, ValueError):
                self._forks = ForkServer(start, self._agent_pid)

    def _tell(self, **message: Any) -> None:
        if self._agent is None:
            self._untold.append(message)
            return
        with contextlib.suppress(OSError):  # the agent is gone: the loop sees it too
            self._agent.sendall(json.dumps(message).encode() + b"\n")


def _spawn(message: dict[str, Any], agent_pid: int) -> int:
    """Fork and execute. Raises OSError if the program could not be executed."""
    guard = os.getpid()
    readable, writable = os.pipe()  # closed by a successful exec
    pid = os.fork()
    if not pid:
        try:
            may_be_read_by(agent_pid)
            _become_rank(message, guard)
        except BaseException as error:
            code = error.errno if isinstance(error, OSError) else None
            os.write(writable, json.dumps([code, f"{error}"]).encode())
        finally:
            os._exit(127)
    os.close(writable)
    with open(readable, "rb") as pipe:
        failure = pipe.read()
    if failure:
        os.waitpid(pid, 0)
        code, text = json.loads(failure)
        raise OSError(code or 0, text)
    return pid


def _become_rank(message: dict[str, Any], guard: int) -> NoReturn:
    os.setsid()
    die_with_parent(signal.SIGKILL)
    if os.getppid() != guard:
        os._exit(127)  # the guard died before the kernel knew our wish
    for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGINT, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    log = os.open(message["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if message["directory"]:
        os.chdir(message["directory"])
    os.execvpe(message["argv"][0], message["argv"], message["environment"])


def _serve(agent: socket.socket, agent_pid: int, grace_seconds: float, path: str) -> None:
    """Until the agent is gone for good, or the sentinel; then kill everything below us."""
    become_subreaper()
    wake_reader, wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    poll = select.poll()
    poll.register(wake_reader, select.POLLIN)
    sentinel = _watch(os.getppid(), poll)
    listener = _listen(path) if grace_seconds > 0 else None
    guard = Guard(agent, agent_pid)
    while True:
        sentinel_is_gone = _attend(guard, agent, agent_pid, poll, wake_reader, sentinel)
        if sentinel_is_gone or guard.told_to_end or listener is None:
            break
        agent.close()
        guard.detach()
        adopted = _await_agent(guard, listener, poll, wake_reader, sentinel, grace_seconds)
        if adopted is None:
            break
        agent, agent_pid = adopted
        guard.attach(agent, agent_pid)
    kill_all(os.getpid())


def _attend(
    guard: Guard,
    agent: socket.socket,
    agent_pid: int,
    poll: select.poll,
    wake_reader: int,
    sentinel: int | None,
) -> bool:
    """Do what the agent says until it is gone; True if it is the sentinel that is."""
    poll.register(agent.fileno(), select.POLLIN)
    agent_end = _watch(agent_pid, poll)
    pending = b""
    try:
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(guard.patience_milliseconds)}
            if wake_reader in ready:
                os.read(wake_reader, 4096)
            if agent.fileno() in ready:
                received = _receive(agent)
                if not received:
                    return sentinel in ready
                *lines, pending = (pending + received).split(b"\n")
                for line in lines:
                    guard.handle(line)
            guard.tend()
            if sentinel in ready:
                return True
            if agent_end in ready:
                return False
    finally:
        poll.unregister(agent.fileno())
        if agent_end is not None:
            poll.unregister(agent_end)
            os.close(agent_end)


def _await_agent(
    guard: Guard,
    listener: socket.socket,
    poll: select.poll,
    wake_reader: int,
    sentinel: int | None,
    grace_seconds: float,
) -> tuple[socket.socket, int] | None:
    """The next agent and its pid; None if there is nothing to hand over or nobody came."""
    deadline = time.monotonic() + grace_seconds
    poll.register(listener.fileno(), select.POLLIN)
    try:
        while guard.holds_any and (left_seconds := deadline - time.monotonic()) > 0:
            patience = guard.patience_milliseconds
            left = left_seconds * 1000
            ready = {
                each for each, _ in poll.poll(left if patience is None else min(patience, left))
            }
            if wake_reader in ready:
                os.read(wake_reader, 4096)
            guard.tend()
            if sentinel in ready:
                return None
            if listener.fileno() in ready and (adopted := _accept(listener)):
                return adopted
    finally:
        poll.unregister(listener.fileno())
    return None


def _listen(path: str) -> socket.socket | None:
    """None where it cannot be: then the ranks end with the agent."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        listener.bind(_short(path))
        os.chmod(path, 0o600)
        listener.listen(1)
        listener.settimeout(1.0)
    except OSError:
        listener.close()
        return None
    return listener


def _accept(listener: socket.socket) -> tuple[socket.socket, int] | None:
    """Whoever connects, if it is a process of our own user."""
    try:
        agent, _ = listener.accept()
    except OSError:
        return None
    agent.settimeout(None)
    credentials = agent.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.getuid():
        agent.close()
        return None
    return agent, pid


def adopt(path: str) -> socket.socket | None:
    """Connect to a guard that an earlier agent left, if there is one."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(_short(path))
    except OSError:
        connection.close()
        return None
    return connection


def _short(path: str) -> str:
    """The address of a Unix socket holds 107 bytes, a path may hold more."""
    if len(os.fsencode(path)) <= _SOCKET_PATH_BYTES:
        return path
    directory = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY)  # open for good
    return f"/proc/self/fd/{directory}/{os.path.basename(path)}"


def _receive(agent: socket.socket) -> bytes:
    try:
        return agent.recv(1 << 16)
    except OSError:
        return b""


def _watch(pid: int, poll: select.poll) -> int | None:
    """Notice another's end. The socket alone would tell the agent's only once nobody holds it."""
    descriptor = open_pidfd(pid)
    if descriptor is not None:
        poll.register(descriptor, select.POLLIN)
    return descriptor


def main(arguments: list[str]) -> None:
    descriptor, agent_pid = int(arguments[0]), int(arguments[1])
    grace_seconds, path = float(arguments[2]), arguments[3]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the agent's to handle
    os.set_inheritable(descriptor, False)
    sentinel = os.getpid()
    become_subreaper()
    guard = os.fork()
    if not guard:
        if os.getppid() == sentinel:
            _serve(socket.socket(fileno=descriptor), agent_pid, grace_seconds, path)
        os._exit(0)
    os.close(descriptor)
    while guard not in [pid for pid, _ in reap()]:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
    kill_all(sentinel)


if __name__ == "__main__":
    main(sys.argv[1:])
