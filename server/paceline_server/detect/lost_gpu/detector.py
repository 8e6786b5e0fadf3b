"""Flags GPUs that are lost, hung or in error, as NVML and the kernel's log of their node tell it.

What the driver calls an XID is a failure where NVIDIA's advice is to reset or power-cycle, and a
warning with that advice where the GPU goes on. Both collectors may tell of one: it is one incident,
and so is a burst of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import msgspec

from paceline_server.detect.causes.catalog import CAUSES
from paceline_server.detect.causes.checks.kernel_log import is_read
from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Evidence, Finding, cleared
from paceline_server.detect.kinds import FAILURE, GPU_ERROR, Kind
from paceline_server.detect.lost_gpu.gpu_trouble import GpuTrouble, trouble_of
from paceline_server.detect.lost_gpu.settings import DEFAULTS, LostGpuSettings
from paceline_server.detect.observation import Generation, Observation, ReportedDeviceEvent
from paceline_server.policy import Policy

LOST = "GPU lost"
HUNG = "GPU hung"
XID = "GPU error (XID)"
_READ_NS = 5_000_000_000
_LOG_NS = 3_000_000_000  # the log is read once a second
_CLOCKS_NS = 5_000_000_000
_TROUBLES_KEPT = 8  # of one GPU: a sick one has several sorts, over and over

Place = tuple[str, str]  # node, device


@dataclass(slots=True)
class _Sick:
    """What is known of one GPU; `codes` were told."""

    finding: Finding
    last_ns: int
    codes: set[str] = field(default_factory=set)


class LostGpuDetector(Detector):
    """Finding kind `failure` or `gpu_error`, cause `GPU lost`, `GPU hung` or `GPU error (XID)`.

    Fingerprints `failure:gpu:AGENT:DEVICE`, `gpu_error:AGENT:DEVICE`. Only GPUs that a rank of
    this generation computes on; of a GPU that nobody can name, no more than a warning.
    """

    kinds: ClassVar[tuple[Kind, ...]] = (FAILURE, GPU_ERROR)
    order: ClassVar[int] = 31

    def __init__(
        self, generation: Generation, policy: Policy, settings: LostGpuSettings = DEFAULTS
    ) -> None:
        super().__init__(generation, policy)
        self.settings = settings
        self._sick: dict[Place, _Sick] = {}
        # XIDs that NVML told and the kernel's log, which says more, has not told yet, by code
        self._plain: dict[tuple[Place, str], ReportedDeviceEvent] = {}
        self._silent: dict[Place, ReportedDeviceEvent] = {}  # hung, perhaps only for a moment

    def update(self, seen: Observation) -> list[Finding]:
        findings: list[Finding] = []
        for one in seen.device_events:
            place = (one.node, one.event.device)
            if one.event.kind == "gpu_back":
                findings += self._back(place, seen.now_ns)
            elif one.event.kind == "gpu_hung":
                self._silent.setdefault(place, one)
            else:
                findings += self._see(one, seen)
        late = self._still_silent(seen) + self._unexplained(seen)
        return findings + late + self._over(seen.now_ns)

    def _still_silent(self, seen: Observation) -> list[Finding]:
        limit_ns = seen.now_ns - int(self.policy.gpu_hung_seconds * 1e9)
        due = [place for place, one in self._silent.items() if one.event.time_ns <= limit_ns]
        return [finding for place in due for finding in self._see(self._silent.pop(place), seen)]

    def _unexplained(self, seen: Observation) -> list[Finding]:
        """What the log should have told by now counts as NVML told it."""
        due = [
            key for key, one in self._plain.items() if one.event.time_ns <= seen.now_ns - _LOG_NS
        ]
        return [
            finding for key in due for finding in self._see(self._plain.pop(key), seen, alone=True)
        ]

    def _see(
        self, one: ReportedDeviceEvent, seen: Observation, *, alone: bool = False
    ) -> list[Finding]:
        place, now_ns = (one.node, one.event.device), seen.now_ns
        trouble = trouble_of(one.event)
        ranks = self._ranks_on(one)
        if trouble is None or not ranks or self._is_old(one):
            return []
        is_logged = is_read(seen.telemetry, one.node, one.event.time_ns - _READ_NS)
        if trouble.is_plain and is_logged and not alone:
            self._plain.setdefault((place, trouble.code), one)
            return self._join(place, trouble.code, now_ns)
        known = self._sick.get(place)
        if known is None:
            finding = self._finding(one, trouble, ranks, now_ns, [])
            self._sick[place] = _Sick(finding, now_ns, {trouble.code})
            return self._join(place, trouble.code, now_ns) or [finding]
        known.last_ns = now_ns
        if trouble.code in known.codes or len(known.codes) >= _TROUBLES_KEPT:
            return []
        known.codes.add(trouble.code)
        told = self._worse(known, one, trouble, ranks, now_ns)
        return [*told, *self._join(place, trouble.code, now_ns)]

    def _join(self, place: Place, code: str, now_ns: int) -> list[Finding]:
        """Told by both: one fact with two witnesses, however often either repeats it."""
        known = self._sick.get(place)
        if known is None or code not in known.codes or not self._plain.pop((place, code), None):
            return []
        witness = Evidence(f"NVML of {place[0]} reported XID {code} of {place[1]} as well")
        if witness in known.finding.evidence:
            return []
        evidence = [*known.finding.evidence, witness]
        known.finding = msgspec.structs.replace(
            known.finding, detected_ns=now_ns, evidence=evidence
        )
        return [known.finding]

    def _is_old(self, one: ReportedDeviceEvent) -> bool:
        """Told late, of processes that are gone. A lost GPU is lost until it is back."""
        since_ns = self.generation.started_ns - _CLOCKS_NS
        return one.event.kind != "gpu_lost" and one.event.time_ns < since_ns

    def _worse(
        self,
        known: _Sick,
        one: ReportedDeviceEvent,
        trouble: GpuTrouble,
        ranks: list[int],
        now_ns: int,
    ) -> list[Finding]:
        """Another sort of error of the same GPU: the gravest gives the incident its name."""
        before = known.finding
        finding = self._finding(one, trouble, ranks, now_ns, before.evidence)
        if _gravity(finding) <= _gravity(before):
            evidence = [*before.evidence, finding.evidence[0]]
            known.finding = msgspec.structs.replace(before, evidence=evidence)
            return [known.finding]
        known.finding = finding
        if finding.fingerprint == before.fingerprint:
            return [finding]
        over = cleared(before, finding.summary, now_ns)
        return [finding, over]

    def _back(self, place: Place, now_ns: int) -> list[Finding]:
        self._silent.pop(place, None)
        known = self._sick.get(place)
        if known is None or known.finding.cause not in (LOST, HUNG):
            return []
        del self._sick[place]
        node, device = place
        return [cleared(known.finding, f"{device} of {node} is back.", now_ns)]

    def _over(self, now_ns: int) -> list[Finding]:
        """Warnings go when nothing more was told; of what failed, the restart is the end."""
        limit_ns = int(self.settings.error_reported_seconds * 1e9)
        quiet = [
            place
            for place, known in self._sick.items()
            if known.finding.kind == GPU_ERROR.name
            and known.finding.cause != HUNG
            and now_ns - known.last_ns >= limit_ns
        ]
        return [
            cleared(
                self._sick.pop(place).finding,
                f"{place[1]} of {place[0]} has reported no further error.",
                now_ns,
            )
            for place in quiet
        ]

    def _ranks_on(self, one: ReportedDeviceEvent) -> list[int]:
        """Those that compute on it; on any GPU of the node, if it is not known which it is."""
        device = one.event.device
        return [
            rank
            for rank, gpu in sorted(self.generation.gpus.items())
            if gpu is not None
            and self.generation.node(rank) == one.node
            and (device == f"gpu{gpu}" or not _is_named(device))
        ]

    def _finding(
        self,
        one: ReportedDeviceEvent,
        trouble: GpuTrouble,
        ranks: list[int],
        now_ns: int,
        earlier: list[Evidence],
    ) -> Finding:
        device, node = one.event.device, one.node
        named = _is_named(device)
        fatal = trouble.is_fatal and (named or trouble.is_of_node)
        rank = ranks[0] if len(ranks) == 1 else None
        used = "used by rank" + ("s " if len(ranks) > 1 else " ") + ", ".join(map(str, ranks))
        whose = f"{device} of {node}, {used}," if named else f"A GPU of {node} ({device})"
        if trouble.is_of_node:
            whose = f"{device} of {node}, which joins the GPUs of ranks {_few(ranks)},"
        cause = LOST if trouble.is_lost else HUNG if trouble.is_hung else XID
        detail = f": {one.event.detail}" if one.event.detail else ""
        return self.finding(
            f"{'failure:gpu' if fatal else 'gpu_error'}:{node}:{device}",
            kind=FAILURE if fatal else GPU_ERROR,
            cause=cause,
            summary=f"{whose} {trouble.what}.",
            now_ns=now_ns,
            rank=rank,
            ranks=ranks if rank is None else [],
            node=node,
            suspects_node=fatal,
            can_checkpoint=not fatal,
            advice=trouble.advice or CAUSES[cause].advice,
            evidence=[
                Evidence(f"{node} reported {device} {trouble.short}{detail}"),
                *earlier,
            ],
        )


def _is_named(device: str) -> bool:
    return device.startswith("gpu") and device.removeprefix("gpu").isdecimal()


def _few(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def _gravity(finding: Finding) -> tuple[bool, bool]:
    return finding.kind == FAILURE.name, finding.cause == LOST
