"""Detect ranks that exited without a command from Paceline.

The first rank to exit is the culprit: its peers follow within moments because their connections
break. An exit that looks like such a consequence is held back until the true cause has had time to
arrive: another rank that died first, one that exited with code 0 while its peers trained, or a lost
node. Ranks of external jobs, whose exit code is unknown, are held back as well. Among these, ranks
that waited in a communication are victims, and those that ended together on one node are reported
together. If all ranks ended alike at once, as when a scheduler kills the job, none is the culprit.
Ranks that their agents stopped, because these were shut down, were stopped on request.

A process that aborts itself without a lost connection is blamed if no other rank is the cause. If
gloo aborted it because the ranks entered different collectives, those that entered another one are
reported instead (`mismatch`).
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from typing import ClassVar

from paceline_server.detect.causes.catalog import (
    ENDED_EARLY,
    OUT_OF_MEMORY,
    PROCESS_GONE,
    STOPPED_ON_REQUEST,
)
from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Evidence, Finding
from paceline_server.detect.hang.late_start import CALL, NOT_CALLED, status_of
from paceline_server.detect.hang.verdict import MISMATCH, HangVerdict
from paceline_server.detect.hang.wait_for_graph import communication_frames
from paceline_server.detect.kinds import FAILURE, HANG, Kind
from paceline_server.detect.observation import (
    Generation,
    Observation,
    ReportedDeviceEvent,
    ReportedExit,
)
from paceline_server.detect.rank_exit.mismatch import mismatched_collective
from paceline_server.detect.rank_exit.raised_error import (
    LOADER_WORKERS,
    abort_line,
    aborted_by_itself,
    error_line,
    is_consequence,
    names_device_error,
    names_mismatch,
    names_timeout,
    raised_by_itself,
)
from paceline_server.detect.rank_exit.settings import DEFAULTS, RankExitSettings
from paceline_server.detect.rank_list import ranks_text
from paceline_server.detect.telemetry import MetricSeries
from paceline_server.policy import Policy
from paceline_wire import metric_names
from paceline_wire.batch import RankExited

_OUT_OF_MEMORY = re.compile(r"out of memory|memoryerror|cannot allocate memory", re.IGNORECASE)
_MAX_QUOTE_LENGTH = 200
_RECORDS_ARRIVE_NS = 5_000_000_000
_COMPARED_CHARACTERS = 64  # ranks publish less of a reason than of an error
_KILLED = re.compile(r"Killed process (\d+)\b")
KILLS = metric_names.RANK_KERNEL_EVENTS_TOTAL
KERNEL_LOG_READ = metric_names.KERNEL_LOG_LOST_TOTAL  # sent with each sweep of the log
_LOG_IS_READ_NS = 5_000_000_000
_MAX_KILLS_STORED = 64
_TOGETHER_NS = 1_000_000_000
_POLL_NS = 300_000_000  # agents find the end of an external rank four times a second
_KILL_BEFORE_EXIT_NS = 30_000_000_000  # tearing down a large process takes time
# Signals that other programs send. All others are errors of the process itself.
_SENT_SIGNALS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_ALL_KILLED_ADVICE = (
    "Something outside the training ended the whole job: look for a time limit or preemption of "
    "the scheduler, or a person."
)
_MEMORY_ADVICE = (
    "Give the job more host memory (or raise the memory limit of its cgroup), or use less: fewer "
    "loader workers, smaller prefetch and pinned buffers."
)


class ExitDetector(Detector):
    """Finding kind `failure`, fingerprint `failure:exit`."""

    kinds: ClassVar[tuple[Kind, ...]] = (FAILURE,)
    order: ClassVar[int] = 32  # after the detectors of lost nodes and GPUs, which explain exits

    def __init__(
        self, generation: Generation, policy: Policy, settings: RankExitSettings = DEFAULTS
    ) -> None:
        super().__init__(generation, policy)
        self.settings = settings
        self._abnormal: dict[int, ReportedExit] = {}
        self._finished: dict[int, ReportedExit] = {}  # exited with code 0 without a command
        self._waiting_ranks: set[int] = set()  # exited while waiting for other ranks
        self._joining: dict[int, float] = {}  # seconds in `init_process_group`, if not returned
        self._reported_rank: int | None = None  # the culprit, or the first of several
        self._drained: dict[int, ReportedExit] = {}  # stopped by their agents on request
        self._reported_all = False
        self._reported_drained: list[int] = []
        self._kills: list[ReportedDeviceEvent] = []  # kills by the OOM killer
        self._is_out_of_memory = False  # whether the reported cause is out of memory
        self._mismatch_until_ns = 0  # until then records may show which rank a mismatch is due to

    def update(self, observation: Observation) -> list[Finding]:
        if not observation.steps_finished:
            self._watch_joining(observation)
        for reported in observation.exits:
            self._add(reported, observation)
        kills = [
            reported for reported in observation.device_events if reported.event.kind == "oom_kill"
        ]
        self._kills = [*self._kills, *kills][-_MAX_KILLS_STORED:]
        if self._drained and not any(map(_is_cause, self._abnormal.values())):
            return self._stopped_on_request(observation)
        if not self._abnormal:
            return []
        first = min(self._abnormal.values(), key=self._order_of_blame)
        if self._may_still_be_explained(first, observation):
            return []
        early = self._exited_early(first, observation)
        has_waited = bool(self._late_ranks(first, observation))
        if early is None and not has_waited and self._all_ended_alike(first, observation):
            if self._reported_all:
                return []
            self._reported_all = True
            return [self._failure_of_all(first, observation)]
        culprit = early or first
        if culprit.event.rank == self._reported_rank:
            return self._newly_explained(culprit, observation)
        if self._reported_rank is not None and culprit is first and not _is_cause(first):
            return []  # a later consequence with an earlier timestamp changes nothing
        self._reported_rank = culprit.event.rank
        return [self._failure(culprit, observation)]

    def _add(self, reported: ReportedExit, observation: Observation) -> None:
        event, rank = reported.event, reported.event.rank
        if event.commanded:
            return
        if event.drained:
            self._drained.setdefault(rank, reported)
            return
        if event.exit_code == 0:
            self._finished.setdefault(rank, reported)
        elif rank not in self._abnormal:
            self._abnormal[rank] = reported
            live = observation.ranks.get(rank)
            if live is not None and live.state:
                view = live.state.view
                if view.status == "joining" or communication_frames(view):
                    self._waiting_ranks.add(rank)

    def _watch_joining(self, observation: Observation) -> None:
        for rank, live in observation.ranks.items():
            status = status_of(live)
            if status == "joining":
                self._joining[rank] = live.surely_frozen_seconds
            elif status != "failed":
                self._joining.pop(rank, None)

    def _order_of_blame(self, reported: ReportedExit) -> tuple[int, bool, int, int]:
        event = reported.event
        certainty = 2 if _is_cause(reported) else 1 if _has_aborted_itself(reported) else 0
        was_victim = _is_unknown(event) and event.rank in self._waiting_ranks
        return -certainty, was_victim, reported.time_ns, event.rank

    def _exited_early(self, first: ReportedExit, observation: Observation) -> ReportedExit | None:
        """Return the rank that exited with code 0 and so broke the connections of those that
        failed.

        None if a rank failed by itself, or if most ranks had finished: then the job was over.
        """
        before_ns = first.time_ns + _POLL_NS
        early = [exited for exited in self._finished.values() if exited.time_ns <= before_ns]
        if not early or 2 * len(early) > self.generation.topology.world_size:
            return None
        if _is_cause(first) or not self._is_victim(first, observation):
            return None
        return min(early, key=lambda exited: (exited.time_ns, exited.event.rank))

    def _is_victim(self, reported: ReportedExit, observation: Observation) -> bool:
        """Return whether the rank is known to have failed in a communication."""
        rank = reported.event.rank
        if not _is_unknown(reported.event) or rank in self._waiting_ranks:
            return True
        return _has_raised(rank, observation)

    def _alike(self, first: ReportedExit) -> list[int]:
        """Return the ranks that ended in the same way within a moment of `first`."""
        return sorted(
            rank
            for rank, other in self._abnormal.items()
            if _way_of_end(other.event) == _way_of_end(first.event)
            and abs(other.time_ns - first.time_ns) <= _TOGETHER_NS
        )

    def _alike_or_unknown(self, first: ReportedExit, observation: Observation) -> list[int]:
        """Return those ranks and, after a signal that others send, those that ended together with
        them in an unknown way without raising an error.

        A launcher reports how the first of its ranks ended, and not the others.
        """
        ranks = set(self._alike(first))
        if first.event.signal in _SENT_SIGNALS:
            ranks |= {
                rank
                for rank, other in self._abnormal.items()
                if _is_unknown(other.event)
                and abs(other.time_ns - first.time_ns) <= _TOGETHER_NS
                and not _has_raised(rank, observation)
            }
        return sorted(ranks)

    def _all_ended_alike(self, first: ReportedExit, observation: Observation) -> bool:
        """Return whether the whole job ended at once and in the same way, on every node.

        Ranks whose connections broke shortly before count as well. If it is unknown how they ended,
        the ranks that waited for others are not to blame, which may leave one node.
        """
        world_size, nodes = self.generation.topology.world_size, self.generation.nodes
        if len(self._abnormal.keys() | self._finished.keys()) < world_size:
            return False
        if _has_mismatch(first):
            return False
        alike = set(self._alike(first))
        if len(alike) < 2 or {nodes.get(rank) for rank in alike} != set(nodes.values()):
            return False
        if _is_unknown(first.event):
            return len({nodes.get(rank) for rank in alike - self._waiting_ranks}) != 1
        others = [other for rank, other in self._abnormal.items() if rank not in alike]
        return (
            2 * len(self._alike_or_unknown(first, observation)) >= world_size
            and not any(map(_is_cause, others))
            and self._killed_for_memory(first, observation) is None
        )

    def _ended_together(self, culprit: ReportedExit) -> list[int]:
        """Return the ranks that ended with the culprit: a launcher ends all ranks of a node at
        once."""
        event = culprit.event
        if not _is_unknown(event):
            return [event.rank]
        return sorted(
            rank
            for rank, other in self._abnormal.items()
            if other.node == culprit.node
            and _is_unknown(other.event)
            and abs(other.time_ns - culprit.time_ns) <= _TOGETHER_NS
            and (rank in self._waiting_ranks) == (event.rank in self._waiting_ranks)
        )

    def _may_still_be_explained(self, first: ReportedExit, observation: Observation) -> bool:
        """Return whether a message about the true cause may still arrive."""
        settings = self.settings
        if _is_cause(first) and all(each.event.renewable for each in self._abnormal.values()):
            return False  # the other ranks wait; what explains the exit may be added later
        if _is_cause(first):
            if self._awaits_kernel_log(first, observation):
                return True
            if observation.now_ns < first.received_ns + int(settings.moment_seconds * 1e9):
                return True
            if self._reported_rank is not None or len(self._alike(first)) == 1:
                return False
        decided_ns = first.received_ns + int(settings.first_exit_seconds * 1e9)
        # A node without a batch since then will send one soon, or is lost and explains the exit.
        return observation.now_ns < decided_ns or any(
            observation.last_seen_ns.get(node, 0) <= decided_ns
            for node in self.generation.nodes.values()
        )

    def _awaits_kernel_log(self, culprit: ReportedExit, observation: Observation) -> bool:
        """Return whether the agent reads the kernel log but has not yet sent the second of the
        exit."""
        event = culprit.event
        if (
            event.signal != signal.SIGKILL
            or self._killed_for_memory(culprit, observation) is not None
        ):
            return False
        wait_ns = int(self.settings.kernel_log_seconds * 1e9)
        read = observation.telemetry.find(culprit.node, KERNEL_LOG_READ)
        if read is None or observation.now_ns >= culprit.received_ns + wait_ns:
            return False
        read_ns = read.latest_ns() or 0.0
        return culprit.time_ns - _LOG_IS_READ_NS < read_ns < culprit.time_ns

    def _newly_explained(self, culprit: ReportedExit, observation: Observation) -> list[Finding]:
        """Report the exit again if something that arrives later explains it: the kernel log, which
        is read once a second, or the records of the other ranks."""
        if self._mismatch_until_ns > observation.now_ns:
            verdict = mismatched_collective(culprit.event.rank, observation)
            if verdict is None:
                return []
            self._mismatch_until_ns = 0
            return [self._mismatch(culprit, verdict, observation)]
        if self._is_out_of_memory or self._killed_for_memory(culprit, observation) is None:
            return []
        return [self._failure(culprit, observation)]

    def _killed_for_memory(
        self, culprit: ReportedExit, observation: Observation
    ) -> Evidence | None:
        """Return evidence that the OOM killer ended this process, or a worker of it."""
        event, job = culprit.event, self.generation.job
        for kill in self._kills:
            if kill.node == culprit.node and _concerns(kill.event.detail, event):
                text = f"kernel log of {kill.node}: {kill.event.detail[:_MAX_QUOTE_LENGTH]}"
                return Evidence(text, KILLS)
        if event.signal != signal.SIGKILL:
            return None
        labels = {"job": job, "rank": str(event.rank), "kind": "oom_kill"}
        series = observation.telemetry.find(culprit.node, KILLS, **labels)
        since_ns = culprit.time_ns - _KILL_BEFORE_EXIT_NS
        if series is None or (kills := _increase_since(series, since_ns)) <= 0:
            return None
        text = f"the OOM killer of {culprit.node} killed rank {event.rank}"
        return Evidence(text, KILLS, kills, 0.0)

    def _failure(self, culprit: ReportedExit, observation: Observation) -> Finding:
        event = culprit.event
        if _has_mismatch(culprit):
            verdict = mismatched_collective(event.rank, observation)
            if verdict is None:
                self._mismatch_until_ns = observation.now_ns + _RECORDS_ARRIVE_NS
            return self._mismatch(culprit, verdict, observation)
        killed = self._killed_for_memory(culprit, observation)
        self._is_out_of_memory = killed is not None
        cause = _cause(event) if killed is None else OUT_OF_MEMORY
        quote = error_line(event.log_tail)
        evidence = [
            Evidence(
                f"process {event.pid} of {self.generation.rank_text(event.rank)}: {_ending(event)}"
            )
        ]
        if killed is not None:
            evidence.append(killed)
        if quote:
            evidence.append(Evidence(f"its log: {quote}"))
        evidence += _memory_evidence(culprit, observation, is_sure=killed is not None)
        together = self._ended_together(culprit)
        rank = event.rank if len(together) == 1 else None
        subject, how = self.generation.subject(event.rank), _predicate(cause)
        if rank is None:
            subject = f"R{ranks_text(together)[1:]} ({culprit.node})"
            evidence += _endings(together, observation)
        elif killed is not None and event.signal != signal.SIGKILL:
            subject = f"A loader worker of {self.generation.rank_text(rank)}"
        elif event.exit_code and (why := _failed_save(quote, event.rank, observation)):
            how = (
                f"exited with code {event.exit_code} because a checkpoint could not be saved: {why}"
            )
        evidence += self._followers(together)
        summary = first_summary = f"{subject} {how.rstrip('.')}."
        node: str | None = self.generation.node(event.rank) or culprit.node
        if lost := self._lost_connections(culprit):
            rank, together, node = None, lost, None
            is_timeout = names_timeout(abort_line(event.log_tail))
            first = "A collective timed out" if is_timeout else "Connections between ranks broke"
            first = f"{first} before any rank ended"
            if _has_aborted_itself(culprit):
                first = f"R{ranks_text(lost)[1:]} aborted together"
            summary = f"{first}. {summary}"
        if late := self._late_ranks(culprit, observation):
            waited = f"{ranks_text(self._joining)} waited there for up to "
            waited += f"{max(self._joining.values()):.0f} s"
            rank, together, cause = late[0] if len(late) == 1 else None, late, NOT_CALLED
            node = self.generation.node(rank)
            subject = self.generation.subject(rank) if rank is not None else ""
            subject = subject or f"R{ranks_text(late)[1:]}"
            summary = f"{subject} had not called {CALL}; {waited}. {first_summary}"
        return self.finding(
            "failure:exit",
            cause=cause,
            summary=summary,
            now_ns=observation.now_ns,
            rank=rank,
            ranks=together if rank is None else [],
            node=node,
            can_checkpoint=False,
            advice=_MEMORY_ADVICE if killed is not None else None,
            evidence=evidence,
            follows=self._follows(culprit, observation, is_explained=killed is not None),
        )

    def _mismatch(
        self, aborted: ReportedExit, verdict: HangVerdict | None, observation: Observation
    ) -> Finding:
        """Return a finding about the ranks that entered another collective than the others."""
        event = aborted.event
        entered = [] if verdict is None else list(verdict.evidence)
        ranks = [event.rank] if verdict is None else list(verdict.ranks)
        is_one = verdict is not None and verdict.is_single and len(ranks) == 1
        what = "Ranks entered different collectives, or different sizes of one"
        if is_one:
            what = f"{self.generation.subject(ranks[0])} entered another collective than the others"
        if entered:
            what += f": {entered[0].text}, {entered[-1].text}"
        return self.finding(
            "failure:exit",
            cause=MISMATCH if verdict is None else verdict.cause,
            summary=f"{what}. {self.generation.subject(event.rank)} was {_ending(event)}.",
            now_ns=observation.now_ns,
            rank=ranks[0] if is_one else None,
            ranks=[] if is_one else ranks,
            node=self.generation.node(ranks[0]) if is_one else None,
            can_checkpoint=False,
            evidence=[
                *entered,
                Evidence(f"log of rank {event.rank}: {error_line(event.log_tail)}"),
                *self._followers([event.rank]),
            ],
        )

    def _late_ranks(self, culprit: ReportedExit, observation: Observation) -> list[int]:
        """Return the ranks that had not called `init_process_group` when it failed on this one."""
        rank = culprit.event.rank
        if rank not in self._joining or _is_cause(culprit):
            return []
        return sorted(r for r, live in observation.ranks.items() if status_of(live) == "loading")

    def _lost_connections(self, culprit: ReportedExit) -> list[int]:
        """Return the ranks that lost connections, if nothing else ended the job.

        The first to notice it is no more to blame than the other end of its connection. If only one
        is known to have noticed, the ranks that ended in an unknown way belong to them. A rank that
        aborted itself is to blame, unless several did so at once.
        """
        if _is_unknown(culprit.event) or _is_cause(culprit):
            return []
        if _has_aborted_itself(culprit):
            aborted = self._alike(culprit)
            return aborted if len(aborted) > 1 else []
        consequences = {r: other for r, other in self._abnormal.items() if not _is_cause(other)}
        lost = sorted(r for r, other in consequences.items() if not _is_unknown(other.event))
        lost = lost if len(lost) > 1 else sorted(consequences)
        return lost if len(lost) > 1 else []

    def _failure_of_all(self, first: ReportedExit, observation: Observation) -> Finding:
        """Return a finding that blames no rank and no node."""
        ranks, cause = self._alike_or_unknown(first, observation), _cause(first.event)
        causes = {_without_numbers(_cause(self._abnormal[rank].event)) for rank in ranks}
        if first.event.signal is not None and len(causes) > 1:
            cause = _ending(first.event)
        is_all = len(ranks) == self.generation.topology.world_size
        subject = f"All {len(ranks)} ranks" if is_all else f"R{ranks_text(ranks)[1:]}"
        was_sent = first.event.signal in _SENT_SIGNALS
        when = " at once" if first.event.exit_code is None else ""
        nobody = "all ranks ended within a second on every node: none of them ended the others"
        return self.finding(
            "failure:exit",
            cause=cause,
            summary=f"{subject} {_predicate(cause, is_plural=True)}{when}.",
            now_ns=observation.now_ns,
            ranks=ranks,
            can_checkpoint=False,
            advice=_ALL_KILLED_ADVICE if was_sent else None,
            evidence=[Evidence(nobody), *_endings(ranks, observation), *self._followers(ranks)],
            follows=self._follows(first, observation, is_explained=False),
        )

    def _stopped_on_request(self, observation: Observation) -> list[Finding]:
        """Report the ranks whose agents were shut down, after the ranks of all nodes had time to
        end."""
        newest_ns = max(exited.received_ns for exited in self._drained.values())
        ranks = sorted(self._drained)
        is_early = observation.now_ns < newest_ns + int(self.settings.first_exit_seconds * 1e9)
        if is_early or ranks == self._reported_drained or self._reported_rank is not None:
            return []
        self._reported_drained = ranks
        nodes = sorted({exited.node for exited in self._drained.values()})
        is_all = len(ranks) == self.generation.topology.world_size
        subject = f"All {len(ranks)} ranks" if is_all else f"R{ranks_text(ranks)[1:]}"
        verb = "was" if len(ranks) == 1 else "were"
        agents = f"agent of {nodes[0]} was" if len(nodes) == 1 else "agents of their nodes were"
        return [
            self.finding(
                "failure:exit",
                cause=STOPPED_ON_REQUEST,
                summary=f"{subject} {verb} stopped on request: the {agents} shut down.",
                now_ns=observation.now_ns,
                ranks=ranks,
                can_checkpoint=False,
                evidence=[
                    Evidence(f"agents that were shut down: {', '.join(nodes)}"),
                    *self._followers(ranks),
                ],
            )
        ]

    def _followers(self, ranks: Sequence[int]) -> list[Evidence]:
        followers = sorted(self._abnormal.keys() - set(ranks))
        return [Evidence(f"{ranks_text(followers)} ended afterwards")] if followers else []

    def _follows(
        self, culprit: ReportedExit, observation: Observation, *, is_explained: bool
    ) -> str | None:
        """Return `hang` if the exit only ends a hang: a person or a timeout killed the hung ranks.

        An error that a rank raised by itself, or a signal of its own, explains the hang instead.
        """
        if is_explained or HANG.name not in observation.active_kinds:
            return None
        event = culprit.event
        was_killed = event.signal in _SENT_SIGNALS or _is_unknown(event)
        return HANG.name if was_killed or not _is_cause(culprit) else None


def _endings(ranks: Sequence[int], observation: Observation) -> Iterator[Evidence]:
    """Return, from the state pages, which ranks raised an error and in which step each ended."""
    by_state: dict[tuple[int, bool], list[int]] = {}
    for rank in ranks:
        live = observation.ranks.get(rank)
        if live is not None and live.state is not None:
            view = live.state.view
            by_state.setdefault((view.step, view.status == "failed"), []).append(rank)
    for (step, raised), group in sorted(by_state.items()):
        how = "raised an error" if raised else "ended without raising an error"
        yield Evidence(f"{ranks_text(group)} {how} in step {step}")


def _predicate(cause: str, *, is_plural: bool = False) -> str:
    """Return the predicate of a sentence, such as `was killed by SIGKILL`."""
    if cause.startswith("killed by "):
        return f"{'were' if is_plural else 'was'} {cause}"
    if cause == ENDED_EARLY:
        return "exited with code 0 before the other ranks finished"
    if cause == OUT_OF_MEMORY:
        return "ran out of memory"
    if cause == PROCESS_GONE:
        return "ended with unknown exit code"
    return f"exited with {cause.removeprefix('exit ')}"


def _failed_save(error: str, rank: int, observation: Observation) -> str:
    """Return why the rank's last checkpoint failed, if this error is the reason; else empty."""
    live = observation.ranks.get(rank)
    reason = None if live is None or live.state is None else live.state.view.save_failure
    start = error[:_COMPARED_CHARACTERS]
    return reason if reason is not None and start and start in reason else ""


def _has_raised(rank: int, observation: Observation) -> bool:
    """Return whether the rank's state page shows that it raised an error."""
    live = observation.ranks.get(rank)
    return live is not None and live.state is not None and live.state.view.status == "failed"


def _is_unknown(event: RankExited) -> bool:
    """Return whether the exit status is unknown: another program started the process."""
    return event.exit_code is None and event.signal is None


def _is_cause(reported: ReportedExit) -> bool:
    """Return whether the exit is not the consequence of another one.

    A broken connection causes no signal except SIGABRT, with which torch aborts itself. It also
    does that after an error of the device or of the script, which the log names.
    """
    event = reported.event
    if _is_unknown(event):
        return False
    if event.signal == signal.SIGABRT:
        return names_device_error(event.log_tail) or raised_by_itself(event.log_tail)
    return event.signal is not None or not is_consequence(event.log_tail)


def _has_aborted_itself(reported: ReportedExit) -> bool:
    """Return whether the process aborted itself, and no log shows that it lost a connection."""
    event = reported.event
    return event.signal == signal.SIGABRT and aborted_by_itself(event.log_tail)


def _has_mismatch(reported: ReportedExit) -> bool:
    """Return whether gloo aborted the rank because ranks entered different collectives."""
    return reported.event.signal == signal.SIGABRT and names_mismatch(reported.event.log_tail)


def _way_of_end(event: RankExited) -> tuple[object, ...]:
    """Return a key that is equal for ranks that ended in the same way.

    Numbers in errors are ignored.
    """
    error = error_line(event.log_tail) if event.exit_code is not None else ""
    is_device = names_device_error(event.log_tail)
    return event.exit_code, event.signal, is_device, _without_numbers(error)


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "", text)


def _ending(event: RankExited) -> str:
    """Return how the process ended, without the error because of which it aborted itself."""
    if event.exit_code == 0:
        return "exit code 0"
    if event.signal is not None:
        return f"killed by {signal_name(event.signal)}"
    return _cause(event)


def _cause(event: RankExited) -> str:
    if event.signal is not None:
        quote = abort_line(event.log_tail) if event.signal == signal.SIGABRT else ""
        return f"killed by {signal_name(event.signal)}" + (f": {quote}" if quote else "")
    if _OUT_OF_MEMORY.search(event.log_tail):
        return OUT_OF_MEMORY
    if event.exit_code is None:
        return PROCESS_GONE
    if event.exit_code == 0:
        return ENDED_EARLY
    quote = error_line(event.log_tail)
    return f"exit code {event.exit_code}" + (f": {quote}" if quote else "")


def signal_name(number: int) -> str:
    """Return `SIGKILL`, or `signal 99` for a number that this system does not define."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _concerns(kill: str, event: RankExited) -> bool:
    """Return whether the killed process is the rank, or a data loader worker named at the end of
    its log."""
    if event.signal == signal.SIGKILL and f"[rank {event.rank} of {event.job}]" in kill:
        return True
    found = _KILLED.search(kill)
    if found is None:
        return False
    if event.signal == signal.SIGKILL:
        return int(found[1]) == event.pid
    return any(
        found[1] in named[1].split(", ") for named in LOADER_WORKERS.finditer(event.log_tail)
    )


def _increase_since(series: MetricSeries, since_ns: int) -> float:
    """Return the increase of a counter; a series that starts later starts at zero."""
    before = [value for at, value in series.points if at < since_ns]
    return (series.latest() or 0.0) - (before[-1] if before else 0.0)


def _memory_evidence(
    culprit: ReportedExit, observation: Observation, *, is_sure: bool
) -> list[Evidence]:
    """Return whether host memory was nearly exhausted when SIGKILL ended the rank."""
    if culprit.event.signal != signal.SIGKILL:
        return []
    name = metric_names.MEMORY_MEMAVAILABLE_BYTES
    free = observation.telemetry.latest(culprit.node, name)
    total = observation.telemetry.latest(culprit.node, metric_names.MEMORY_MEMTOTAL_BYTES)
    if free is None or not total or free >= 0.05 * total:
        return []
    text = f"{culprit.node} had only {free / 2**20:,.0f} MiB of memory free"
    text += "" if is_sure else ": the OOM killer may have killed it"
    return [Evidence(text, name, free, total)]
