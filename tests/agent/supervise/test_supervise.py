"""Real agents with real ranks: ranks start, end and are killed, and no process is left."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from paceline_agent.supervise import guard
from paceline_agent.supervise.guard import descendants
from paceline_wire.batch import AgentHello, CommandResult, RankAttached, RankExited, RankStarted
from tests.agent.command_factory import SENDS_THE_REST, guard_pids, marker, start_ranks, stop

# A rank with a child in its session and a detached one: double fork, new session, no parent.
WITH_CHILDREN = """
import os, subprocess, sys, time
sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
subprocess.Popen(sleeper)
if not os.fork():
    os.setsid()
    if os.fork():
        os._exit(0)
    subprocess.Popen(sleeper).wait()
print("ready", flush=True)
time.sleep(600)
"""

Fixture = Callable[..., Any]


@pytest.fixture
def few_open_files() -> Iterator[int]:
    """Lower the soft limit of open files of this process and those that it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (900, hard))
    yield 900
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_agent_may_open_more_files_than_it_was_allowed_and_its_ranks_may_not(
    few_open_files: int, start_agent: Fixture, server: Any, order: Fixture, wait_for: Fixture
) -> None:
    agent = start_agent()
    wait_for(lambda: server.events(AgentHello))
    assert resource.prlimit(agent.pid, resource.RLIMIT_NOFILE)[0] > few_open_files
    order(start_ranks("import resource as r; print(r.getrlimit(r.RLIMIT_NOFILE)[0])"))
    wait_for(lambda: server.events(RankExited))
    assert server.events(RankExited)[0].log_tail == str(few_open_files)


@pytest.mark.parametrize(("of_agent", "of_rank"), [("-500", "0"), ("0", "0"), ("300", "300")])
def test_ranks_of_a_protected_agent_are_not_protected_from_oom_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_agent: str, of_rank: str
) -> None:
    score = tmp_path / "oom_score_adj"  # few may lower the one of a process
    score.write_text(of_agent)
    monkeypatch.setattr(guard, "_OOM_SCORE", str(score))
    start = {"argv": ["true"], "environment": dict(os.environ), "log": str(tmp_path / "log")}
    os.waitpid(guard._spawn({**start, "directory": None}, os.getpid()), 0)
    assert score.read_text() == of_rank


@pytest.mark.parametrize(
    ("program", "logged"), [("echo", b"trained\n"), ("/nothing", b"paceline: No such file")]
)
def test_a_rank_whose_file_system_is_stuck_does_not_stop_the_guard(
    tmp_path: Path, program: str, logged: bytes
) -> None:
    log = tmp_path / "log"
    os.mkfifo(log)  # blocks the process that opens it, as a server of NFS that is gone does
    start = {"argv": [program, "trained"], "environment": dict(os.environ)}
    pid = guard._spawn({**start, "log": str(log), "directory": None}, os.getpid())
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    with log.open("rb") as works_again:
        assert works_again.read().startswith(logged)
    os.waitpid(pid, 0)


def test_a_missing_program_is_reported_although_its_process_gets_a_cpu_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "_EXEC_SECONDS", 0.1)
    monkeypatch.setattr(guard, "STARVED_SECONDS", 60.0)
    become_rank = guard._become_rank

    def become_rank_late(message: dict[str, Any], guard_pid: int) -> None:
        while time.thread_time() < 0.5:  # runnable, like a process that waits for a CPU
            pass
        become_rank(message, guard_pid)

    monkeypatch.setattr(guard, "_become_rank", become_rank_late)
    start = {"argv": ["/nothing"], "environment": dict(os.environ), "log": str(tmp_path / "log")}
    with pytest.raises(FileNotFoundError):
        guard._spawn({**start, "directory": None}, os.getpid())


def test_a_rank_gets_its_environment_and_its_output_is_kept(
    start_agent: Fixture,
    server: Any,
    order: Fixture,
    monkeypatch: pytest.MonkeyPatch,
    wait_for: Fixture,
) -> None:
    monkeypatch.setenv("INHERITED", "yes")
    monkeypatch.setenv("PACELINE_AGENT_TOKEN", "secret")
    agent = start_agent()
    code = "import json, os; print(json.dumps(dict(os.environ))); raise SystemExit(7)"
    checkpoints = str(agent.directory / "checkpoints")
    command = start_ranks(
        code, 2, 3, environment={"EXTRA": "1", "RANK": "99"}, checkpoint_directory=checkpoints
    )
    assert order(command).ok
    wait_for(lambda: len(server.events(RankExited)) == 2)
    ended = {event.rank: event for event in server.events(RankExited)}
    assert {(event.exit_code, event.signal, event.commanded) for event in ended.values()} == {
        (7, None, False)
    }
    environment = json.loads(ended[1].log_tail)
    assert environment["PATH"].split(os.pathsep)[0] == os.path.dirname(sys.executable)
    expected = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "PACELINE_RING_DIRECTORY": str(agent.directory / "rings"),
        "PACELINE_NODE_DIRECTORY": str(agent.directory),
        "PACELINE": "1",
        "PACELINE_JOB": "job-a",
        "PACELINE_GENERATION": "3",
        "PACELINE_DP": "2",
        "PACELINE_PP": "1",
        "PACELINE_TP": "1",
        "PACELINE_CHECKPOINT_DIRECTORY": checkpoints,
        "INHERITED": "yes",
        "EXTRA": "1",
    }
    assert {name: environment.get(name) for name in expected} == expected
    assert "PACELINE_AGENT_TOKEN" not in environment
    assert server.tokens == {"Bearer secret"}
    kinds = [
        type(event) for event in server.events() if isinstance(event, RankStarted | RankExited)
    ]
    assert kinds[0] is RankStarted
    assert (agent.directory / "logs" / "job-a.g3.r1.log").exists()


def test_the_hello_is_first_and_a_used_rendezvous_port_is_renewed(
    start_agent: Fixture, server: Any, order: Fixture, wait_for: Fixture
) -> None:
    start_agent("--slots", "4", "--label", "rack=7")
    hello = wait_for(lambda: server.events(AgentHello))[0]
    assert server.batches[0].events[0] is hello
    assert (hello.slots, hello.labels["rack"], hello.address) == (4, "7", "127.0.0.1")
    bind = "import os, socket; socket.create_server(('', int(os.environ['MASTER_PORT']))).close()"
    listening = start_ranks(bind, master_port=hello.rendezvous_port)
    assert order(listening).ok
    exited = wait_for(lambda: server.events(RankExited))[0]
    assert exited.exit_code == 0, exited.log_tail
    renewed = wait_for(lambda: server.events(AgentHello)[1:])[0]
    assert renewed.rendezvous_port != hello.rendezvous_port


def test_a_killed_rank_is_reported_with_its_signal(
    start_agent: Fixture, server: Any, order: Fixture, wait_for: Fixture
) -> None:
    start_agent()
    assert order(start_ranks("import time; time.sleep(600)", 2)).ok
    victim = server.events(RankStarted)[1]
    os.kill(victim.pid, signal.SIGKILL)
    exited = wait_for(lambda: server.events(RankExited))
    assert [(event.rank, event.signal, event.commanded) for event in exited] == [(1, 9, False)]


def test_a_program_that_does_not_exist_is_reported(
    start_agent: Fixture, server: Any, order: Fixture
) -> None:
    start_agent()
    result = order(start_ranks("", argv=["no-such-program"]))
    assert not result.ok
    assert "rank 0" in result.detail
    assert "No such file" in result.detail
    assert not server.events(RankStarted)


def test_an_older_generation_is_refused_and_a_newer_one_replaces(
    start_agent: Fixture, server: Any, order: Fixture, is_alive: Fixture
) -> None:
    start_agent()
    code = "import time; time.sleep(600)"
    assert order(start_ranks(code, generation=1)).ok
    assert not order(start_ranks(code, generation=0)).ok
    assert order(start_ranks(code, generation=2)).ok
    first, second = server.events(RankStarted)
    assert not is_alive(first.pid)
    assert is_alive(second.pid)
    assert order(stop(2)).ok
    assert not is_alive(second.pid)
    assert not order(start_ranks(code, generation=2)).ok, "it was stopped for good"
    assert order(start_ranks(code, generation=3)).ok


def test_a_repeated_command_is_executed_once_and_answered_again(
    start_agent: Fixture, server: Any, order: Fixture, wait_for: Fixture
) -> None:
    start_agent()
    command = start_ranks("import time; time.sleep(600)")
    first = order(command)
    server.commands.append(command)
    wait_for(lambda: len(server.events(CommandResult)) == 2)
    assert server.events(CommandResult) == [first, first]
    assert len(server.events(RankStarted)) == 1


def test_stop_kills_the_family_and_spares_other_jobs(
    start_agent: Fixture, server: Any, order: Fixture, wait_for: Fixture, processes_with: Fixture
) -> None:
    agent = start_agent()
    assert order(start_ranks(WITH_CHILDREN, 2)).ok
    assert order(start_ranks("import time; time.sleep(600)", job="job-b")).ok
    # Per rank: itself, a child, a detached child and its child.
    wait_for(lambda: len(processes_with(marker(agent))) == 9)
    for started in server.events(RankStarted)[:2]:
        os.kill(started.pid, signal.SIGSTOP)
    assert order(stop(0)).ok
    assert len(processes_with(marker(agent))) == 1
    exited = server.events(RankExited)
    assert {(event.signal, event.commanded) for event in exited} == {(9, True)}


def test_stop_with_grace_lets_a_rank_finish(
    start_agent: Fixture, server: Any, order: Fixture, wait_for: Fixture
) -> None:
    agent = start_agent()
    polite = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(3)); "
        "print('ready', flush=True); time.sleep(600)"
    )
    assert order(start_ranks(polite)).ok
    wait_for(lambda: "ready" in (agent.directory / "logs/job-a.g0.r0.log").read_text())
    assert order(stop(0, grace_seconds=30)).ok
    assert server.events(RankExited)[0].exit_code == 3


def test_children_of_a_dead_rank_die_too(
    start_agent: Fixture, server: Any, order: Fixture, wait_for: Fixture, processes_with: Fixture
) -> None:
    agent = start_agent()
    assert order(start_ranks(WITH_CHILDREN)).ok
    wait_for(lambda: len(processes_with(marker(agent))) == 4)
    os.kill(server.events(RankStarted)[0].pid, signal.SIGKILL)
    wait_for(lambda: not processes_with(marker(agent)))


# A process without any connection to its rank: another session, no parent, no environment.
HIDING = """
import os, time
if not os.fork():
    os.setsid()
    if os.fork():
        os._exit(0)
    os.execve("/bin/sleep", ["sleep", "600.25"], {})
print("ready", flush=True)
time.sleep(600)
"""


def test_a_process_that_hides_from_its_rank_ends_with_the_last_rank(
    start_agent: Fixture, server: Any, order: Fixture, wait_for: Fixture
) -> None:
    agent = start_agent()

    def hidden() -> list[int]:
        found = []
        for process in descendants(agent.pid):
            with suppress(OSError):  # it has ended meanwhile
                if b"600.25" in Path(f"/proc/{process.pid}/cmdline").read_bytes():
                    found.append(process.pid)
        return found

    assert order(start_ranks(HIDING)).ok
    wait_for(hidden)
    assert order(start_ranks("import time; time.sleep(600)", job="job-b")).ok
    assert order(stop(0)).ok
    assert hidden(), "it may be the other job's"
    assert order(stop(0, job="job-b")).ok
    assert not hidden()
    assert agent.stop() == 0


@pytest.mark.parametrize(
    "victims", ["agent", "guard", "sentinel", "agent+guard", "agent+sentinel", "guard+sentinel"]
)
def test_no_orphan_after_sigkill(
    victims: str,
    start_agent: Fixture,
    server: Any,
    order: Fixture,
    wait_for: Fixture,
    processes_with: Fixture,
    is_alive: Fixture,
) -> None:
    agent = start_agent("--orphan-grace-seconds", "0")
    assert order(start_ranks(WITH_CHILDREN, 2)).ok
    wait_for(lambda: len(processes_with(marker(agent))) == 8)
    os.kill(server.events(RankStarted)[1].pid, signal.SIGSTOP)
    sentinel, guard = guard_pids(agent.pid)
    pids = {"agent": agent.pid, "guard": guard, "sentinel": sentinel}
    for victim in victims.split("+"):
        os.kill(pids[victim], signal.SIGKILL)
    wait_for(lambda: not processes_with(marker(agent)), what="the ranks to die")
    wait_for(lambda: not is_alive(guard) and not is_alive(sentinel))
    if "agent" in victims:
        return
    wait_for(lambda: len(server.events(RankExited)) == 2)
    assert {(event.signal, event.commanded) for event in server.events(RankExited)} == {(9, False)}
    assert order(start_ranks("import time; time.sleep(600)", generation=1)).ok, "a new guard"


def test_sigterm_stops_the_ranks_and_sends_the_rest(
    start_agent: Fixture, server: Any, order: Fixture, processes_with: Fixture
) -> None:
    agent = start_agent(under=SENDS_THE_REST)
    assert order(start_ranks("import time; time.sleep(600)", 2)).ok
    assert agent.stop() == 0
    assert len(server.events(RankExited)) == 2
    assert not processes_with(marker(agent))
    assert not list((agent.directory / "spool").glob("*.batch"))


def test_an_agent_without_contact_to_the_server_kills_its_ranks(
    start_agent: Fixture, server: Any, order: Fixture, wait_for: Fixture, processes_with: Fixture
) -> None:
    agent = start_agent("--lease-seconds", "1.5")
    assert order(start_ranks("import time; time.sleep(600)", 2)).ok
    server.stop()
    wait_for(lambda: not processes_with(marker(agent)))
    server.start()
    exited = wait_for(lambda: len(server.events(RankExited)) == 2 and server.events(RankExited))
    assert not any(event.commanded for event in exited)


TRAIN = """
import itertools, os, time
from pathlib import Path
import paceline
paceline.init()
steps = open(Path(os.environ["WORK"], "steps"), "a", buffering=1)  # a line per step
for step in paceline.steps(itertools.count()):
    steps.write(f"{step}\\n")
    while Path(os.environ["WORK"], "hangs").exists():
        time.sleep(0.01)
    time.sleep(0.01)
"""


def test_ranks_that_train_outlive_the_server_until_they_hang(
    start_agent: Fixture,
    server: Any,
    order: Fixture,
    wait_for: Fixture,
    processes_with: Fixture,
    tmp_path: Path,
) -> None:
    agent = start_agent("--lease-seconds", "1.5")
    assert order(start_ranks(TRAIN, 1, environment={"WORK": str(tmp_path)})).ok
    wait_for(lambda: server.events(RankAttached))
    server.stop()
    stopped = time.monotonic()
    steps = tmp_path / "steps"
    wait_for(lambda: time.monotonic() > stopped + 5 and steps.read_text().count("\n") > 100)
    for _ in range(4):  # stopped for longer than the lease, it does not know what they did
        agent.process.send_signal(signal.SIGSTOP)
        time.sleep(1.7)
        agent.process.send_signal(signal.SIGCONT)
        time.sleep(0.5)
    assert len(processes_with(marker(agent))) == 1
    assert "finished no operation" not in agent.log_text()
    (tmp_path / "hangs").touch()
    wait_for(lambda: not processes_with(marker(agent)))
    assert "finished no operation" in agent.log_text()
    server.start()


def test_an_agent_without_lease_keeps_its_ranks(
    start_agent: Fixture, server: Any, order: Fixture, wait_for: Fixture, processes_with: Fixture
) -> None:
    agent = start_agent("--lease-seconds", "0")
    assert order(start_ranks("import time; time.sleep(600)", 1)).ok
    server.stop()
    wait_for(lambda: len(list((agent.directory / "spool").glob("*.batch"))) > 2)
    assert len(processes_with(marker(agent))) == 1
    server.start()


def test_a_second_agent_of_the_same_directory_is_refused(
    start_agent: Fixture, server: Any, wait_for: Fixture
) -> None:
    start_agent()
    wait_for(lambda: server.events(AgentHello))
    second = start_agent()
    assert second.process.wait(60) == 1
    assert "another agent uses" in second.log_text()
    assert "Traceback" not in second.log_text()
