"""Detect ranks that exited without a command from Paceline.

The first rank to exit is the culprit: its peers follow within moments because their connections
break. An exit that looks like such a consequence is held back until the true cause has had time to
arrive: another rank that died first, one that exited with code 0 while its peers trained, or a lost
node. Ranks of external jobs, whose exit code is unknown, are held back as well. Among these, ranks
that waited in a communication are victims, and those that ended together on one node are reported
together. If all ranks ended alike at once, as when a scheduler kills the job, none is the culprit.
Ranks that their agents stopped, because these were shut down, were stopped on request, as were
those whose torchrun received a signal to end.

A process that aborts itself without a lost connection is blamed if no other rank is the cause. If
gloo aborted it because the ranks entered different collectives, those that entered another one are
reported instead (`mismatch`).
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import ClassVar

from msgspec.structs import replace as replace_fields

from paceline_server.detect.causes.catalog import (
    OUT_OF_MEMORY,
    STOPPED_ON_REQUEST,
)
from paceline_server.detect.collective_timeout import names_timeout
from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Evidence, Finding
from paceline_server.detect.hang.late_start import CALL, NOT_CALLED
from paceline_server.detect.hang.verdict import MISMATCH, HangVerdict
from paceline_server.detect.hang.wait_for_graph import communication_frames
from paceline_server.detect.interrupt import is_interrupt
from paceline_server.detect.kinds import FAILURE, HANG, Kind
from paceline_server.detect.observation import (
    Generation,
    Observation,
    ReportedExit,
)
from paceline_server.detect.raised_error import (
    error_line,
    error_place,
    fatal_place,
    names_missing_connection,
)
from paceline_server.detect.rank_exit.ending import (
    SENT_SIGNALS,
    cause_of,
    ending,
    has_aborted_itself,
    has_mismatch,
    is_cause,
    is_unknown,
    predicate,
    signal_name,
    way_of_end,
    without_numbers,
)
from paceline_server.detect.rank_exit.mismatch import mismatched_collective
from paceline_server.detect.rank_exit.out_of_memory import OomKills, memory_evidence
from paceline_server.detect.rank_exit.settings import DEFAULTS, RankExitSettings
from paceline_server.detect.rank_list import ranks_text
from paceline_server.policy import Policy

_RECORDS_ARRIVE_NS = 5_000_000_000
_COMPARED_CHARACTERS = 64  # ranks publish less of a reason than of an error
_TOGETHER_NS = 1_000_000_000
_POLL_NS = 300_000_000  # agents find the end of an external rank four times a second
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
        self._ended_ranks: set[int] = set()  # by their launcher, after a timeout of another rank
        self._joining: dict[int, float] = {}  # seconds in `init_process_group`, if not returned
        self._reported_rank: int | None = None  # the culprit, or the first of several
        self._requested: dict[int, ReportedExit] = {}  # stopped on request: see below
        self._reported_all = False
        self._reported_requested: list[int] = []
        self._oom_kills = OomKills()
        self._is_out_of_memory = False  # whether the reported cause is out of memory
        self._mismatch_until_ns = 0  # until then records may show which rank a mismatch is due to

    def update(self, observation: Observation) -> list[Finding]:
        if not observation.steps_finished:
            self._watch_joining(observation)
        for reported in observation.exits:
            self._add(reported, observation)
        if observation.exits:
            self._find_ended_ranks()
            if self._is_interrupted():
                self._requested |= self._abnormal
                self._abnormal.clear()
                self._reported_rank = None
        self._oom_kills.add(observation)
        if self._requested and not any(map(is_cause, self._abnormal.values())):
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
        if self._reported_rank is not None and culprit is first and not is_cause(first):
            return []  # a later consequence with an earlier timestamp changes nothing
        self._reported_rank = culprit.event.rank
        return [self._failure(culprit, observation)]

    def _add(self, reported: ReportedExit, observation: Observation) -> None:
        event, rank = reported.event, reported.event.rank
        if event.commanded:
            return
        if event.drained or event.launcher_signal is not None:
            self._requested.setdefault(rank, reported)
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

    def _is_interrupted(self) -> bool:
        """Return whether Ctrl-C ended all ranks that had not finished."""
        ended = self._abnormal.keys() | self._finished.keys()
        return len(ended) == self.generation.topology.world_size and all(
            is_interrupt(reported.event) for reported in self._abnormal.values()
        )

    def _find_ended_ranks(self) -> None:
        """Find the ranks that ended by SIGTERM, or in an unknown way, after a collective of another
        rank of their node had timed out.

        The launcher, such as `mp.spawn` or torchrun, ended them because the other one failed: the
        signal does not count.
        """
        timed_out = [
            other
            for other in self._abnormal.values()
            if not is_cause(other) and names_timeout(other.event.log_tail)
        ]
        for rank, reported in self._abnormal.items():
            event = reported.event
            if (is_unknown(event) or event.signal == signal.SIGTERM) and any(
                other.node == reported.node
                and other.time_ns - other.event.since_error_ns < reported.time_ns
                for other in timed_out
            ):
                self._ended_ranks.add(rank)
                unknown = replace_fields(event, signal=None)
                self._abnormal[rank] = replace(reported, event=unknown)

    def _watch_joining(self, observation: Observation) -> None:
        for rank, live in observation.ranks.items():
            status = live.status
            if status == "joining":
                self._joining[rank] = live.surely_frozen_seconds
            elif status != "failed":
                self._joining.pop(rank, None)

    def _order_of_blame(self, reported: ReportedExit) -> tuple[int, bool, int, int]:
        event = reported.event
        certainty = 2 if is_cause(reported) else 1 if has_aborted_itself(reported) else 0
        was_victim = is_unknown(event) and event.rank in self._waiting_ranks | self._ended_ranks
        # Processes take unequally long to end after an error.
        first_ns = reported.time_ns - (event.since_error_ns if certainty == 2 else 0)
        return -certainty, was_victim, first_ns, event.rank

    def _exited_early(self, first: ReportedExit, observation: Observation) -> ReportedExit | None:
        """Return the rank that exited with code 0 and so broke the connections of those that
        failed.

        None if a rank failed by itself, or if most ranks had finished: then the job was over.
        """
        before_ns = first.time_ns + _POLL_NS
        early = [
            exited
            for exited in self._finished.values()
            if _finished_ns(exited, observation) <= before_ns
        ]
        if not early or 2 * len(early) > self.generation.topology.world_size:
            return None
        if is_cause(first) or not self._is_victim(first, observation):
            return None
        return min(early, key=lambda exited: (exited.time_ns, exited.event.rank))

    def _is_ending(self, observation: Observation) -> bool:
        """Return whether a rank reports that it has finished, and its process is not gone yet.

        Torch takes a second to end, in which its peers may fail and be gone.
        """
        return any(
            live.status == "finished" and rank not in observation.exited
            for rank, live in observation.ranks.items()
        )

    def _is_victim(self, reported: ReportedExit, observation: Observation) -> bool:
        """Return whether the rank is known to have failed in a communication."""
        rank = reported.event.rank
        if not is_unknown(reported.event) or rank in self._waiting_ranks:
            return True
        return _has_raised(rank, observation)

    def _alike(self, first: ReportedExit) -> list[int]:
        """Return the ranks that ended in the same way within a moment of `first`."""
        return sorted(
            rank
            for rank, other in self._abnormal.items()
            if way_of_end(other.event) == way_of_end(first.event)
            and abs(other.time_ns - first.time_ns) <= _TOGETHER_NS
        )

    def _alike_or_unknown(self, first: ReportedExit, observation: Observation) -> list[int]:
        """Return those ranks and, after a signal that others send, those that ended together with
        them in an unknown way without raising an error.

        A launcher reports how the first of its ranks ended, and not the others.
        """
        ranks = set(self._alike(first))
        if first.event.signal in SENT_SIGNALS:
            ranks |= {
                rank
                for rank, other in self._abnormal.items()
                if is_unknown(other.event)
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
        if has_mismatch(first):
            return False
        alike = set(self._alike(first))
        if len(alike) < 2 or {nodes.get(rank) for rank in alike} != set(nodes.values()):
            return False
        if is_unknown(first.event):
            return len({nodes.get(rank) for rank in alike - self._waiting_ranks}) != 1
        others = [other for rank, other in self._abnormal.items() if rank not in alike]
        if others and not is_cause(first):
            return False  # connections broke: the words in which ranks report that differ
        return (
            2 * len(self._alike_or_unknown(first, observation)) >= world_size
            and not any(map(is_cause, others))
            and self._oom_kills.find(first, observation) is None
        )

    def _ended_together(self, culprit: ReportedExit) -> list[int]:
        """Return the ranks that ended with the culprit: a launcher ends all ranks of a node at
        once."""
        event = culprit.event
        if not is_unknown(event):
            return [event.rank]
        return sorted(
            rank
            for rank, other in self._abnormal.items()
            if other.node == culprit.node
            and is_unknown(other.event)
            and abs(other.time_ns - culprit.time_ns) <= _TOGETHER_NS
            and (rank in self._waiting_ranks) == (event.rank in self._waiting_ranks)
        )

    def _may_still_be_explained(self, first: ReportedExit, observation: Observation) -> bool:
        """Return whether a message about the true cause may still arrive."""
        settings = self.settings
        if is_cause(first) and all(each.event.renewable for each in self._abnormal.values()):
            return False  # the other ranks wait; what explains the exit may be added later
        decided_ns = first.received_ns + int(settings.first_exit_seconds * 1e9)
        if is_interrupt(first.event) and observation.now_ns < decided_ns:
            return True  # the others may be ending by Ctrl-C, too
        if is_cause(first):
            if self._oom_kills.may_arrive(first, observation, settings.kernel_log_seconds):
                return True
            if observation.now_ns < first.received_ns + int(settings.moment_seconds * 1e9):
                return True
            if self._reported_rank is not None or len(self._alike(first)) == 1:
                return False
        if observation.now_ns < decided_ns:
            return True
        ended_ns = first.received_ns + int(settings.ending_seconds * 1e9)
        if observation.now_ns < ended_ns and self._is_ending(observation):
            return True
        # A node without a batch since then will send one soon, or is lost and explains the exit.
        is_silent = [
            observation.last_seen_ns.get(node, 0) <= decided_ns
            for node in self.generation.nodes.values()
        ]
        all_silent_ns = first.received_ns + int(settings.all_silent_seconds * 1e9)
        return any(is_silent) and not (all(is_silent) and observation.now_ns >= all_silent_ns)

    def _newly_explained(self, culprit: ReportedExit, observation: Observation) -> list[Finding]:
        """Report the exit again if something that arrives later explains it: the kernel log, which
        is read once a second, or the records of the other ranks."""
        if self._mismatch_until_ns > observation.now_ns:
            verdict = mismatched_collective(culprit.event.rank, observation)
            if verdict is None:
                return []
            self._mismatch_until_ns = 0
            return [self._mismatch(culprit, verdict, observation)]
        if self._is_out_of_memory or self._oom_kills.find(culprit, observation) is None:
            return []
        return [self._failure(culprit, observation)]

    def _failure(self, culprit: ReportedExit, observation: Observation) -> Finding:
        event = culprit.event
        if has_mismatch(culprit):
            verdict = mismatched_collective(event.rank, observation)
            if verdict is None:
                self._mismatch_until_ns = observation.now_ns + _RECORDS_ARRIVE_NS
            return self._mismatch(culprit, verdict, observation)
        killed = self._oom_kills.find(culprit, observation)
        self._is_out_of_memory = killed is not None
        reported = cause_of(event)
        cause = reported if killed is None else OUT_OF_MEMORY
        quote = error_line(event.log_tail)
        evidence = [
            Evidence(
                f"process {event.pid} of {self.generation.rank_text(event.rank)}: {ending(event)}"
            )
        ]
        if killed is not None:
            evidence.append(killed)
        if quote:
            place = error_place(event.log_tail)
            raised = f", raised in {place}" if place else ""
            evidence.append(Evidence(f"its log: {quote}{raised}"))
        fatal = fatal_place(event.log_tail)
        if fatal is not None:
            evidence.append(Evidence(f"its Python line when it was killed: {fatal}"))
        evidence += memory_evidence(culprit, observation, is_sure=killed is not None)
        together = self._ended_together(culprit)
        rank = event.rank if len(together) == 1 else None
        subject, how = self.generation.subject(event.rank), predicate(cause)
        if fatal is not None and rank is not None and cause == ending(event):
            how += f" in {PurePath(fatal).name}"
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
            first = "Connections between ranks broke before any rank ended"
            if names_timeout(reported):
                first = "A collective timed out before any rank ended"
            elif names_missing_connection(reported):
                first = "A rank could not connect to the others"
            if has_aborted_itself(culprit):
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
            summary=f"{what}. {self.generation.subject(event.rank)} was {ending(event)}.",
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
        if rank not in self._joining or is_cause(culprit):
            return []
        return sorted(r for r, live in observation.ranks.items() if live.status == "loading")

    def _lost_connections(self, culprit: ReportedExit) -> list[int]:
        """Return the ranks that lost connections, if nothing else ended the job.

        The first to notice it is no more to blame than the other end of its connection. If only one
        is known to have noticed, the ranks that ended in an unknown way belong to them. A rank that
        aborted itself is to blame, unless several did so at once.
        """
        if is_unknown(culprit.event) or is_cause(culprit):
            return []
        if has_aborted_itself(culprit):
            aborted = self._alike(culprit)
            return aborted if len(aborted) > 1 else []
        consequences = {r: other for r, other in self._abnormal.items() if not is_cause(other)}
        lost = sorted(r for r, other in consequences.items() if not is_unknown(other.event))
        lost = lost if len(lost) > 1 else sorted(consequences)
        return lost if len(lost) > 1 else []

    def _failure_of_all(self, first: ReportedExit, observation: Observation) -> Finding:
        """Return a finding that blames no rank and no node."""
        ranks, cause = self._alike_or_unknown(first, observation), cause_of(first.event)
        causes = {without_numbers(cause_of(self._abnormal[rank].event)) for rank in ranks}
        if first.event.signal is not None and len(causes) > 1:
            cause = ending(first.event)
        is_all = len(ranks) == self.generation.topology.world_size
        subject = f"All {len(ranks)} ranks" if is_all else f"R{ranks_text(ranks)[1:]}"
        was_sent = first.event.signal in SENT_SIGNALS
        when = " at once" if first.event.exit_code is None else ""
        nobody = "all ranks ended within a second on every node: none of them ended the others"
        return self.finding(
            "failure:exit",
            cause=cause,
            summary=f"{subject} {predicate(cause, is_plural=True)}{when}.",
            now_ns=observation.now_ns,
            ranks=ranks,
            can_checkpoint=False,
            advice=_ALL_KILLED_ADVICE if was_sent else None,
            evidence=[Evidence(nobody), *_endings(ranks, observation), *self._followers(ranks)],
            follows=self._follows(first, observation, is_explained=False),
        )

    def _stopped_on_request(self, observation: Observation) -> list[Finding]:
        """Report the ranks whose agents were shut down, whose torchrun a signal asked to end, or
        that Ctrl-C ended, after all have ended, or those of all nodes had time to end."""
        world_size = self.generation.topology.world_size
        ended = self._requested.keys() | self._abnormal.keys() | self._finished.keys()
        newest_ns = max(exited.received_ns for exited in self._requested.values())
        ranks = sorted(self._requested)
        decided_ns = newest_ns + int(self.settings.first_exit_seconds * 1e9)
        is_early = len(ended) < world_size and observation.now_ns < decided_ns
        if is_early or ranks == self._reported_requested or self._reported_rank is not None:
            return []
        self._reported_requested = ranks
        nodes = sorted({exited.node for exited in self._requested.values()})
        is_all = 1 < len(ranks) == world_size
        subject = f"All {len(ranks)} ranks" if is_all else f"R{ranks_text(ranks)[1:]}"
        verb = "was" if len(ranks) == 1 else "were"
        event = self._requested[ranks[0]].event
        number = event.launcher_signal
        if number is None and not event.drained:
            number = signal.SIGINT
            why, evidence = "Ctrl-C (SIGINT)", "nodes whose ranks ended by Ctrl-C"
        elif number is None:
            agents = f"agent of {nodes[0]} was" if len(nodes) == 1 else "agents of their nodes were"
            why, evidence = f"the {agents} shut down", "agents that were shut down"
        else:
            why = f"torchrun received {signal_name(number)}"
            evidence = "nodes whose torchrun received a signal to end"
        return [
            self.finding(
                "failure:exit",
                cause=STOPPED_ON_REQUEST,
                # Ctrl-C is of a person, who knows it.
                severity="info" if number == signal.SIGINT else "critical",
                summary=f"{subject} {verb} stopped on request: {why}.",
                now_ns=observation.now_ns,
                ranks=ranks,
                can_checkpoint=False,
                advice=None if number in (None, signal.SIGINT) else _ALL_KILLED_ADVICE,
                evidence=[Evidence(f"{evidence}: {', '.join(nodes)}"), *self._followers(ranks)],
                follows=HANG.name if _is_hung(observation) else None,
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
        if is_explained or not _is_hung(observation):
            return None
        event = culprit.event
        was_killed = event.signal in SENT_SIGNALS or is_unknown(event)
        return HANG.name if was_killed or not is_cause(culprit) else None


def _finished_ns(exited: ReportedExit, observation: Observation) -> int:
    """Return when the rank reported that it had finished, at the latest when its process ended."""
    live = observation.ranks.get(exited.event.rank)
    if live is None or live.status != "finished":
        return exited.time_ns
    return exited.time_ns - max(exited.event.time_ns - live.frozen_since_ns, 0)


def _is_hung(observation: Observation) -> bool:
    """Return whether a hang is reported, and not only for information."""
    return any(one.kind == HANG.name and one.severity != "info" for one in observation.active)


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


def _failed_save(error: str, rank: int, observation: Observation) -> str:
    """Return why the rank's last checkpoint failed, if this error is the reason; else empty."""
    live = observation.ranks.get(rank)
    reason = None if live is None or live.state is None else live.state.view.save_failure
    start = error[:_COMPARED_CHARACTERS]
    return reason if reason is not None and start and start in reason else ""


def _has_raised(rank: int, observation: Observation) -> bool:
    """Return whether the rank's state page shows that it raised an error."""
    live = observation.ranks.get(rank)
    return live is not None and live.status == "failed"
