"""The composition root: builds the parts of an agent from its settings and runs them.

collect/    collectors -> samples and events    -+
rings/      rings of the ranks -> spans, state  -+-> forward/  outbox, batches, spool, server
supervise/  commands of the server -> ranks     -+
expose/     the newest samples on /metrics
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import gc
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

from paceline_agent import open_files, own_directory
from paceline_agent.clock import stepped_ns, timeline_ns, until_next
from paceline_agent.collect.collectors import discover
from paceline_agent.collect.contract import Collected, Context, Inventory
from paceline_agent.collect.runner import Runner
from paceline_agent.errors import AgentError, DirectoryInUseError
from paceline_agent.expose.exporter import Exporter, OwnMetric
from paceline_agent.forward.credential import Credential
from paceline_agent.forward.forwarder import Forwarder, Packer
from paceline_agent.forward.hello import HelloSender
from paceline_agent.forward.node_key import load_node_key
from paceline_agent.forward.outbox import Outbox
from paceline_agent.forward.server_link import ServerLink, Target
from paceline_agent.forward.spool import Spool
from paceline_agent.rings.positions import Positions
from paceline_agent.rings.reader import Rings
from paceline_agent.settings import HEARTBEAT_SECONDS, AgentSettings
from paceline_agent.supervise import guard
from paceline_agent.supervise.commands import CommandRunner, CommandStream
from paceline_agent.supervise.drain import save_checkpoints
from paceline_agent.supervise.lease import RankLease
from paceline_agent.supervise.rank_user import RankUser, find_rank_user
from paceline_agent.supervise.supervisor import Supervisor
from paceline_wire.batch import Sample
from paceline_wire.commands import StartRanks
from paceline_wire.node_directory import LOCK, RINGS

log = logging.getLogger(__name__)

POLL_SECONDS = 0.25
IDLE_POLL_SECONDS = 1.0  # tick of the collectors while no rank runs here
PAUSE_SECONDS = 1.0  # before a failed part is restarted
HOUSEKEEPING_SECONDS = 10.0
RANKS_GRACE_SECONDS = 2.0  # between SIGTERM and SIGKILL of the ranks of a draining node
DRAIN_SECONDS = 4.0  # seconds; together with closing at most five
KERNEL_LOG_SECONDS = 0.5  # how long the log is read more often after a rank was killed
COLLECT_AFTER_OBJECTS = 20_000
_M_ARENA_MAX = -8  # malloc.h


def run(settings: AgentSettings) -> int:
    """Run an agent until SIGTERM or SIGINT. Return the exit status."""
    _share_heap()
    open_files.raise_limit()
    try:
        asyncio.run(_until_signalled(settings))
    except AgentError as error:
        print(f"paceline agent: {error}", file=sys.stderr)
        return 1
    return 0


async def _until_signalled(settings: AgentSettings) -> None:
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    await serve(settings, stop, hurry)


async def serve(
    settings: AgentSettings,
    stop: asyncio.Event | None = None,
    hurry: asyncio.Event | None = None,
) -> None:
    """Run one agent until `stop` is set, then drain: stop the ranks, send the remaining batches.

    The ranks may save a checkpoint first, unless `hurry` is set.

    Raises:
        DirectoryInUseError: another agent uses this node's directory.
        UnsafeDirectoryError: another user could have prepared the directory.
        SettingsError: the user of the ranks does not exist.
        AgentError: the directory cannot be created or locked.
    """
    rank_user = None if settings.slots == 0 else find_rank_user(settings.run_as)
    # Ranks of external jobs create rings as any user; so do ranks that run as another user.
    shared = os.geteuid() == 0 or (rank_user is not None and not rank_user.is_own)
    own_directory.check_owner(settings.spool, "--spool-directory")
    with _lock(settings.directory, shared=shared):
        agent = Agent(settings, rank_user)
        await agent.run(stop or asyncio.Event(), hurry or asyncio.Event())


class Agent:
    """All parts of an agent and the tasks that run them."""

    def __init__(self, settings: AgentSettings, rank_user: RankUser | None) -> None:
        self._settings = settings
        directory = settings.directory
        self._outbox = Outbox()
        self._spool = Spool(settings.spool, settings.spool_bytes)
        self._packer = Packer(
            settings.agent_id,
            self._outbox,
            self._spool,
            flush_seconds=settings.flush_seconds,
            heartbeat_seconds=HEARTBEAT_SECONDS,
            packed=self._save_positions,
            send_hello=lambda: self._hello.send(first=True),
        )
        self._positions = Positions(directory / "positions.json")
        inventory = Inventory()
        self._rings = Rings(directory / RINGS, self._outbox, settings.procfs_root, inventory)
        self._supervisor = Supervisor(
            directory,
            self._outbox,
            self._rings,
            environment=settings.environment,
            inventory=inventory,
            rank_user=rank_user,
            orphan_grace_seconds=settings.orphan_grace_seconds,
            killed=self._burst_kernel_log,
        )
        self._link = ServerLink(
            Target(
                settings.server_url,
                Credential(settings.server_url, settings.token, settings.environment),
                may_use_proxy=not settings.server_is_local,  # there is no proxy on loopback
                tls=settings.tls_context(),
                node_key=load_node_key(settings.spool),
            )
        )
        self._lease = RankLease(
            settings.lease_seconds,
            lambda: {
                generation: self._rings.progressed_at(*generation)
                for generation in self._supervisor.generations()
            },
            lambda job, generation: self._supervisor.expire(job, generation),
        )
        self._forwarder = Forwarder(
            self._link, self._spool, self._lease.renew, self._packer.overtake
        )
        self._hello = HelloSender(settings, self._outbox)
        self._stream = CommandStream(
            self._link,
            settings.agent_id,
            CommandRunner(
                self._supervisor,
                self._rings,
                self._outbox,
                self._before_start,
                self._burst,
                settings.procfs_root,
            ).accept,
            self._packer.pace,
        )
        self._exporter = Exporter(
            self._own_metrics(),
            procfs_root=settings.procfs_root,
            hostname_label=settings.hostname_label,
        )
        self._runner = Runner(
            discover(),
            Context(
                node_directory=directory,
                sysfs_root=settings.sysfs_root,
                procfs_root=settings.procfs_root,
                kmsg_path=settings.kmsg_path,
                excluded_rdma=frozenset(settings.excluded_rdma),
                nccl_inspector_directory=settings.nccl_inspector_directory,
                hostname=settings.agent_id,
                local_ranks=self._rings.local_ranks,
                inventory=inventory,
            ),
        )
        self._failed_ticks = 0

    async def run(self, stop: asyncio.Event, hurry: asyncio.Event) -> None:
        """Run until `stop` is set."""
        with contextlib.suppress(OSError):  # without it, the guard still is a subreaper
            guard.become_subreaper()
        if self._settings.metrics_port is not None:
            self._exporter.start(self._settings.metrics_host, self._settings.metrics_port)
        await self._supervisor.adopt()
        self._rings.attach_existing(self._positions.load(self._spool))
        log.info("agent %s sends to %s", self._settings.agent_id, self._settings.server_url)
        try:
            async with asyncio.TaskGroup() as group:

                def begin(part: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
                    return group.create_task(self._restart_on_error(part), name=part.__qualname__)

                collecting = begin(self._collect)
                await self._hello.send_first()
                _tune_garbage_collection()
                tasks = [collecting, begin(self._forwarder.run), begin(self._packer.run)]
                tasks += [begin(self._supervisor.run), begin(self._lease.run)]
                tasks += [begin(self._read_rings), begin(self._run_housekeeping)]
                listening = begin(self._stream.run)
                await stop.wait()
                listening.cancel()
                await save_checkpoints(
                    self._supervisor, self._rings, self._settings.checkpoint_seconds, hurry
                )
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(DRAIN_SECONDS):
                        await self._drain()
                for task in tasks:
                    task.cancel()
        finally:
            await self._close()

    async def _drain(self) -> None:
        await self._supervisor.drain(RANKS_GRACE_SECONDS)
        self._rings.poll()
        self._rings.report_ended()
        self._packer.flush()
        while len(self._spool):
            await asyncio.sleep(0.02)

    async def _close(self) -> None:
        await self._supervisor.close()
        self._packer.flush()
        self._link.close()
        self._rings.close()
        self._hello.close()
        self._exporter.close()

    async def _restart_on_error(self, part: Callable[[], Awaitable[None]]) -> None:
        """Run a part until it ends. A failure is counted and the part restarted."""
        while True:
            try:
                return await part()
            except Exception:  # a failed tick must not end the agent
                self._failed_ticks += 1
                log.exception("%s failed and is restarted", part.__qualname__)
                await asyncio.sleep(PAUSE_SECONDS)

    async def _read_rings(self) -> None:
        while True:
            self._rings.poll()
            is_idle = not len(self._rings) and not self._supervisor.has_ranks
            await asyncio.sleep(until_next(IDLE_POLL_SECONDS if is_idle else POLL_SECONDS))

    async def _collect(self) -> None:
        await self._runner.run(self._emit)

    async def _run_housekeeping(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_SECONDS)
            self._supervisor.truncate_logs()
            self._report_clocks()

    def _report_clocks(self) -> None:
        offset_seconds = self._stream.server_clock.offset_seconds
        clocks = {"stepped": stepped_ns() / 1e9, "server_offset": offset_seconds}
        now_ns = timeline_ns()
        self._outbox.put_samples(
            [
                Sample(f"paceline_agent_clock_{name}_seconds", {}, value, now_ns)
                for name, value in clocks.items()
                if value is not None
            ]
        )

    def _save_positions(self, boot_id: str, sequence: int) -> None:
        self._positions.save(boot_id, sequence, self._rings.positions)

    def _emit(self, collected: Collected) -> None:
        self._hello.update(collected)
        self._outbox.put_samples(collected.samples)
        self._outbox.put_samples(collected.lasting or ())
        self._outbox.put_events(collected.events)
        self._exporter.put(collected)
        if self._runner.is_idle:
            self._packer.on_collected()

    def _count_failed_ticks(self) -> float:
        return self._failed_ticks + self._supervisor.failed_ticks

    def _before_start(self, command: StartRanks) -> None:
        self._lease.renew()  # the server has just sent a command
        self._hello.before_start(command)

    def _burst_kernel_log(self) -> None:
        """Read the kernel log often: it may show why a rank was killed, such as out of memory."""
        self._runner.burst(["kmsg"], KERNEL_LOG_SECONDS)

    def _burst(self, collectors: Sequence[str], seconds: float) -> str | None:
        return self._runner.burst(collectors, seconds)

    def _own_metrics(self) -> list[OwnMetric]:
        spool, rings, sent = self._spool, self._rings, self._forwarder.counts
        lost = spool.counts
        metrics: list[tuple[str, Callable[[], float | None]]] = [
            ("batches_sent_total", lambda: sent.batches_sent),
            ("batch_duplicates_total", lambda: sent.duplicates),
            ("send_retries_total", lambda: sent.retries),
            ("batches_dropped_total", lambda: lost.dropped),
            ("spool_lost_spans_total", lambda: lost.lost_spans),
            ("spool_lost_samples_total", lambda: lost.lost_samples),
            ("spool_lost_events_total", lambda: lost.lost_events),
            ("batches_rejected_total", lambda: lost.rejected),
            ("batches_corrupt_total", lambda: lost.corrupt),
            ("spool_bytes", lambda: spool.size_bytes),
            ("spool_batches", lambda: len(spool)),
            ("spool_writable", lambda: spool.disk_error is None),
            ("rings", lambda: len(rings)),
            ("rings_corrupt_total", lambda: rings.counts.corrupt),
            ("spans_total", lambda: rings.counts.spans),
            ("spans_lost_total", lambda: rings.counts.lost_spans),
            ("command_stream_up", lambda: self._stream.connected),
            ("command_stream_reconnects_total", lambda: self._stream.reconnects),
            ("lease_lapses_total", lambda: self._lease.lapses),
            ("clock_stepped_seconds", lambda: stepped_ns() / 1e9),
            ("clock_server_offset_seconds", lambda: self._stream.server_clock.offset_seconds),
            ("failed_ticks_total", self._count_failed_ticks),
        ]
        return [OwnMetric(f"paceline_agent_{name}", read) for name, read in metrics]


def _share_heap() -> None:
    """Use one heap for all threads.

    By default glibc gives each thread its own heap. Batches are allocated by one thread and freed
    by another, which would fragment each of them.
    """
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def _tune_garbage_collection() -> None:
    """Run the garbage collector less often: by default it walks all objects several times a second.

    Loaded modules are never freed, and the hundreds of samples of a sweep contain no cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER_OBJECTS, 10, 10)


@contextlib.contextmanager
def _lock(directory: Path, *, shared: bool) -> Iterator[None]:
    """Create the node's directory, and lock it for as long as this process lives."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        within = own_directory.prepare(directory, shared=shared)
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            descriptor = os.open(LOCK, flags, 0o600, dir_fd=within)
        finally:
            os.close(within)
    except OSError as error:
        raise AgentError(
            f"the node directory {directory} cannot be used ({error.strerror}); "
            "set another one with --node-directory"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DirectoryInUseError(
            f"another agent uses {directory}; stop it, or give this agent its own --node-directory"
        ) from None
    else:
        yield
    finally:
        os.close(descriptor)
