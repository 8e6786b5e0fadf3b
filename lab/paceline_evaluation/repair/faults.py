"""The faults of the repair arm, and the required outcome of each."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline_demo.cluster import EmulatedNode
from paceline_demo.faults import descendants, lose_node
from paceline_evaluation.repair.cluster import (
    MEMORY_CGROUP,
    PostgreSQL,
    lock_sqlite,
    wait_until,
    why_missing,
)
from paceline_evaluation.repair.trainings import WORLD
from paceline_evaluation.repair.trial import FaultPlan, Hit, RunningJob, nodes_of

_LIMIT_BYTES = 64 << 20


def _kill(pids: Sequence[int], number: signal.Signals = signal.SIGKILL) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


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


_stopped_rank = _signaled_ranks(1, signal.SIGSTOP)


def _ordered(kind: str, **order: Any) -> Callable[[RunningJob], Hit]:
    def inject(running: RunningJob) -> Hit:
        rank = running.chance.randrange(WORLD)
        running.order(rank, kind=kind, **order)
        return Hit(f"rank {rank}: {kind}", {rank}, nodes_of(running.ranks(), {rank}))

    return inject


def _out_of_memory(running: RunningJob) -> Hit:
    rank = running.chance.randrange(WORLD)
    pid = next(each["pid"] for each in running.ranks() if each["rank"] == rank)
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + _LIMIT_BYTES
    cgroup = MEMORY_CGROUP / f"paceline-{running.cluster.mark}"
    cgroup.mkdir(exist_ok=True)
    (cgroup / "memory.limit_in_bytes").write_text(str(limit))
    (cgroup / "cgroup.procs").write_text(str(pid))
    running.order(rank, kind="out-of-memory", bytes=4 * limit)

    def heal() -> None:
        with contextlib.suppress(OSError):
            cgroup.rmdir()

    hit_nodes = nodes_of(running.ranks(), {rank})
    return Hit(f"rank {rank} exceeds its control group", {rank}, hit_nodes, heal=heal)


def _poison(running: RunningJob) -> Hit:
    rank = running.chance.randrange(WORLD)
    step = running.log.newest() + 10
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
    """Kill the process that starts and watches the ranks of a node."""
    found: dict[int, int] = {}  # guard by rank

    def is_found() -> bool:
        found.clear()
        for rank in running.ranks():
            parent = _parent(rank["pid"] or 0)
            if parent is not None and _runs(parent, "supervise/guard.py"):
                found[rank["rank"]] = parent
        return bool(found)

    wait_until(is_found, 30.0)
    guard = running.chance.choice(sorted(set(found.values())))
    hit = {rank for rank, parent in found.items() if parent == guard}
    _kill([guard])
    (node,) = nodes_of(running.ranks(), hit)
    return Hit(f"guard of {node} killed", hit, {node})


def _fork_server_killed(running: RunningJob) -> Hit:
    node, _ = _some_node(running)
    assert node.agent is not None
    processes = descendants(node.agent.pid)
    _kill([pid for pid in processes if _runs(pid, "supervise/fork_server.py")])
    return Hit(f"fork server of {node.agent_id} killed", restarts=0)


def _runs(pid: int, script: str) -> bool:
    """Return whether a process runs this script as its main program."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return any(word.endswith(script) for word in words[:8])
    return False


def _parent(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("PPid:"):
                return int(line.split()[1])
    return None


def _node_lost(running: RunningJob) -> Hit:
    node, hit = _some_node(running)
    lose_node(node)
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
        network = running.cluster.network
        assert network is not None
        network.cut(node.number)
        return Hit(
            f"{node.agent_id} without network for {seconds:g} s",
            hit,
            {node.agent_id},
            heal=lambda: network.restore(node.number),
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
    return _away("server killed, started again after", cluster.start_server, seconds)


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
    return _away(f"{what} stopped for", lambda: _kill(pids, signal.SIGCONT), seconds)


def _away(what: str, heal: Callable[[], None], seconds: float) -> Hit:
    """Return the loss, for some seconds, of what a job can go on without."""
    return Hit(
        f"{what} {seconds:.1f} s",
        restarts=0,
        heal=heal,
        heal_first=True,
        heal_after_seconds=seconds,
    )


def _postgresql(running: RunningJob) -> PostgreSQL:
    assert running.cluster.postgresql is not None
    return running.cluster.postgresql


def _database_killed(running: RunningJob) -> Hit:
    database, seconds = _postgresql(running), running.chance.uniform(0.5, 6.0)
    database.signal(signal.SIGKILL)
    return _away("database killed, started again after", database.start, seconds)


def _database_stopped(running: RunningJob) -> Hit:
    database, seconds = _postgresql(running), running.chance.uniform(2.0, 12.0)
    database.signal(signal.SIGSTOP)
    return _away("database stopped for", lambda: database.signal(signal.SIGCONT), seconds)


def _database_locked(running: RunningJob) -> Hit:
    seconds = running.chance.uniform(2.0, 12.0)
    lock_sqlite(running.cluster.directory / "paceline.db", seconds)
    return Hit(
        f"another program locks the database for {seconds:.1f} s",
        restarts=0,
        heal_first=True,
        heal_after_seconds=seconds,
    )


# A second fault at once, or during the repair of the first


def _at_once(
    *faults: Callable[[RunningJob], Hit], restarts: int = 1
) -> Callable[[RunningJob], Hit]:
    def inject(running: RunningJob) -> Hit:
        hits = [fault(running) for fault in faults]

        def heal() -> None:
            for hit in hits:
                hit.heal()

        return Hit(
            " and ".join(hit.text for hit in hits),
            set().union(*(hit.ranks for hit in hits)),
            set().union(*(hit.nodes for hit in hits)),
            heal=heal,
            heal_first=any(hit.heal_first for hit in hits),
            heal_after_seconds=max(hit.heal_after_seconds for hit in hits),
        )

    return inject


def _both_nodes_lost(running: RunningJob) -> Hit:
    """Lose all nodes of the job; only the disk has its state."""
    used = sorted({rank["node"] for rank in running.ranks()})
    for agent_id in used:
        lose_node(running.node(agent_id))

    def heal() -> None:
        for agent_id in used:
            running.cluster.start_agent(running.node(agent_id))

    return Hit(f"{' and '.join(used)} lost", set(range(WORLD)), set(used), heal=heal)


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
        _, newest = running.committed()[-1]
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

    def heal() -> None:
        filled.__exit__(None, None, None)

    return Hit(
        "disk of database, spools and logs full for 15 s",
        restarts=0,
        heal=heal,
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
    lose_node(spare)
    script = f'mount -t tmpfs none "{running.checkpoints}" && exec "$@"'
    usual = running.cluster.prefixes.get(spare.number, [])
    running.cluster.prefixes[spare.number] = [
        *usual,
        *("unshare", "--mount", "--propagation", "private"),
        *("sh", "-c", script, "sh"),
    ]
    running.cluster.start_agent(spare)
    wait_until(running.has_all_nodes, 60.0)
    lost = _node_lost(running)

    def heal() -> None:
        lost.heal()
        assert spare.agent is not None
        spare.agent.terminate()
        spare.agent.wait(60)
        running.cluster.prefixes[spare.number] = usual
        running.cluster.start_agent(spare)

    return Hit(
        f"{lost.text}; the spare {spare.agent_id} has no mount",
        set(range(WORLD)),
        lost.nodes | {spare.agent_id},
        restarts=3,
        heal=heal,
    )


PLANS = (
    FaultPlan("process", "rank killed", _signaled_ranks(1)),
    FaultPlan("process", "rank gets SIGTERM", _signaled_ranks(1, signal.SIGTERM)),
    FaultPlan("process", "rank gets SIGSEGV", _signaled_ranks(1, signal.SIGSEGV)),
    FaultPlan("process", "rank stopped", _signaled_ranks(1, signal.SIGSTOP)),
    FaultPlan("process", "rank exits 0", _ordered("exit", status=0)),
    FaultPlan("process", "rank exits 3", _ordered("exit", status=3)),
    FaultPlan("process", "rank raises an exception", _ordered("exception")),
    FaultPlan("process", "rank runs out of GPU memory", _ordered("out-of-device-memory")),
    FaultPlan("process", "rank killed: out of memory", _out_of_memory, needs="memory group"),
    FaultPlan("process", "poisoned step", _poison, "end"),
    FaultPlan("node", "node lost", _node_lost),
    FaultPlan("node", "agent killed", _agent_killed, "alone"),
    FaultPlan("node", "agent stopped", _agent_stopped, "alone"),
    FaultPlan("node", "agent gets SIGTERM", _drained),
    FaultPlan("network", "node without network for 2 s", _cut_off(2.0), "either", needs="network"),
    FaultPlan("network", "node without network for 20 s", _cut_off(20.0), needs="network"),
    FaultPlan("disk", "checkpoint: flipped bit", _damage("bit"), needs_manifests=True),
    FaultPlan("disk", "checkpoint: truncated shard", _damage("truncated"), needs_manifests=True),
    FaultPlan("disk", "checkpoint: missing shard", _damage("missing"), needs_manifests=True),
    FaultPlan("disk", "checkpoint: manifest", _damage("manifest"), needs_manifests=True),
    FaultPlan("disk", "checkpoint: hostile metadata", _damage("metadata"), needs_manifests=True),
    FaultPlan("disk", "checkpoint: not committed", _damage("uncommitted"), needs_manifests=True),
    FaultPlan(
        *("disk", "checkpoint disk full", _checkpoint_disk_full, "alone"),
        needs="disk",
        needs_manifests=True,
    ),
    FaultPlan(
        *("disk", "server and spool disk full", _spool_disk_full, "alone", "sqlite"),
        needs="disk",
        needs_manifests=True,
    ),
    FaultPlan("disk", "spare without the mount", _spare_without_mount, needs="root"),
    FaultPlan("clock", "clock + 1 h", _clock_jumps(3600), "alone", needs="clock"),
    FaultPlan("clock", "clock - 1 h", _clock_jumps(-3600), "alone", needs="clock"),
    FaultPlan("clock", "clock + 3 s", _clock_jumps(3), "alone", needs="clock"),
    FaultPlan("clock", "clock - 3 s", _clock_jumps(-3), "alone", needs="clock"),
    FaultPlan("database", "database killed", _database_killed, "alone", "postgresql"),
    FaultPlan("database", "database stopped", _database_stopped, "alone", "postgresql"),
    FaultPlan("database", "database locked", _database_locked, "alone", "sqlite"),
    FaultPlan("server", "server killed", _server_killed, "alone"),
    FaultPlan("server", "server stopped", _server_stopped, "alone"),
    FaultPlan("server", "worker killed", _worker_killed, "alone"),
    FaultPlan("server", "worker stopped", _worker_stopped, "alone"),
    FaultPlan("launcher", "guard killed", _guard_killed),
    FaultPlan("launcher", "fork server killed", _fork_server_killed, "alone"),
    FaultPlan("two_faults", "two ranks killed", _signaled_ranks(2)),
    FaultPlan("two_faults", "all ranks killed", _signaled_ranks(WORLD)),
    FaultPlan("two_faults", "both nodes lost", _both_nodes_lost),
    FaultPlan("two_faults", "rank and server killed", _at_once(_signaled_ranks(1), _server_killed)),
    FaultPlan(
        *("two_faults", "rank and fork server killed"),
        _at_once(_fork_server_killed, _signaled_ranks(1)),
    ),
    FaultPlan("two_faults", "rank stopped, agent killed", _at_once(_stopped_rank, _agent_killed)),
    FaultPlan(
        "during_recovery", "rank killed, again in repair", _during_repair(_any_rank_again, 2)
    ),
    FaultPlan("during_recovery", "rank killed, node lost in repair", _during_repair(_node_lost, 2)),
    FaultPlan("during_recovery", "rank killed, server in repair", _during_repair(_server_killed)),
    FaultPlan("during_recovery", "rank killed, worker in repair", _during_repair(_worker_killed)),
    FaultPlan("during_recovery", "rank killed, agent in repair", _during_repair(_agent_killed, 2)),
    FaultPlan("during_recovery", "rank killed, guard in repair", _during_repair(_guard_killed, 2)),
    FaultPlan(
        *("during_recovery", "rank killed, database in repair"),
        _during_repair(_database_stopped),
        database="postgresql",
    ),
)
KINDS = tuple(dict.fromkeys(plan.kind for plan in PLANS))


def why_not(plan: FaultPlan) -> str | None:
    """Return why this machine cannot have the fault; None if it can."""
    if plan.database == "postgresql" and (reason := why_missing("postgresql")):
        return reason
    return None if plan.needs is None else why_missing(plan.needs)
