"""Flags ranks that ended without being told to.

The first to go is the culprit: its peers follow within moments, because their connections break.
Exits that look like such a consequence are held back until the true cause had time to arrive: a
rank that died first elsewhere, or a node that fell silent. So are those of ranks that somebody else
started, of which nobody knows how they ended: of these, who waited for others was a victim, and
those that went together on one node are named together.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from typing import ClassVar

from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Evidence, Finding
from paceline_server.detect.hang.wait_for_graph import communication_frames
from paceline_server.detect.kinds import FAILURE, Kind
from paceline_server.detect.observation import (
    Generation,
    Observation,
    ReportedDeviceEvent,
    ReportedExit,
)
from paceline_server.detect.rank_exit.settings import DEFAULTS, RankExitSettings
from paceline_server.detect.telemetry import MetricSeries
from paceline_server.policy import Policy
from paceline_wire import metric_names
from paceline_wire.batch import RankExited

_CONSEQUENCE = re.compile(
    r"connection (reset|closed|refused|was closed)|broken pipe|closed by (peer|remote)"
    r"|remote (peer|process) (exited|closed)|socket ?error|nccl.*(remote|system) error|timed? ?out"
    r"|gloo.*(enforce|transport)|\[gloo|processgroup|not? heartbeat|distbackenderror",
    re.IGNORECASE,
)
_OUT_OF_MEMORY = re.compile(r"out of memory|memoryerror|cannot allocate memory", re.IGNORECASE)
_LONGEST_QUOTE = 200
# As kernels write it, and as torch.utils.data tells of a worker that is gone.
_KILLED = re.compile(r"Killed process (\d+)\b")
_WORKERS = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)")
OUT_OF_MEMORY = "out of memory"
KILLS = metric_names.RANK_KERNEL_EVENTS_TOTAL
KERNEL_LOG_READ = metric_names.KERNEL_LOG_LOST_TOTAL  # told each time
_READ_OF_LATE_NS = 5_000_000_000
_KILLS_KEPT = 64
_TOGETHER_NS = 1_000_000_000
_KILL_BEFORE_EXIT_NS = 30_000_000_000  # a large process takes its time to be torn down
_LESS_MEMORY = (
    "Give it more host memory (or raise the memory limit of its cgroup), or use less of it: fewer "
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
        self._waited: set[int] = set()  # ranks of those that were in a communication
        self._blamed: int | None = None
        self._kills: list[ReportedDeviceEvent] = []  # by the kernel, for memory
        self._out_of_memory = False  # so it was told

    def update(self, seen: Observation) -> list[Finding]:
        for one in seen.exits:
            if _is_abnormal(one.event) and one.event.rank not in self._abnormal:
                self._abnormal[one.event.rank] = one
                live = seen.ranks.get(one.event.rank)
                if live is not None and live.state and communication_frames(live.state.view):
                    self._waited.add(one.event.rank)
        kills = [one for one in seen.device_events if one.event.kind == "oom_kill"]
        self._kills = [*self._kills, *kills][-_KILLS_KEPT:]
        if not self._abnormal:
            return []
        culprit = min(self._abnormal.values(), key=self._first_to_go)
        if culprit.event.rank == self._blamed:
            return self._explained_since(culprit, seen)
        if self._may_still_be_explained(culprit, seen):
            return []
        if self._blamed is not None and not _is_cause(culprit):
            return []  # a later consequence with an earlier clock changes nothing
        self._blamed = culprit.event.rank
        return [self._finding(culprit, seen)]

    def _first_to_go(self, one: ReportedExit) -> tuple[bool, bool, int, int]:
        event = one.event
        was_victim = _is_unknown(event) and event.rank in self._waited
        return not _is_cause(one), was_victim, event.time_ns, event.rank

    def _gone_with(self, culprit: ReportedExit) -> list[int]:
        """With itself; a launcher ends all of a node's ranks when one of them has ended."""
        event = culprit.event
        if not _is_unknown(event):
            return [event.rank]
        return sorted(
            rank
            for rank, one in self._abnormal.items()
            if one.node == culprit.node
            and _is_unknown(one.event)
            and abs(one.event.time_ns - event.time_ns) <= _TOGETHER_NS
            and (rank in self._waited) == (event.rank in self._waited)
        )

    def _may_still_be_explained(self, culprit: ReportedExit, seen: Observation) -> bool:
        """Another rank's or node's death may be on its way to us."""
        if _is_cause(culprit):
            return self._awaits_kernel_log(culprit, seen)
        settled_ns = culprit.received_ns + int(self.settings.first_exit_seconds * 1e9)
        # A node not heard of since then is either heard soon, or found to be lost and explains it.
        return seen.now_ns < settled_ns or any(
            seen.last_seen_ns.get(node, 0) <= settled_ns for node in self.generation.nodes.values()
        )

    def _awaits_kernel_log(self, culprit: ReportedExit, seen: Observation) -> bool:
        """Whether the kernel's log of that second, where it is read, is still on its way."""
        event = culprit.event
        if event.signal != signal.SIGKILL or self._killed_for_memory(culprit, seen) is not None:
            return False
        wait_ns = int(self.settings.kernel_log_seconds * 1e9)
        read = seen.telemetry.find(culprit.node, KERNEL_LOG_READ)
        if read is None or seen.now_ns >= culprit.received_ns + wait_ns:
            return False
        read_ns = read.latest_ns() or 0.0
        return event.time_ns - _READ_OF_LATE_NS < read_ns < event.time_ns

    def _explained_since(self, culprit: ReportedExit, seen: Observation) -> list[Finding]:
        """The kernel's log is read once a second: it may come after the exit."""
        if self._out_of_memory or self._killed_for_memory(culprit, seen) is None:
            return []
        return [self._finding(culprit, seen)]

    def _killed_for_memory(self, culprit: ReportedExit, seen: Observation) -> Evidence | None:
        """What the kernel's log says of this very process, or of one it died of."""
        event, job = culprit.event, self.generation.job
        for one in self._kills:
            if one.node == culprit.node and _is_of(one.event.detail, event):
                text = f"the kernel's log of {one.node}: {one.event.detail[:_LONGEST_QUOTE]}"
                return Evidence(text, KILLS)
        if event.signal != signal.SIGKILL:
            return None
        labels = {"job": job, "rank": str(event.rank), "kind": "oom_kill"}
        series = seen.telemetry.find(culprit.node, KILLS, **labels)
        since_ns = event.time_ns - _KILL_BEFORE_EXIT_NS
        if series is None or (rate := _grown_since(series, since_ns)) <= 0:
            return None
        text = f"the kernel of {culprit.node} killed rank {event.rank} for memory"
        return Evidence(text, KILLS, rate, 0.0)

    def _finding(self, culprit: ReportedExit, seen: Observation) -> Finding:
        event = culprit.event
        killed = self._killed_for_memory(culprit, seen)
        self._out_of_memory = killed is not None
        cause = _cause(event) if killed is None else OUT_OF_MEMORY
        quote = _last_line(event.log_tail)
        evidence = [
            Evidence(
                f"process {event.pid} of {self.generation.rank_text(event.rank)}: {_cause(event)}"
            )
        ]
        if killed is not None:
            evidence.append(killed)
        if quote:
            evidence.append(Evidence(f"its last words: {quote}"))
        evidence += _memory_evidence(culprit, seen, is_sure=killed is not None)
        together = self._gone_with(culprit)
        rank = event.rank if len(together) == 1 else None
        subject = self.generation.subject(event.rank)
        if rank is None:
            subject = f"Ranks {', '.join(map(str, together))} on {culprit.node}"
            evidence += _endings(together, seen)
        followers = sorted(self._abnormal.keys() - set(together))
        if followers:
            evidence.append(Evidence(f"then ranks {', '.join(map(str, followers))} ended as well"))
        return self.finding(
            "failure:exit",
            cause=cause,
            summary=f"{subject} ended: {cause}.",
            now_ns=seen.now_ns,
            rank=rank,
            ranks=together if rank is None else [],
            node=self.generation.node(event.rank) or culprit.node,
            can_checkpoint=False,
            advice=_LESS_MEMORY if killed is not None else None,
            evidence=evidence,
        )


def _endings(ranks: Sequence[int], seen: Observation) -> Iterator[Evidence]:
    """What their pages tell apart: an error that was raised, and how far each had come."""
    alike: dict[tuple[int, bool], list[int]] = {}
    for rank in ranks:
        live = seen.ranks.get(rank)
        if live is not None and live.state is not None:
            view = live.state.view
            alike.setdefault((view.step, view.status == "failed"), []).append(rank)
    for (step, raised), those in sorted(alike.items()):
        subject = f"rank{'s' if len(those) > 1 else ''} {', '.join(map(str, those))}"
        how = "raised an error" if raised else "ended without raising an error"
        yield Evidence(f"{subject} {how} in step {step}")


def _is_abnormal(event: RankExited) -> bool:
    """Ending with 0 is how training ends; ending on command is what we asked for."""
    return not event.commanded and event.exit_code != 0


def _is_unknown(event: RankExited) -> bool:
    """It was somebody else's child."""
    return event.exit_code is None and event.signal is None


def _is_cause(one: ReportedExit) -> bool:
    """Nobody sends signals because a connection broke (torch's own abort, SIGABRT, apart)."""
    if _is_unknown(one.event):
        return False
    if one.event.signal is not None:
        return one.event.signal != signal.SIGABRT
    return not _CONSEQUENCE.search(one.event.log_tail)


def _cause(event: RankExited) -> str:
    if event.signal is not None:
        return f"killed by {signal_name(event.signal)}"
    if _OUT_OF_MEMORY.search(event.log_tail):
        return OUT_OF_MEMORY
    if event.exit_code is None:
        return "process gone"
    quote = _last_line(event.log_tail)
    return f"exit code {event.exit_code}" + (f": {quote}" if quote else "")


def signal_name(number: int) -> str:
    """`SIGKILL`; `signal 99` for one this system does not know."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_line(log_tail: str) -> str:
    """The last line that says something; the end of a traceback is the error itself."""
    lines = [line.strip() for line in log_tail.splitlines() if line.strip()]
    return lines[-1][:_LONGEST_QUOTE] if lines else ""


def _is_of(kill: str, event: RankExited) -> bool:
    """Of the rank, or of a loader's worker that its last words name."""
    if event.signal == signal.SIGKILL and f"[rank {event.rank} of {event.job}]" in kill:
        return True
    found = _KILLED.search(kill)
    if found is None:
        return False
    if event.signal == signal.SIGKILL:
        return int(found[1]) == event.pid
    return any(found[1] in named[1].split(", ") for named in _WORKERS.finditer(event.log_tail))


def _grown_since(series: MetricSeries, since_ns: int) -> float:
    """By how much a count grew; one that begins since then began at nothing."""
    before = [value for at, value in series.points if at < since_ns]
    return (series.latest() or 0.0) - (before[-1] if before else 0.0)


def _memory_evidence(culprit: ReportedExit, seen: Observation, *, is_sure: bool) -> list[Evidence]:
    """The kernel kills with SIGKILL as well, when memory runs out."""
    if culprit.event.signal != signal.SIGKILL:
        return []
    name = metric_names.MEMORY_MEMAVAILABLE_BYTES
    free = seen.telemetry.latest(culprit.node, name)
    total = seen.telemetry.latest(culprit.node, metric_names.MEMORY_MEMTOTAL_BYTES)
    if free is None or not total or free >= 0.05 * total:
        return []
    text = f"{culprit.node} had only {free / 2**20:.0f} MiB of memory left"
    text += "" if is_sure else ": the kernel may have killed it"
    return [Evidence(text, name, free, total)]
