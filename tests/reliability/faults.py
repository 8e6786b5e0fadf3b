"""The faults of the campaign, and the required outcome of each."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline_demo.cluster import EmulatedNode
from paceline_demo.faults import descendants
from tests.reliability.cluster import PostgreSQL, cut_off, wait_until
from tests.reliability.trial import WORLD, FaultPlan, Hit, RunningJob, nodes_of

MEMORY_CGROUP = Path("/sys/fs/cgroup/memory")
_LIMIT_BYTES = 64 << 20


def _kill(pids: Sequence[int], number: signal.Signals = signal.SIGKILL) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _later(seconds: float, action: Callable[[], object]) -> None:
    """Run `action` in the background after some seconds."""
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()


# Ranks


def _signaled_ranks(
    count: int, number: signal.Signals = signal.SIGKILL
) -> Callable[[RunningJob], Hit]:
    def inject(running: RunningJob) -> Hit:
        ranks = running.ranks()
        hit = set(running.chance.sample(range(WORLD), count))
        _kill([rank["pid"] for rank in ranks if rank["rank"] in hit], number)
        everyone = count == WORLD
        return Hit(
            f"{number.name} to rank {sorted(hit)}",
            set() if everyone else hit,
            set() if everyone else nodes_of(ranks, hit),
        )

    return inject


def _ordered(kind: str, **order: Any) -> Callable[[RunningJob], Hit]:
    def inject(running: RunningJob) -> Hit:
        rank = running.chance.randrange(WORLD)
        running.order(rank, kind=kind, **order)
        return Hit(f"rank {rank}: {kind}", {rank}, nodes_of(running.ranks(), {rank}))

    return inject


def _out_of_memory(running: RunningJob) -> Hit:
    rank = running.chance.randrange(WORLD)
    cgroup = MEMORY_CGROUP / f"paceline-{running.cluster.mark}"
    cgroup.mkdir(exist_ok=True)
    (cgroup / "memory.limit_in_bytes").write_text(str(_LIMIT_BYTES))
    running.order(rank, kind="out-of-memory", cgroup=str(cgroup), bytes=_LIMIT_BYTES)

    def heal() -> None:
        with contextlib.suppress(OSError):
            cgroup.rmdir()

    hit_nodes = nodes_of(running.ranks(), {rank})
    return Hit(f"rank {rank} exceeds its control group", {rank}, hit_nodes, heal=heal)


def _poison(running: RunningJob) -> Hit:
    rank = running.chance.randrange(WORLD)
    step = (running.job()["step"] or 0) + 5
    running.order(rank, kind="poison", step=step)
    # The nodes change with the restarts.
    nodes = {node.agent_id for node in running.cluster.nodes}
    return Hit(f"rank {rank} fails at step {step} each time", {rank}, nodes, restarts=4)


# Agents and nodes


def _some_node(running: RunningJob) -> tuple[EmulatedNode, set[int]]:
    """Return a node of the job, and its ranks."""
    ranks = running.ranks()
    agent_id = running.chance.choice(sorted({rank["node"] for rank in ranks}))
    return running.node(agent_id), {rank["rank"] for rank in ranks if rank["node"] == agent_id}


def _agent_killed(running: RunningJob) -> Hit:
    node, _ = _some_node(running)
    assert node.agent is not None
    node.agent.kill()
    node.agent.wait()
    time.sleep(running.chance.uniform(0.2, 1.0))
    running.cluster.start_agent(node)
    return Hit(f"agent of {node.agent_id} killed, started again", restarts=0)


def _agent_stopped(running: RunningJob) -> Hit:
    node, _ = _some_node(running)
    assert node.agent is not None
    agent = node.agent.pid
    os.kill(agent, signal.SIGSTOP)
    seconds = running.chance.uniform(1.0, 3.5)
    return Hit(
        f"agent of {node.agent_id} stopped for {seconds:.1f} s",
        restarts=0,
        heal=lambda: os.kill(agent, signal.SIGCONT),
        heal_first=True,
        heal_after_seconds=seconds,
    )


def _guard_killed(running: RunningJob) -> Hit:
    node, hit = _some_node(running)
    pid = next(rank["pid"] for rank in running.ranks() if rank["rank"] in hit)
    status = Path(f"/proc/{pid}/status").read_text()
    guard = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid:"))
    os.kill(guard, signal.SIGKILL)
    return Hit(f"guard of {node.agent_id} killed", hit, {node.agent_id})


def _node_lost(running: RunningJob) -> Hit:
    node, hit = _some_node(running)
    assert node.agent is not None
    _kill([*descendants(node.agent.pid), node.agent.pid])
    node.agent.wait()
    return Hit(
        f"{node.agent_id} lost",
        hit,
        {node.agent_id},
        heal=lambda: running.cluster.start_agent(node),
    )


def _drained(running: RunningJob) -> Hit:
    node, hit = _some_node(running)
    assert node.agent is not None
    node.agent.terminate()

    def heal() -> None:
        assert node.agent is not None
        node.agent.wait(60)
        running.cluster.start_agent(node)

    return Hit(f"SIGTERM to the agent of {node.agent_id}", hit, {node.agent_id}, heal=heal)


def _cut_off(seconds: float) -> Callable[[RunningJob], Hit]:
    def inject(running: RunningJob) -> Hit:
        node, hit = _some_node(running)
        cut = cut_off(node.number)
        cut.__enter__()
        return Hit(
            f"{node.agent_id} without network for {seconds:g} s",
            hit,
            {node.agent_id},
            heal=lambda: cut.__exit__(None, None, None),
            heal_first=True,
            heal_after_seconds=seconds,
        )

    return inject


def _clock_jumps(seconds: int) -> Callable[[RunningJob], Hit]:
    def inject(running: RunningJob) -> Hit:
        node, _ = _some_node(running)
        running.cluster.set_clock(node, seconds)
        return Hit(
            f"clock of {node.agent_id} jumps by {seconds} s",
            restarts=0,
            heal=lambda: running.cluster.set_clock(node, 0),
        )

    return inject


# The server and its database


def _server_killed(running: RunningJob) -> Hit:
    cluster = running.cluster
    assert cluster.server is not None
    _kill([*descendants(cluster.server.pid), cluster.server.pid])
    cluster.server.wait()
    seconds = running.chance.uniform(0.5, 6.0)
    return Hit(
        f"server killed, started again after {seconds:.1f} s",
        restarts=0,
        heal=cluster.start_server,
        heal_first=True,
        heal_after_seconds=seconds,
    )


def _server_stopped(running: RunningJob) -> Hit:
    assert running.cluster.server is not None
    pids = [running.cluster.server.pid, *descendants(running.cluster.server.pid)]
    seconds = running.chance.uniform(3.0, 12.0)
    return _stopped("server", pids, seconds)


def _worker_killed(running: RunningJob) -> Hit:
    _kill(running.cluster.workers())
    return Hit("worker killed", restarts=0)


def _worker_stopped(running: RunningJob) -> Hit:
    return _stopped("worker", running.cluster.workers(), running.chance.uniform(3.0, 12.0))


def _stopped(what: str, pids: Sequence[int], seconds: float) -> Hit:
    _kill(pids, signal.SIGSTOP)
    return Hit(
        f"{what} stopped for {seconds:.1f} s",
        restarts=0,
        heal=lambda: _kill(pids, signal.SIGCONT),
        heal_first=True,
        heal_after_seconds=seconds,
    )


class DatabaseFaults:
    """Faults of a PostgreSQL server."""

    def __init__(self, postgresql: PostgreSQL) -> None:
        self._postgresql = postgresql

    def killed(self, running: RunningJob) -> Hit:
        self._postgresql.signal(signal.SIGKILL)
        seconds = running.chance.uniform(0.5, 6.0)
        return Hit(
            f"database killed, started again after {seconds:.1f} s",
            restarts=0,
            heal=self._postgresql.start,
            heal_first=True,
            heal_after_seconds=seconds,
        )

    def stopped(self, running: RunningJob) -> Hit:
        seconds = running.chance.uniform(2.0, 12.0)
        self._postgresql.signal(signal.SIGSTOP)
        return Hit(
            f"database stopped for {seconds:.1f} s",
            restarts=0,
            heal=lambda: self._postgresql.signal(signal.SIGCONT),
            heal_first=True,
            heal_after_seconds=seconds,
        )


# A second fault during the repair of the first


def _during_repair(
    second: Callable[[RunningJob], Hit], restarts: int = 1
) -> Callable[[RunningJob], Hit]:
    def inject(running: RunningJob) -> Hit:
        generation = running.job()["generation"]
        first = _signaled_ranks(1)(running)

        def has_begun() -> bool:
            job = running.job()
            return job["state"] in ("recovering", "starting") or job["generation"] > generation

        wait_until(has_begun, 30.0, 0.05)
        time.sleep(running.chance.uniform(0.0, 1.5))
        then = second(running)
        return Hit(
            f"{first.text}; during the repair: {then.text}",
            first.ranks | then.ranks,
            first.nodes | then.nodes,
            restarts=restarts,
            heal=then.heal,
            heal_first=then.heal_first,
            heal_after_seconds=then.heal_after_seconds,
        )

    return inject


def _any_rank_again(running: RunningJob) -> Hit:
    """Kill a rank of the new generation as soon as it has a process."""
    rank = running.chance.randrange(WORLD)
    found: list[dict[str, Any]] = []

    def has_started() -> bool:
        found[:] = [each for each in running.ranks() if each["rank"] == rank and each["pid"]]
        return bool(found) and Path(f"/proc/{found[0]['pid']}").exists()

    wait_until(has_started, 30.0, 0.05)
    _kill([found[0]["pid"]])
    return Hit(f"SIGKILL to rank {rank}", {rank}, {found[0]["node"]})


# Checkpoints and disks


def _damage(what: str) -> Callable[[RunningJob], Hit]:
    """Damage the newest checkpoint, then kill a rank so that the checkpoint is read."""

    def inject(running: RunningJob) -> Hit:
        _, _, newest = running.committed()[-1]
        shards = sorted(newest.glob("*.distcp"))
        shard = running.chance.choice(shards)
        file, is_damage = shard, 1
        if what == "bit":
            content = bytearray(shard.read_bytes())
            content[running.chance.randrange(len(content))] ^= 1
            shard.write_bytes(content)
        elif what == "truncated":
            os.truncate(shard, shard.stat().st_size // 2)
        elif what == "missing":
            shard.unlink()
        elif what == "manifest":
            file = newest / "manifest.json"
            file.write_bytes(file.read_bytes()[:-10])
        elif what == "metadata":
            file = newest / ".metadata"
            file.write_bytes(b"\x80\x04cos\nsystem\n\x8c\x04true\x85R.")
        elif what == "uncommitted":
            file, is_damage = newest / "COMMITTED", 0
            file.unlink()
        hit = _signaled_ranks(1)(running)
        hit.text = f"{file.name} of {newest.name}: {what}; {hit.text}"
        hit.lost_checkpoints, hit.damaged = 1, is_damage
        return hit

    return inject


@contextlib.contextmanager
def _filled(directory: Path) -> Iterator[None]:
    """Fill the disk of a directory to the last byte."""
    ballast = directory / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass
    try:
        yield
    finally:
        ballast.unlink()


def _checkpoint_disk_full(running: RunningJob) -> Hit:
    filled = _filled(running.checkpoints)
    filled.__enter__()

    def heal() -> None:
        filled.__exit__(None, None, None)

    return Hit(
        "disk of the checkpoints full",
        restarts=0,
        heal=heal,
        needs_incident="checkpoint_failure",
    )


def _spool_disk_full(running: RunningJob) -> Hit:
    filled = _filled(running.cluster.directory)
    filled.__enter__()
    return Hit(
        "disk of database, spools and logs full for 15 s",
        restarts=0,
        heal=lambda: filled.__exit__(None, None, None),
        heal_first=True,
        heal_after_seconds=15.0,
    )


def _spare_without_mount(running: RunningJob) -> Hit:
    """Lose the node of a rank in a cluster where one spare lacks the mount of the checkpoints."""
    used = {rank["node"] for rank in running.ranks()}
    spare = min(
        (node for node in running.cluster.nodes if node.agent_id not in used),
        key=lambda node: node.number,
    )
    assert spare.agent is not None
    _kill([*descendants(spare.agent.pid), spare.agent.pid])
    spare.agent.wait()
    script = f'mount -t tmpfs none "{running.checkpoints}" && exec "$@"'
    running.cluster.prefixes[spare.number] = [
        *("unshare", "--mount", "--propagation", "private"),
        *("sh", "-c", script, "sh"),
    ]
    running.cluster.start_agent(spare)
    wait_until(
        lambda: (
            sum(node["state"] == "ready" for node in running.client.items("/nodes"))
            == len(running.cluster.nodes)
        ),
        60.0,
    )
    lost = _node_lost(running)

    def heal() -> None:
        lost.heal()
        assert spare.agent is not None
        spare.agent.terminate()
        spare.agent.wait(60)
        running.cluster.prefixes.pop(spare.number)
        running.cluster.start_agent(spare)

    return Hit(
        f"{lost.text}; the spare {spare.agent_id} has no mount",
        set(range(WORLD)),
        lost.nodes | {spare.agent_id},
        restarts=3,
        heal=heal,
    )


def plans(postgresql: PostgreSQL | None) -> list[FaultPlan]:
    """Return all faults; those of the database need PostgreSQL."""
    found = [
        FaultPlan("rank killed", 8, _signaled_ranks(1)),
        FaultPlan("rank gets SIGTERM", 3, _signaled_ranks(1, signal.SIGTERM)),
        FaultPlan("rank gets SIGSEGV", 3, _signaled_ranks(1, signal.SIGSEGV)),
        FaultPlan("rank stopped", 5, _signaled_ranks(1, signal.SIGSTOP)),
        FaultPlan("two ranks killed", 6, _signaled_ranks(2)),
        FaultPlan("all ranks killed", 4, _signaled_ranks(WORLD)),
        FaultPlan("rank exits 0", 4, _ordered("exit", status=0)),
        FaultPlan("rank exits 3", 2, _ordered("exit", status=3)),
        FaultPlan("rank raises an exception", 4, _ordered("exception")),
        FaultPlan("rank runs out of GPU memory", 2, _ordered("out-of-device-memory")),
        FaultPlan("rank killed: out of memory", 3, _out_of_memory),
        FaultPlan("agent killed", 6, _agent_killed, "alone"),
        FaultPlan("agent stopped", 3, _agent_stopped, "alone"),
        FaultPlan("agent gets SIGTERM", 4, _drained),
        FaultPlan("guard killed", 4, _guard_killed),
        FaultPlan("node lost", 5, _node_lost),
        FaultPlan("server killed", 5, _server_killed, "alone"),
        FaultPlan("server stopped", 4, _server_stopped, "alone"),
        FaultPlan("worker killed", 4, _worker_killed, "alone"),
        FaultPlan("worker stopped", 4, _worker_stopped, "alone"),
        FaultPlan("rank killed, again in repair", 5, _during_repair(_any_rank_again, 2)),
        FaultPlan("rank killed, server in repair", 4, _during_repair(_server_killed)),
        FaultPlan("rank killed, worker in repair", 3, _during_repair(_worker_killed)),
        FaultPlan("rank killed, agent in repair", 4, _during_repair(_agent_killed, 2)),
        FaultPlan("checkpoint: flipped bit", 2, _damage("bit")),
        FaultPlan("checkpoint: truncated shard", 2, _damage("truncated")),
        FaultPlan("checkpoint: missing shard", 2, _damage("missing")),
        FaultPlan("checkpoint: manifest", 1, _damage("manifest")),
        FaultPlan("checkpoint: hostile metadata", 1, _damage("metadata")),
        FaultPlan("checkpoint: not committed", 1, _damage("uncommitted")),
        FaultPlan("spare without the mount", 2, _spare_without_mount),
        FaultPlan("clock + 1 h", 2, _clock_jumps(3600), "alone", "clock"),
        FaultPlan("clock - 1 h", 2, _clock_jumps(-3600), "alone", "clock"),
        FaultPlan("clock + 3 s", 2, _clock_jumps(3), "alone", "clock"),
        FaultPlan("clock - 3 s", 2, _clock_jumps(-3), "alone", "clock"),
        FaultPlan("checkpoint disk full", 2, _checkpoint_disk_full, "alone", "disk"),
        FaultPlan("server and spool disk full", 2, _spool_disk_full, "alone", "disk"),
        FaultPlan("node without network for 2 s", 3, _cut_off(2.0), "either", "network"),
        FaultPlan("node without network for 20 s", 4, _cut_off(20.0), "restart", "network"),
        FaultPlan("poisoned step", 2, _poison, "end"),
    ]
    if postgresql is not None:
        database = DatabaseFaults(postgresql)
        found += [
            FaultPlan("database killed", 4, database.killed, "alone"),
            FaultPlan("database stopped", 4, database.stopped, "alone"),
            FaultPlan("rank killed, database in repair", 3, _during_repair(database.stopped)),
        ]
    return found


def needs(plan: FaultPlan) -> str | None:
    """Return the requirement of a fault that this machine does not meet."""
    tools = {"network": ("ip",), "disk": ("mount",), "clock": ("gcc",)}
    missing = [tool for tool in tools.get(plan.session, ()) if shutil.which(tool) is None]
    if missing:
        return missing[0]
    if plan.name.endswith("out of memory") and not os.access(MEMORY_CGROUP, os.W_OK):
        return "a memory control group"
    is_root = os.geteuid() == 0
    return None if is_root or plan.session == "default" else "root"


def mount_small_disk(directory: Path, mebibytes: int) -> Callable[[], None]:
    """Mount a small disk on a directory; return a function that unmounts it."""
    options = f"size={mebibytes}m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(directory)], check=True)
    return lambda: subprocess.run(["umount", "--lazy", str(directory)], check=True) and None
