"""Detect GPUs that are lost, hung or in error, from NVML and the kernel log of their node.

An XID (a driver error) is a failure if NVIDIA advises a reset or power cycle, else a warning with
NVIDIA's advice. An XID that both NVML and the kernel log report is one incident, and so is a burst
of XIDs of one GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import msgspec

from paceline_server.detect.causes.catalog import CAUSES, GPU_HUNG, GPU_LOST, GPU_XID
from paceline_server.detect.causes.checks.kernel_log import is_read
from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Evidence, Finding, cleared
from paceline_server.detect.kinds import FAILURE, GPU_ERROR, Kind
from paceline_server.detect.lost_gpu.gpu_error import (
    GpuError,
    gpu_error_of,
    is_of_another_job,
)
from paceline_server.detect.lost_gpu.settings import DEFAULTS, LostGpuSettings
from paceline_server.detect.observation import Generation, Observation, ReportedDeviceEvent
from paceline_server.detect.rank_list import ranks_text
from paceline_server.policy import Policy

_LOG_IS_READ_NS = 5_000_000_000
_LOG_DELAY_NS = 3_000_000_000  # the agent reads the kernel log once a second
_CLOCK_ERROR_NS = 5_000_000_000
_MAX_ERROR_KINDS = 8  # per GPU: a faulty GPU repeats several kinds of errors

GpuKey = tuple[str, str]  # node, device


@dataclass(slots=True)
class _FaultyGpu:
    """The finding about one GPU, and the error codes that it covers."""

    finding: Finding
    last_error_ns: int
    codes: set[str] = field(default_factory=set)


class LostGpuDetector(Detector):
    """Finding kind `failure` or `gpu_error`, cause `GPU lost`, `GPU hung` or `GPU error (XID)`.

    Fingerprints `failure:gpu:AGENT:DEVICE`, `gpu_error:AGENT:DEVICE`. It covers only GPUs on which
    a rank of this generation computes. An error of an unidentified GPU is only a warning.
    """

    kinds: ClassVar[tuple[Kind, ...]] = (FAILURE, GPU_ERROR)
    order: ClassVar[int] = 31

    def __init__(
        self, generation: Generation, policy: Policy, settings: LostGpuSettings = DEFAULTS
    ) -> None:
        super().__init__(generation, policy)
        self.settings = settings
        self._faulty: dict[GpuKey, _FaultyGpu] = {}
        # XIDs reported by NVML that wait for the more detailed message in the kernel log, by GPU
        # and code.
        self._awaiting_log: dict[tuple[GpuKey, str], ReportedDeviceEvent] = {}
        # Newest XID of another job's process, by GPU and code: NVML does not report whose it is.
        self._of_other_jobs: dict[tuple[GpuKey, str], int] = {}
        # GPUs that do not respond, perhaps only for a moment.
        self._unresponsive: dict[GpuKey, ReportedDeviceEvent] = {}

    def update(self, observation: Observation) -> list[Finding]:
        findings: list[Finding] = []
        for reported in observation.device_events:
            gpu_key = (reported.node, reported.event.device)
            if reported.event.kind == "gpu_back":
                findings += self._responds_again(gpu_key, observation.now_ns)
            elif reported.event.kind == "gpu_hung":
                self._unresponsive.setdefault(gpu_key, reported)
            else:
                findings += self._add(reported, observation)
        delayed = self._hung_gpus(observation) + self._without_log_message(observation)
        return findings + delayed + self._clear_old_warnings(observation.now_ns)

    def _hung_gpus(self, observation: Observation) -> list[Finding]:
        limit_ns = observation.now_ns - int(self.policy.gpu_hung_seconds * 1e9)
        due = [
            gpu_key
            for gpu_key, reported in self._unresponsive.items()
            if reported.event.time_ns <= limit_ns
        ]
        return [
            finding
            for gpu_key in due
            for finding in self._add(self._unresponsive.pop(gpu_key), observation)
        ]

    def _without_log_message(self, observation: Observation) -> list[Finding]:
        """Report XIDs from NVML that the kernel log should have contained by now."""
        due = [
            key
            for key, reported in self._awaiting_log.items()
            if reported.event.time_ns <= observation.now_ns - _LOG_DELAY_NS
        ]
        return [
            finding
            for key in due
            for finding in self._add(self._awaiting_log.pop(key), observation, without_log=True)
        ]

    def _add(
        self, reported: ReportedDeviceEvent, observation: Observation, *, without_log: bool = False
    ) -> list[Finding]:
        gpu_key, now_ns = (reported.node, reported.event.device), observation.now_ns
        error = gpu_error_of(reported.event)
        ranks = self._ranks_on(reported)
        if error is None or not ranks or self._is_old(reported):
            return []
        if is_of_another_job(reported.event, self.generation.job):
            self._awaiting_log.pop((gpu_key, error.code), None)
            self._of_other_jobs[gpu_key, error.code] = reported.event.time_ns
            return []
        other_ns = self._of_other_jobs.get((gpu_key, error.code))
        since_ns = reported.event.time_ns - _LOG_DELAY_NS
        if error.is_from_nvml and other_ns is not None and other_ns >= since_ns:
            return []
        is_logged = is_read(
            observation.telemetry, reported.node, reported.event.time_ns - _LOG_IS_READ_NS
        )
        if error.is_from_nvml and is_logged and not without_log:
            self._awaiting_log.setdefault((gpu_key, error.code), reported)
            return self._add_nvml_evidence(gpu_key, error.code, now_ns)
        known = self._faulty.get(gpu_key)
        if known is None:
            finding = self._finding(reported, error, ranks, now_ns, [])
            self._faulty[gpu_key] = _FaultyGpu(finding, now_ns, {error.code})
            return self._add_nvml_evidence(gpu_key, error.code, now_ns) or [finding]
        known.last_error_ns = now_ns
        if error.code in known.codes or len(known.codes) >= _MAX_ERROR_KINDS:
            return []
        known.codes.add(error.code)
        findings = self._add_error(known, reported, error, ranks, now_ns)
        return [*findings, *self._add_nvml_evidence(gpu_key, error.code, now_ns)]

    def _add_nvml_evidence(self, gpu_key: GpuKey, code: str, now_ns: int) -> list[Finding]:
        """Add that NVML reported the same XID as the kernel log, once."""
        known = self._faulty.get(gpu_key)
        if (
            known is None
            or code not in known.codes
            or not self._awaiting_log.pop((gpu_key, code), None)
        ):
            return []
        nvml_line = Evidence(f"NVML of {gpu_key[0]} also reported XID {code} of {gpu_key[1]}")
        if nvml_line in known.finding.evidence:
            return []
        evidence = [*known.finding.evidence, nvml_line]
        known.finding = msgspec.structs.replace(
            known.finding, detected_ns=now_ns, evidence=evidence
        )
        return [known.finding]

    def _is_old(self, reported: ReportedDeviceEvent) -> bool:
        """Return whether the error is from an earlier generation. A lost GPU stays lost."""
        since_ns = self.generation.started_ns - _CLOCK_ERROR_NS
        return reported.event.kind != "gpu_lost" and reported.event.time_ns < since_ns

    def _add_error(
        self,
        known: _FaultyGpu,
        reported: ReportedDeviceEvent,
        error: GpuError,
        ranks: list[int],
        now_ns: int,
    ) -> list[Finding]:
        """Add another kind of error of the same GPU. The most severe one names the incident."""
        before = known.finding
        finding = self._finding(reported, error, ranks, now_ns, before.evidence)
        if _severity_rank(finding) <= _severity_rank(before):
            evidence = [*before.evidence, finding.evidence[0]]
            known.finding = msgspec.structs.replace(before, evidence=evidence)
            return [known.finding]
        known.finding = finding
        if finding.fingerprint == before.fingerprint:
            return [finding]
        replaced = cleared(before, finding.summary, now_ns)
        return [finding, replaced]

    def _responds_again(self, gpu_key: GpuKey, now_ns: int) -> list[Finding]:
        self._unresponsive.pop(gpu_key, None)
        known = self._faulty.get(gpu_key)
        if known is None or known.finding.cause not in (GPU_LOST, GPU_HUNG):
            return []
        del self._faulty[gpu_key]
        node, device = gpu_key
        return [cleared(known.finding, f"{device} of {node} responds again.", now_ns)]

    def _clear_old_warnings(self, now_ns: int) -> list[Finding]:
        """Clear warnings about GPUs without further errors.

        A failure is resolved by the restart.
        """
        limit_ns = int(self.settings.error_reported_seconds * 1e9)
        without_errors = [
            gpu_key
            for gpu_key, known in self._faulty.items()
            if known.finding.kind == GPU_ERROR.name
            and known.finding.cause != GPU_HUNG
            and now_ns - known.last_error_ns >= limit_ns
        ]
        return [
            cleared(
                self._faulty.pop(gpu_key).finding,
                f"{gpu_key[1]} of {gpu_key[0]} has reported no further error.",
                now_ns,
            )
            for gpu_key in without_errors
        ]

    def _ranks_on(self, reported: ReportedDeviceEvent) -> list[int]:
        """Return the ranks on this GPU, or on all GPUs of the node if it is not identified."""
        device = reported.event.device
        return [
            rank
            for rank, gpu in sorted(self.generation.gpus.items())
            if gpu is not None
            and self.generation.node(rank) == reported.node
            and (device == f"gpu{gpu}" or not _is_identified(device))
        ]

    def _finding(
        self,
        reported: ReportedDeviceEvent,
        error: GpuError,
        ranks: list[int],
        now_ns: int,
        earlier: list[Evidence],
    ) -> Finding:
        device, node = reported.event.device, reported.node
        is_identified = _is_identified(device)
        is_fatal = error.is_fatal and (is_identified or error.is_of_node)
        rank = ranks[0] if len(ranks) == 1 else None
        subject = (
            f"{device} of {node}, used by {ranks_text(ranks)},"
            if is_identified
            else f"A GPU of {node} ({device})"
        )
        if error.is_of_node:
            subject = f"{device} of {node}, which connects the GPUs of {ranks_text(ranks)},"
        cause = GPU_LOST if error.is_lost else GPU_HUNG if error.is_hung else GPU_XID
        detail = f": {reported.event.detail}" if reported.event.detail else ""
        return self.finding(
            f"{'failure:gpu' if is_fatal else 'gpu_error'}:{node}:{device}",
            kind=FAILURE if is_fatal else GPU_ERROR,
            cause=cause,
            summary=f"{subject} {error.what}.",
            now_ns=now_ns,
            rank=rank,
            ranks=ranks if rank is None else [],
            node=node,
            suspects_node=is_fatal,
            can_checkpoint=not is_fatal,
            advice=error.advice or CAUSES[cause].advice,
            evidence=[
                Evidence(f"{node} reported {device} {error.short}{detail}"),
                *earlier,
            ],
        )


def _is_identified(device: str) -> bool:
    return device.startswith("gpu") and device.removeprefix("gpu").isdecimal()


def _severity_rank(finding: Finding) -> tuple[bool, bool]:
    return finding.kind == FAILURE.name, finding.cause == GPU_LOST
