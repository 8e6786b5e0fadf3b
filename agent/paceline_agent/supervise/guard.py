"""The guard: a small process that is the parent of a node's ranks, so that no rank is orphaned.

It runs as a file with only the standard library (`python -I -S guard.py FD AGENT_PID GRACE PATH`),
so it starts within tens of milliseconds and depends on nothing that could break. Three processes
watch each other:

    agent ── sentinel (subreaper) ── guard (subreaper) ── ranks ── their children

- The agent ends (end of file, or its pidfd fires): the guard kills all its descendants and exits.
  With a grace period, and unless the agent sent `end`, it keeps the ranks that long for the next
  agent of this node. That agent connects to the socket PATH, receives what runs and what ended
  meanwhile, and takes over. If none connects in time, all ranks are killed.
- The guard ends: its ranks die by their parent-death signal. Their children become the sentinel's,
  which kills them and exits.
- The sentinel ends: the guard detects that and acts as if the agent had ended.
- Both end: the ranks die as above. Their children become the agent's, which is a subreaper too,
  kills them and starts a new guard.

Messages are lines of JSON over a Unix socket. The agent sends `start`, `preload`, `signal`,
`rename` (a rank has become one of the next generation) and `end`. The guard sends `started`,
`failed`, `exited` (at once) and `gone` (no process of that rank is left); to an agent that adopts
its ranks it sends `adopted` first.

If a job sets `PACELINE_PRELOAD`, the ranks of its later generations are forked by a process that
has already imported their modules: see fork_server.py. If that fails, they are executed like the
first ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, NoReturn

_PR_SET_PDEATHSIG = 1
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_PR_SET_PTRACER = 0x59616D61
_CAPABILITY_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3: two sets of three 32-bit words
_CAPABILITIES = 64  # more than any kernel has
_CREDENTIALS = struct.Struct("iII")  # ucred: pid, uid, gid
_SOCKET_PATH_BYTES = 107  # sockaddr_un
_SWEEP_SECONDS = 0.02  # between two checks whether processes are gone, or still runnable

_OOM_SCORE = "/proc/self/oom_score_adj"
_PRELOAD = "PACELINE_PRELOAD"  # paceline_wire.commands.PRELOAD
_FORK_SERVER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fork_server.py")
_FORK_SECONDS = 2.0  # tens of milliseconds are usual
_EXEC_SECONDS = 1.0  # tens of milliseconds are usual, unless a file system is stuck
STARVED_SECONDS = 2.0  # how much longer a process may wait for a CPU before it executes
_IDLE_SECONDS = 900.0  # how long a fork server without ranks is kept for the next generation
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_FLAGS = re.compile(r"-[bBEIOPsSuv]+|-[WX].+")
_WIDE = "0" * 20  # reserves space for a number of any length
_PER_RANK = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
              "PACELINE_GENERATION", "PACELINE_DP", "PACELINE_PP", "PACELINE_TP",
              "PACELINE_CP", "PACELINE_EP", "PACELINE_GPU_INDEX", "PACELINE_GPU_UUID",
              "PACELINE_SAVED_STEP"}  # fmt: skip

_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Make descendants whose parent dies children of this process instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signal_number: int) -> None:
    """Have the kernel send this process a signal when the thread that forked it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal_number)


def allow_tracing_by(pid: int) -> None:
    """Let a process and its descendants read this one's stacks where Yama's ptrace_scope is 1.

    That is the default of most distributions, and otherwise allows only ancestors. It persists
    across exec.
    """
    with contextlib.suppress(OSError):  # a kernel without Yama needs no permission
        _prctl(_PR_SET_PTRACER, pid)


def become_user(user: Sequence[Any] | None) -> None:
    """Become `[uid, gid, groups]` for good (None: stay the same user), without any capability.

    `no_new_privs` holds for all later programs: no set-user-ID file, no file capability and, for
    root, no execve gives back what is dropped here. So it does no harm if the bounding set cannot
    be emptied, which needs CAP_SETPCAP.
    """
    for capability in range(_CAPABILITIES):
        with contextlib.suppress(OSError):  # not permitted, or unknown to this kernel
            _prctl(_PR_CAPBSET_DROP, capability)
    if user is not None:
        uid, gid, groups = user
        os.setgroups(groups)
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    with contextlib.suppress(OSError):  # a kernel before 4.3 has no ambient capabilities
        _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    if _libc.capset(struct.pack("Ii", _CAPABILITY_VERSION, 0), bytes(24)):
        code = ctypes.get_errno()
        raise OSError(code, f"capset: {os.strerror(code)}")


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


class Process(NamedTuple):
    """A process as /proc/PID/stat shows it."""

    pid: int
    parent: int
    session: int
    state: str
    started: int  # clock ticks since boot: distinguishes reuses of a pid


def read_process(pid: int) -> Process | None:
    """Return a process; None if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            content = file.read()
    except OSError:
        return None
    fields = content[content.rindex(b")") + 2 :].split()
    return Process(pid, int(fields[1]), int(fields[3]), fields[0].decode(), int(fields[19]))


def all_processes() -> list[Process]:
    """Return every process.

    Also those that begin while the others are read: such a process is missing in the first list,
    and its parent, which may have ended by then, in the result.
    """
    found: dict[str, Process | None] = {}
    for _ in range(2):
        new = [name for name in os.listdir("/proc") if name.isdigit() and name not in found]
        found |= {name: read_process(int(name)) for name in new}
    return [process for process in found.values() if process is not None]


def descendants(root: int) -> list[Process]:
    """Return every process below `root`, zombies included; parents before their children."""
    children: dict[int, list[Process]] = {}
    for process in all_processes():
        children.setdefault(process.parent, []).append(process)
    result: list[Process] = []
    open_pids = [root]
    while open_pids:
        below = children.pop(open_pids.pop(), [])
        result += below
        open_pids += [process.pid for process in below]
    return result


def send_signal(process: Process, number: int) -> None:
    """Signal exactly this process, not a later one with the same pid."""
    descriptor = open_pidfd(process.pid)
    current = read_process(process.pid)
    if current is not None and current.started == process.started:
        with contextlib.suppress(ProcessLookupError):
            if descriptor is None:
                os.kill(process.pid, number)
            else:
                signal.pidfd_send_signal(descriptor, number)
    if descriptor is not None:
        os.close(descriptor)


def open_pidfd(pid: int) -> int | None:
    """Return a pidfd; None if the process is gone, or kernel or Python do not support it."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # some builds of Python have no pidfd_open
        return None


def has_marks(pid: int, marks: Collection[bytes]) -> bool:
    """Return whether the process was started with all of these `NAME=value` variables."""
    if not marks:
        return False
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environment = file.read().split(b"\0")
    except OSError:
        return False
    return all(mark in environment for mark in marks)


def kill_all(root: int) -> None:
    """Kill every descendant of `root` and reap own children, until none is left."""
    while True:
        alive = [process for process in descendants(root) if process.state != "Z"]
        for process in alive:
            send_signal(process, signal.SIGKILL)
        reap()
        if not alive:
            return
        time.sleep(_SWEEP_SECONDS)


def reap() -> list[tuple[int, int]]:
    """Reap every child that has ended. Return (pid, wait status) of each."""
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
    """Split a command into interpreter and program; None if it runs no Python script or module.

    `python -u train.py --lr 1` becomes `python -u` and `train.py --lr 1`.
    """
    if not _PYTHON.fullmatch(os.path.basename(command[0])):
        return None
    index = 1
    while index < len(command) and (
        command[index] in ("-W", "-X") or _FLAGS.fullmatch(command[index])
    ):
        index += 2 if command[index] in ("-W", "-X") else 1
    program = list(command[index:])
    if not program or program == ["-m"] or (program[0] != "-m" and program[0].startswith("-")):
        return None
    return list(command[:index]), program


class ForkServer:
    """The guard's end of a fork server, for ranks of one job that differ only in `_PER_RANK`."""

    def __init__(self, start: dict[str, Any], agent_pid: int) -> None:
        """Start it. Raises OSError, and ValueError if the command is not a Python script."""
        split = split_command(start["argv"])
        if split is None:
            raise ValueError(f"not a Python script: {start['argv']}")
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

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def is_for(self, start: dict[str, Any]) -> bool:
        """Return whether the fork server runs and can fork this rank."""
        return _common(start) == self._common and self._is_running()

    def fork(
        self, start: dict[str, Any], agent_pid: int, taken: Collection[int] = ()
    ) -> int | None:
        """Start a rank. Return its pid, or None if that is not possible at present.

        The fork server runs code of the job, so its answer is checked: `taken` are the pids that
        belong to other ranks.
        """
        if not self.is_for(start) or not self._is_ready:
            return None
        fields = {name: start[name] for name in ("argv", "environment", "directory")}
        request = json.dumps({**fields, "agent_pid": agent_pid, "guard_pid": os.getpid()})
        log = _open_log(start["log"])
        readable, writable = os.pipe()
        try:
            socket.send_fds(self._socket, [request.encode()], [readable, log])
            pid = json.loads(self._socket.recv(1 << 16))["pid"]
            process = read_process(pid) if type(pid) is int else None  # no path such as 1/task/1
            if process is None or process.parent != os.getpid() or pid in taken:
                raise ValueError(f"process {pid} is not a new rank")
            os.write(writable, b"!")  # only now does the rank start
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            self.close()
            return None
        finally:
            os.close(log)
            os.close(readable)
            os.close(writable)
        return process.pid

    def close(self) -> None:
        """End the fork server; its ranks continue."""
        self._socket.close()
        if self._process is not None:
            send_signal(self._process, signal.SIGKILL)

    def _is_running(self) -> bool:
        """Return False after a failed import and after its end."""
        try:
            if not select.select([self._socket], [], [], 0)[0]:
                return True
            self._is_ready = bool(self._socket.recv(1 << 16))
        except (OSError, ValueError):  # closed
            return False
        return self._is_ready


def _common(start: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a start message that all ranks and later generations share."""
    environment = start["environment"].items()
    return {
        "argv": start["argv"],
        "directory": start["directory"],
        "user": start.get("user"),
        "environment": {name: value for name, value in environment if name not in _PER_RANK},
    }


class Guard:
    """Starts ranks, reports their ends to the agent, and kills what each leaves behind."""

    def __init__(self, agent: socket.socket, agent_pid: int) -> None:
        self._agent: socket.socket | None = agent
        self._agent_pid = agent_pid
        self.is_ending = False
        self._unsent: list[dict[str, Any]] = []  # messages kept while there is no agent
        self._unsent_gone: list[tuple[int, dict[str, Any]]] = []  # (pid, start message)
        self._running: dict[int, dict[str, Any]] = {}  # start message by pid
        self._ended: dict[int, dict[str, Any]] = {}  # ended ranks whose children may still be alive
        self._sweeps = 0
        self._fork_server: ForkServer | None = None
        self._fork_server_key: list[Any] = []  # job and generation that it was last checked for
        self._busy_at = 0.0  # when it last had a rank

    @property
    def timeout_milliseconds(self) -> float | None:
        """The time until the next check whether killed processes are gone; None: no check.

        It doubles each time, because a process in an uninterruptible wait may take long.
        """
        if self._ended:
            return min(500.0, 20.0 * 2.0**self._sweeps)
        return None if self._running or self._fork_server is None else _IDLE_SECONDS * 1000

    @property
    def has_ranks(self) -> bool:
        """Return whether processes of a rank may be left."""
        return bool(self._running or self._ended)

    def detach(self) -> None:
        """Keep messages for the next agent: this one is gone."""
        self._agent = None

    def attach(self, agent: socket.socket, agent_pid: int) -> None:
        """Hand all ranks over to another agent, with what happened to them meanwhile."""
        self._agent, self._agent_pid = agent, agent_pid
        held = [*self._running.items(), *self._ended.items(), *self._unsent_gone]
        ranks = [
            {"pid": pid, **{name: start.get(name) for name in ("key", "marks", "log", "user")}}
            for pid, start in held
        ]
        self._send(event="adopted", session=os.getsid(0), ranks=ranks)
        unsent, self._unsent, self._unsent_gone = self._unsent, [], []
        for message in unsent:
            self._send(**message)

    def handle(self, line: bytes) -> None:
        """Execute a message of the agent."""
        message = json.loads(line)
        self.is_ending |= message["do"] == "end"
        if message["do"] == "start":
            self._start(message)
        elif message["do"] == "preload":
            self._preload(message)
        elif message["do"] == "rename":
            self._rename(message["key"], message["new"])
        elif message["do"] == "signal":
            for table in (self._running, self._ended):
                for pid, start in table.items():
                    if start["key"] == message["key"]:
                        self._signal(pid, start, message["signal"])

    def check_ranks(self) -> None:
        """Report the ranks that ended, and kill what they left behind."""
        for pid, status in reap():
            start = self._running.pop(pid, None)
            if start is None:
                continue  # a grandchild whose parent died
            self._ended[pid] = start
            killed = os.WIFSIGNALED(status)
            self._send(
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
                    self._unsent_gone.append((pid, start))
                self._send(event="gone", key=start["key"], pid=pid)
        if self.has_ranks:
            self._busy_at = time.monotonic()
        elif self._fork_server is not None and time.monotonic() - self._busy_at >= _IDLE_SECONDS:
            self._fork_server.close()
            self._fork_server = None
            self._fork_server_key = []  # a later command starts it again

    def _signal(self, rank_pid: int, start: dict[str, Any], number: int) -> int:
        """Signal a rank and all processes that it started. Return their number.

        A process that left its session and its parent, and emptied its environment cannot be
        attributed to a rank. It is included once no rank is running.
        """
        marks = [mark.encode("utf-8", "surrogateescape") for mark in start["marks"]]
        processes = descendants(os.getpid())
        family = {rank_pid}
        if not self._running:
            family.add(os.getpid())
        reached = 0
        for process in processes:  # parents come before their children
            if process.parent in family and process.pid != self._fork_server_pid:
                family.add(process.pid)
            if process.state == "Z":
                continue
            is_family = process.pid in family or process.session == rank_pid
            if is_family or has_marks(process.pid, marks):
                send_signal(process, number)
                reached += 1
        return reached

    @property
    def _fork_server_pid(self) -> int | None:
        return None if self._fork_server is None else self._fork_server.pid

    def _start(self, message: dict[str, Any]) -> None:
        try:
            taken = {*self._running, *self._ended}
            forked = self._fork_server and self._fork_server.fork(message, self._agent_pid, taken)
            pid = forked or _spawn(message, self._agent_pid)
        except OSError as error:
            self._send(event="failed", key=message["key"], error=str(error))
            return
        self._running[pid] = message
        self._send(event="started", key=message["key"], pid=pid)
        self._preload(message)

    def _rename(self, key: list[Any], new: list[Any]) -> None:
        """Give a running rank another key; report its end under that one if it has ended."""
        for pid, start in self._running.items():
            if start["key"] == key:
                self._running[pid] = {**start, "key": new}
                return
        self._send(event="exited", key=new, pid=None, exit_code=None, signal=int(signal.SIGKILL))
        self._send(event="gone", key=new, pid=None)

    def _preload(self, start: dict[str, Any]) -> None:
        """Start a fork server for the next generations, if the job asks for one."""
        self._busy_at = time.monotonic()
        if start["key"][:2] == self._fork_server_key:
            return
        self._fork_server_key = start["key"][:2]
        if self._fork_server is not None and not self._fork_server.is_for(start):
            self._fork_server.close()
            self._fork_server = None
        if self._fork_server is None and start["environment"].get(_PRELOAD):
            with contextlib.suppress(OSError, ValueError):
                self._fork_server = ForkServer(start, self._agent_pid)

    def _send(self, **message: Any) -> None:
        if self._agent is None:
            self._unsent.append(message)
            return
        with contextlib.suppress(OSError):  # the agent is gone, which the main loop detects too
            self._agent.sendall(json.dumps(message).encode() + b"\n")


def _spawn(message: dict[str, Any], agent_pid: int) -> int:
    """Fork and execute. Raises OSError if the program could not be executed.

    After `_EXEC_SECONDS` the process is a rank even so, unless it runs or waits for a CPU: its
    directory or program is on a file system that is stuck, and the other ranks of this node are not
    to wait for it.
    """
    guard = os.getpid()
    readable, writable = os.pipe()  # closed by a successful exec
    pid = os.fork()
    if not pid:
        try:
            os.close(readable)
            allow_tracing_by(agent_pid)
            _become_rank(message, guard)
        except BaseException as error:
            code = error.errno if isinstance(error, OSError) else None
            text = str(error).removeprefix(f"[Errno {code}] ")
            signal.signal(signal.SIGPIPE, signal.SIG_IGN)
            try:
                os.write(writable, json.dumps([code, text]).encode())
            except BrokenPipeError:  # too late: it ends as a rank, and its log has the reason
                os.write(2, f"paceline: {text}\n".encode())
        finally:
            os._exit(127)
    os.close(writable)
    with open(readable, "rb") as pipe:
        latest = time.monotonic() + _EXEC_SECONDS + STARVED_SECONDS
        answered, _, _ = select.select([pipe], [], [], _EXEC_SECONDS)
        while not answered and _is_runnable(pid) and time.monotonic() < latest:
            answered, _, _ = select.select([pipe], [], [], _SWEEP_SECONDS)
        failure = pipe.read() if answered else b""
    if failure:
        os.waitpid(pid, 0)
        code, text = json.loads(failure)
        raise OSError(code or 0, text)
    return pid


def _is_runnable(pid: int) -> bool:
    process = read_process(pid)
    return process is not None and process.state == "R"


def _become_rank(message: dict[str, Any], guard: int) -> NoReturn:
    os.setsid()
    log = _open_log(message["log"])  # the agent's file, which the rank can only append to
    become_user(message.get("user"))
    die_with_parent(signal.SIGKILL)  # again, because a change of user clears it
    if os.getppid() != guard:
        os._exit(127)  # the guard died before the parent-death signal was set
    for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGINT, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    _give_up_protection_from_oom_kills()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if message["directory"]:
        os.chdir(message["directory"])
    os.execvpe(message["argv"][0], message["argv"], message["environment"])


def _give_up_protection_from_oom_kills() -> None:
    """Let the kernel choose this process, and no other one, if it uses up the node's memory.

    The agent may be protected (`OOMScoreAdjust=`), and children inherit that.
    """
    with contextlib.suppress(OSError, ValueError):
        with open(_OOM_SCORE) as score:
            is_protected = int(score.read()) < 0
        if is_protected:
            with open(_OOM_SCORE, "w") as score:
                score.write("0")


def _open_log(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o640)


def _serve(agent: socket.socket, agent_pid: int, grace_seconds: float, path: str) -> None:
    """Serve agents until none is left or the sentinel is gone; then kill all descendants."""
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
        sentinel_is_gone = _serve_agent(guard, agent, agent_pid, poll, wake_reader, sentinel)
        if sentinel_is_gone or guard.is_ending or listener is None:
            break
        agent.close()
        guard.detach()
        adopted = _await_agent(guard, listener, poll, wake_reader, sentinel, grace_seconds)
        if adopted is None:
            break
        agent, agent_pid = adopted
        guard.attach(agent, agent_pid)
    kill_all(os.getpid())


def _serve_agent(
    guard: Guard,
    agent: socket.socket,
    agent_pid: int,
    poll: select.poll,
    wake_reader: int,
    sentinel: int | None,
) -> bool:
    """Execute the agent's messages until it is gone. Return True if the sentinel is gone."""
    poll.register(agent.fileno(), select.POLLIN)
    agent_end = _watch(agent_pid, poll)
    pending = b""
    try:
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(guard.timeout_milliseconds)}
            if wake_reader in ready:
                os.read(wake_reader, 4096)
            if agent.fileno() in ready:
                received = _receive(agent)
                if not received:
                    return sentinel in ready
                *lines, pending = (pending + received).split(b"\n")
                for line in lines:
                    guard.handle(line)
            guard.check_ranks()
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
    """Wait for the next agent. Return its socket and pid; None if no rank is left or none came."""
    deadline = time.monotonic() + grace_seconds
    poll.register(listener.fileno(), select.POLLIN)
    try:
        while guard.has_ranks and (left_seconds := deadline - time.monotonic()) > 0:
            timeout = guard.timeout_milliseconds
            left = left_seconds * 1000
            timeout = left if timeout is None else min(timeout, left)
            ready = {descriptor for descriptor, _ in poll.poll(timeout)}
            if wake_reader in ready:
                os.read(wake_reader, 4096)
            guard.check_ranks()
            if sentinel in ready:
                return None
            if listener.fileno() in ready and (adopted := _accept(listener)):
                return adopted
    finally:
        poll.unregister(listener.fileno())
    return None


def _listen(path: str) -> socket.socket | None:
    """Listen for the next agent. Return None if that fails: the ranks then end with the agent."""
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
    """Accept a connection. Return its socket and pid; None if another user connected."""
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


def connect(path: str) -> socket.socket | None:
    """Connect to a guard that an earlier agent left; None if there is none."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(_short(path))
    except OSError:
        connection.close()
        return None
    return connection


def _short(path: str) -> str:
    """Return a path of at most 107 bytes, the limit of a Unix socket's address."""
    if len(os.fsencode(path)) <= _SOCKET_PATH_BYTES:
        return path
    directory = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY)  # stays open
    return f"/proc/self/fd/{directory}/{os.path.basename(path)}"


def _receive(agent: socket.socket) -> bytes:
    try:
        return agent.recv(1 << 16)
    except OSError:
        return b""


def _watch(pid: int, poll: select.poll) -> int | None:
    """Poll for the end of a process; its socket closes only when no process holds it any more."""
    descriptor = open_pidfd(pid)
    if descriptor is not None:
        poll.register(descriptor, select.POLLIN)
    return descriptor


def main(arguments: list[str]) -> None:
    descriptor, agent_pid = int(arguments[0]), int(arguments[1])
    grace_seconds, path = float(arguments[2]), arguments[3]
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(arguments[4]), hard))  # the agent raised it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the agent handles Ctrl-C
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
