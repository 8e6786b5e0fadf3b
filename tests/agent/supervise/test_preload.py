"""Ranks of later generations are forked from a process that has imported their modules.

Each test has a real agent. A forked rank must equal an executed one, and a failing fork server may
only cause a delay.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline_agent.supervise import guard
from paceline_agent.supervise.guard import split_command
from paceline_wire.batch import RankExited, RankStarted
from paceline_wire.commands import PRELOAD, PreloadRanks
from tests.agent.command_factory import guard_pids, start_ranks, stop

Fixture = Callable[..., Any]

# Logs the pid that imported it: a rank, or a fork server for it.
SLOW = """
import os
with open(os.path.join(os.path.dirname(__file__), "imports"), "a") as file:
    print(os.getpid(), file=file)
"""

ABOUT = """
import json, os, sys
import slow
with open("/proc/self/cmdline", "rb") as file:
    shown = file.read().rstrip(b"\\0").decode().split("\\0")
with open("/proc/self/environ", "rb") as file:
    variables = file.read().decode(errors="replace").split("\\0")
print(json.dumps({
    "name": __name__, "file": __file__, "arguments": sys.argv, "path": sys.path,
    "environment": dict(os.environ), "directory": os.getcwd(), "parent": os.getppid(),
    "leads": os.getsid(0) == os.getpid(), "shown": shown[1:], "flags": repr(sys.flags),
    "marks": sorted(v for v in variables if v.startswith(("RANK=", "PACELINE_GENERATION="))),
    "inputs": [os.readlink(f"/proc/self/fd/{number}") for number in (0, 1, 2)],
    "privileges": open("/proc/self/status").read().partition("CapInh")[2].partition("Seccomp")[0],
    "signals": open("/proc/self/status").read().partition("SigBlk")[2].partition("Cap")[0],
}))
"""


@dataclass
class Job:
    """A script, and its generations on one agent."""

    directory: Path
    agent: Any
    server: Any
    order: Fixture
    wait_for: Fixture
    modules: str = "slow"

    def start(
        self,
        generation: int,
        *argv: str,
        ranks: int = 1,
        saved_step: int | None = None,
        **environment: str,
    ) -> None:
        command = start_ranks(
            "", ranks, generation, argv=[sys.executable, *(argv or ("train.py",))],
            environment={PRELOAD: self.modules, **environment},
            directory=str(self.directory), saved_step=saved_step,
        )  # fmt: skip
        result = self.order(command)
        assert result.ok, result.detail

    def ended(self, generation: int, ranks: int = 1) -> list[RankExited]:
        def of_generation() -> list[RankExited]:
            found = [
                event for event in self.server.events(RankExited) if event.generation == generation
            ]
            return found if len(found) == ranks else []

        return sorted(self.wait_for(of_generation), key=lambda one: one.rank)  # type: ignore[no-any-return]

    def pids(self, generation: int) -> list[int]:
        return [o.pid for o in self.server.events(RankStarted) if o.generation == generation]

    def fork_server(self) -> int | None:
        return next(iter(self.fork_processes()), None)

    def fork_processes(self) -> list[int]:
        """Return the fork server, and the two processes that it has forked ahead."""
        found = []
        for process in guard.descendants(self.agent.pid):
            with contextlib.suppress(OSError):
                if b"fork_server.py" in Path(f"/proc/{process.pid}/cmdline").read_bytes():
                    found.append(process.pid)
        return found

    def imports(self) -> list[int]:
        file = self.directory / "imports"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def until_preloaded(self) -> int:
        """Wait until the fork server has imported the modules and forked ahead. Return its pid."""
        pid: int = self.wait_for(
            lambda: self.fork_server() in self.imports() and self.fork_server()
        )
        last: list[bytes] = []

        def rests() -> bool:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            last.append(b" ".join((fields[0], *fields[11:13])))
            return last[-1].startswith(b"S") and last.count(last[-1]) > 5

        self.wait_for(lambda: rests() and len(self.fork_processes()) == 3)
        return pid


@pytest.fixture
def job(
    tmp_path: Path, start_agent: Fixture, server: Any, order: Fixture, wait_for: Fixture
) -> Job:
    directory = tmp_path / "code"
    directory.mkdir()
    (directory / "slow.py").write_text(SLOW)
    (directory / "train.py").write_text(ABOUT)
    return Job(directory, start_agent(), server, order, wait_for)


def forked(job: Job, *argv: str, code: str | None = None, **environment: str) -> RankExited:
    """Return the exit of rank 0 in a forked generation."""
    job.start(0, *argv, **environment)
    server = job.until_preloaded()
    job.order(stop(0))
    if code is not None:
        (job.directory / "train.py").write_text(code)
    job.start(1, *argv, **environment)
    ended = job.ended(1)[0]
    assert job.fork_server() == server
    assert job.imports().count(job.pids(1)[0]) == 0, "it imported for itself"
    return ended


@pytest.mark.parametrize(
    "argv", [("train.py", "--lr", "1"), ("-u", "-X", "utf8", "-m", "train", "--lr", "1")]
)
def test_a_forked_rank_equals_an_executed_one(job: Job, argv: tuple[str, ...]) -> None:
    job.start(0, *argv, EXTRA="1")
    executed = json.loads(job.ended(0)[0].log_tail)
    server = job.until_preloaded()
    job.start(1, *argv, EXTRA="1")
    ended = job.ended(1)[0]
    assert ended.exit_code == 0
    forked = json.loads(ended.log_tail)
    assert sorted(job.imports()) == sorted([server, *job.pids(0)])
    assert forked["environment"].pop("PACELINE_GENERATION") == "1"
    assert executed["environment"].pop("PACELINE_GENERATION") == "0"
    assert forked.pop("marks") == ["PACELINE_GENERATION=1", "RANK=0"]
    assert executed.pop("marks") == ["PACELINE_GENERATION=0", "RANK=0"]
    assert forked["inputs"][1].endswith("job-a.g1.r0.log")
    assert executed.pop("inputs")[0] == forked.pop("inputs")[0] == "/dev/null"
    assert forked == executed
    assert re.search(r"CapEff:\t0+\n(.*\n)*NoNewPrivs:\t1\n", forked["privileges"])


def test_all_ranks_of_a_node_are_forked_and_none_before_the_modules_are_imported(job: Job) -> None:
    job.start(0, ranks=3)
    executed = job.ended(0, 3)
    server = job.until_preloaded()
    job.start(1, ranks=3)
    ended = job.ended(1, 3)
    assert [json.loads(rank.log_tail)["environment"]["LOCAL_RANK"] for rank in ended] == [*"012"]
    assert sorted(job.imports()) == sorted([server, *(rank.pid for rank in executed)])


def test_a_rank_is_forked_although_another_step_was_saved_since(job: Job) -> None:
    job.start(0, saved_step=10)
    server = job.until_preloaded()
    job.ended(0)
    job.start(1, saved_step=20)
    assert json.loads(job.ended(1)[0].log_tail)["environment"]["PACELINE_SAVED_STEP"] == "20"
    assert job.fork_server() == server
    assert job.imports().count(job.pids(1)[0]) == 0, "it imported for itself"


@pytest.mark.parametrize(
    ("code", "exit_code", "number"),
    [
        ("import sys; sys.exit(7)", 7, None),
        ("import os; os._exit(9)", 9, None),
        ("import os; os.kill(os.getpid(), 11)", None, 11),
        ("pass", 0, None),
    ],
)
def test_the_end_of_a_forked_rank_is_reported(
    job: Job, code: str, exit_code: int | None, number: int | None
) -> None:
    ended = forked(job, code=code)
    assert (ended.exit_code, ended.signal, ended.commanded) == (exit_code, number, False)


@pytest.mark.parametrize("code", ["def loss():\n    return 1 / 0\nloss()\n", "1 +"])
def test_an_error_of_a_forked_rank_looks_as_python_shows_it(job: Job, code: str) -> None:
    ended = forked(job, code=code)
    alone = subprocess.run(
        [sys.executable, job.directory / "train.py"], capture_output=True, text=True, check=False
    )
    assert ended.exit_code == alone.returncode == 1
    assert ended.log_tail.strip() == alone.stderr.strip()


def test_definitions_of_a_forked_script_reach_a_spawned_process(job: Job) -> None:
    code = """
import multiprocessing
def double(number):
    return 2 * number
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [1, 2]))
"""
    ended = forked(job, code=code)
    assert (ended.exit_code, ended.log_tail) == (0, "[2, 4]")


def test_ranks_draw_different_random_numbers(job: Job) -> None:
    job.modules = "slow,numpy.random"
    (job.directory / "train.py").write_text("import numpy, random, slow")
    job.start(0, ranks=2)
    job.ended(0, 2)
    job.until_preloaded()
    draw = "import numpy, random, slow; print(numpy.random.random(), random.random())"
    (job.directory / "train.py").write_text(draw)
    job.start(1, ranks=2)
    first, second = job.ended(1, 2)
    assert not set(first.log_tail.split()) & set(second.log_tail.split())


def test_children_of_a_forked_rank_die_with_it_also_detached_ones(
    job: Job, processes_with: Fixture, wait_for: Fixture
) -> None:
    hidden = """
import os, time
if not os.fork():
    os.setsid()
    if os.fork():
        os._exit(0)
print("ready", flush=True)
time.sleep(600)
"""
    job.start(0)
    job.until_preloaded()
    (job.directory / "train.py").write_text(hidden)
    job.start(1)
    about = "PACELINE_GENERATION=1\0"
    wait_for(lambda: len(processes_with(about)) == 2)
    os.kill(job.pids(1)[0], signal.SIGKILL)
    wait_for(lambda: not processes_with(about))
    assert job.ended(1)[0].signal == signal.SIGKILL
    assert job.fork_server() is not None


def test_a_process_that_begins_while_the_others_are_listed_is_not_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As that of a detached process, which forks and ends; the guard would leave it behind."""
    began: list[subprocess.Popen[bytes]] = []
    read = guard.read_process

    def begin_and_read(pid: int) -> guard.Process | None:
        if not began:
            began.append(subprocess.Popen(["sleep", "600"]))
        return read(pid)

    monkeypatch.setattr(guard, "read_process", begin_and_read)
    try:
        found = {process.pid for process in guard.all_processes()}
        assert began[0].pid in found
    finally:
        began[0].kill()
        began[0].wait()


@pytest.mark.parametrize(
    ("module", "code", "why"),
    [
        ("absent", None, "ModuleNotFoundError: No module named 'absent'"),
        ("bad", "1 / 0", "ZeroDivisionError"),
        ("bad", "import sys; sys.exit(3)", "SystemExit: 3"),
        ("bad", "import os; os._exit(3)", ""),
        ("bad", "import threading, time; threading.Thread(target=time.sleep, args=(9,)).start()",
         "an import started threads"),
    ],
)  # fmt: skip
def test_a_failed_preload_is_logged_and_each_rank_imports_for_itself(
    job: Job, module: str, code: str | None, why: str
) -> None:
    if code is not None:
        (job.directory / f"{module}.py").write_text(code)
    job.modules = f"slow,{module}"
    job.start(0)
    first = job.ended(0)[0]
    log = job.agent.directory / "logs" / "job-a.g0.r0.log"
    job.wait_for(lambda: why in log.read_text() and job.fork_server() is None)
    job.start(1)
    assert job.ended(1)[0].exit_code == first.exit_code == 0
    assert job.pids(1)[0] in job.imports()


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_fork_server_that_does_not_respond_is_replaced(
    job: Job, number: signal.Signals, wait_for: Fixture
) -> None:
    job.start(0)
    first = job.until_preloaded()
    os.kill(first, number)
    job.start(1)
    assert job.ended(1)[0].exit_code == 0
    assert job.pids(1)[0] in job.imports()
    second = wait_for(lambda: job.fork_server() != first and job.until_preloaded())
    job.start(2)
    assert job.ended(2)[0].exit_code == 0
    assert job.pids(2)[0] not in job.imports()
    assert job.fork_server() == second


def test_a_rank_that_was_forked_ahead_starts_with_its_generation(job: Job) -> None:
    job.modules = "slow,paceline"
    job.start(0)
    job.until_preloaded()
    code = "from paceline.environment import process_started_ns; print(process_started_ns())"
    (job.directory / "train.py").write_text(code)
    ahead = job.fork_processes()
    before_ns = time.monotonic_ns()
    job.start(1)
    assert int(job.ended(1)[0].log_tail) > before_ns
    assert job.pids(1)[0] in ahead


def test_ranks_are_started_although_a_process_that_was_forked_ahead_was_killed(job: Job) -> None:
    job.start(0)
    first = job.until_preloaded()
    for pid in job.fork_processes()[1:]:
        os.kill(pid, signal.SIGKILL)
    job.start(1)
    assert job.ended(1)[0].exit_code == 0
    job.wait_for(lambda: job.fork_server() != first and job.until_preloaded())
    job.start(2)
    assert job.ended(2)[0].exit_code == 0
    assert job.pids(2)[0] not in job.imports()


def test_a_changed_environment_is_not_forked_from_the_old_fork_server(job: Job) -> None:
    job.start(0, OMP_NUM_THREADS="1")
    first = job.until_preloaded()
    job.start(1, OMP_NUM_THREADS="2")
    assert json.loads(job.ended(1)[0].log_tail)["environment"]["OMP_NUM_THREADS"] == "2"
    assert job.pids(1)[0] in job.imports()
    assert job.until_preloaded() != first


def test_a_missing_directory_is_reported_as_without_preload(job: Job) -> None:
    job.start(0)
    job.until_preloaded()
    job.directory.rename(job.directory.with_name("elsewhere"))
    command = start_ranks(
        "", generation=1, argv=[sys.executable, "train.py"], directory=str(job.directory),
        environment={PRELOAD: job.modules},
    )  # fmt: skip
    result = job.order(command)
    assert not result.ok
    assert "No such file" in result.detail


def test_a_node_can_preload_before_it_has_a_rank(job: Job) -> None:
    environment = {PRELOAD: job.modules}
    command = start_ranks(
        "", generation=3, argv=[sys.executable, "train.py"], directory=str(job.directory),
        environment=environment,
    )  # fmt: skip
    assert job.order(PreloadRanks(**msgspec.structs.asdict(command))).ok
    fork_server = job.until_preloaded()
    assert job.order(stop(3)).ok, "as all nodes do at a restart"
    assert not job.server.events(RankStarted)
    job.start(4)
    assert job.ended(4)[0].exit_code == 0
    assert job.imports() == [fork_server]


@pytest.mark.parametrize("victim", ["agent", "guard", "sentinel", "none"])
def test_the_fork_server_ends_with_its_agent(
    job: Job, victim: str, is_alive: Fixture, wait_for: Fixture
) -> None:
    (job.directory / "train.py").write_text("import slow, time; time.sleep(600)")
    job.start(0)
    job.until_preloaded()
    job.start(1)
    job.wait_for(lambda: len(job.fork_processes()) == 3)
    forks = job.fork_processes()
    sentinel, pid = guard_pids(job.agent.pid)
    rank = job.pids(1)[0]
    if victim == "none":
        assert job.agent.stop() == 0
    else:
        pids = {"agent": job.agent.pid, "guard": pid, "sentinel": sentinel}
        if victim == "agent":
            job.order(stop(1))  # otherwise its ranks, and the fork server, wait for the next agent
        os.kill(pids[victim], signal.SIGKILL)
    wait_for(lambda: not any(map(is_alive, [*forks, rank])))


def test_the_fork_server_ends_after_a_long_time_without_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class FakeForkServer:
        closed = False

        def close(self) -> None:
            self.closed = True

    ours, theirs = guard.socket.socketpair()
    with ours, theirs:
        supervised = guard.Guard(theirs, os.getpid())
        forks = supervised._fork_server = FakeForkServer()  # type: ignore[assignment]
        monkeypatch.setattr(guard, "reap", list)
        clock = [1000.0]
        monkeypatch.setattr(guard.time, "monotonic", lambda: clock[0])
        supervised._busy_at = 1000.0
        for clock[0] in (1001.0, 1899.0):
            supervised.check_ranks()
            assert not forks.closed  # type: ignore[attr-defined]
        assert supervised.timeout_milliseconds is not None
        clock[0] = 1900.0
        supervised.check_ranks()
        assert forks.closed  # type: ignore[attr-defined]
        assert supervised.timeout_milliseconds is None


@pytest.mark.parametrize("answer", ['{"pid": "PID/task/PID"}', "[" * 2000, "[]", '{"pid": 1}'])
def test_the_answer_of_a_fork_server_harms_no_other_rank(tmp_path: Path, answer: str) -> None:
    """It runs code of its job, and the guard is the parent of all ranks of the node."""
    start = {"argv": ["python"], "environment": {}, "directory": None, "log": str(tmp_path / "log")}
    ours, theirs = guard.socket.socketpair(guard.socket.AF_UNIX, guard.socket.SOCK_SEQPACKET)
    forks = guard.ForkServer.__new__(guard.ForkServer)
    forks._common, forks._socket = guard._common(start), ours
    forks._is_ready, forks._process = True, None
    with theirs, subprocess.Popen(["sleep", "60"]) as child:
        try:
            replying = threading.Thread(
                target=lambda: (
                    theirs.recv(1 << 16),
                    theirs.send(answer.replace("PID", str(child.pid)).encode()),
                )
            )
            replying.start()
            assert forks.fork(start, os.getpid()) is None
            replying.join()
        finally:
            child.kill()


def test_a_repeated_command_keeps_a_fork_server_without_ranks_and_starts_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[FakeForkServer] = []

    class FakeForkServer:
        def __init__(self, start: object, agent_pid: int) -> None:
            self.closed = False
            started.append(self)

        def is_for(self, start: object) -> bool:
            return not self.closed

        def close(self) -> None:
            self.closed = True

    ours, theirs = guard.socket.socketpair()
    with ours, theirs:
        supervised = guard.Guard(theirs, os.getpid())
        monkeypatch.setattr(guard, "ForkServer", FakeForkServer)
        monkeypatch.setattr(guard, "reap", list)
        clock = [0.0]
        monkeypatch.setattr(guard.time, "monotonic", lambda: clock[0])
        command = {"key": ["job", 3, 7], "environment": {PRELOAD: "torch"}}
        for clock[0] in (0.0, 600.0, 1200.0, 1800.0):
            supervised._preload(command)
            supervised.check_ranks()
        assert [one.closed for one in started] == [False]
        clock[0] = 2701.0
        supervised.check_ranks()
        assert [one.closed for one in started] == [True]
        supervised._preload(command)
        assert [one.closed for one in started] == [True, False]


def test_what_torch_imports_when_first_used_is_imported_with_it(job: Job) -> None:
    """Optimizers and DDP import torch._dynamo, which takes as long as torch itself.

    `paceline.Checkpoints` imports torch.distributed.checkpoint.
    """
    job.modules = "slow,torch"
    code = (
        "import sys; assert {'torch._dynamo', 'torch.distributed.checkpoint'} <= set(sys.modules)"
        "; assert sys.modules['torch.distributed.rendezvous']._create_c10d_store.__wrapped__"
        "; import paceline; before = set(sys.modules); paceline.Checkpoints"
        "; assert before == set(sys.modules), set(sys.modules) - before"
    )
    assert forked(job, code=code).exit_code == 0


@pytest.mark.parametrize(
    ("command", "python", "program"),
    [
        ("python train.py", "python", "train.py"),
        ("/venv/bin/python3.11 -u -m train --m -c", "/venv/bin/python3.11 -u", "-m train --m -c"),
        ("python3 -W ignore -Xutf8 -X dev -sE a.py -m", "python3 -W ignore -Xutf8 -X dev -sE",
         "a.py -m"),
    ],
)  # fmt: skip
def test_a_python_command_is_split(command: str, python: str, program: str) -> None:
    assert split_command(command.split()) == (python.split(), program.split())


@pytest.mark.parametrize(
    "command",
    ["python", "python -m", "python -c pass", "python -", "python --version", "python -uc pass",
     "python -W", "torchrun train.py", "./train.py", "pythonx train.py", "python -i train.py"],
)  # fmt: skip
def test_other_commands_are_not_forked(command: str) -> None:
    assert split_command(command.split()) is None
