"""Ranks that have been slower than their peers in most of the steps that are kept.

If they were so from the first step on, no level rose. It is a property of the model, and advice,
unless it is too high for that. If they were not, noise hid the rise, and time has made up for it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from paceline_server.detect.causes.catalog import UNKNOWN
from paceline_server.detect.finding import Evidence, Finding
from paceline_server.detect.observation import Generation, Observation
from paceline_server.detect.reporting import cost_of, cost_text
from paceline_server.detect.slow_line import LineSearch
from paceline_server.detect.statistics.change_point import (
    KEPT,
    MAD_TO_SIGMA,
    MEDIAN_VARIANCE,
)
from paceline_server.detect.statistics.peer_levels import PeerLevels, steps_since_jump
from paceline_server.detect.straggler.settings import StragglerSettings
from paceline_server.medians import column_medians, median
from paceline_server.steps.peers import medians_of_others

Floats = npt.NDArray[np.float64]

_STEPS_BETWEEN_CHECKS = 8
_CHANCE_SIGMAS = 4.0  # a difference this many times larger than those of the others is its own


@dataclass(slots=True)
class _Advice:
    finding: Finding
    search: LineSearch  # for its Python line


class SlowSinceFirst:
    """The levels of all ranks relative to the other ranks of their stage."""

    def __init__(self, generation: Generation, settings: StragglerSettings) -> None:
        self._settings = settings
        self._stages = generation.topology.pp
        self._peers = generation.topology.world_size // self._stages - 1
        self._relative: deque[Floats] = deque(maxlen=KEPT)
        self._levels: deque[Floats] = deque(maxlen=KEPT)
        # Typical levels in the first steps: relative to the others, and absolute.
        self._first: tuple[Floats, Floats] | None = None
        self.known: dict[int, _Advice] = {}  # by rank, from its report to its recovery

    @property
    def steps(self) -> int:
        return len(self._relative)

    @property
    def is_outlier(self) -> bool:
        """Whether a slow rank has several peers: a single one may be the outlier itself."""
        return self._peers >= self._settings.chronic_fault_peers

    def add(self, levels: Floats) -> None:
        relative = np.full((self._stages, levels.size // self._stages), np.nan)
        for stage, own in enumerate(levels.reshape(self._stages, -1)):
            known = np.flatnonzero(~np.isnan(own))
            if known.size > 1:
                relative[stage, known] = own[known] - medians_of_others(own[known])
        self._relative.append(relative.ravel())
        self._levels.append(levels)
        if self._first is None and self.steps == self._settings.chronic_steps:
            kept = self._relative, self._levels
            self._first = (column_medians(np.array(kept[0])), column_medians(np.array(kept[1])))

    def is_due(self, pushed: int) -> bool:
        """Return whether enough steps were measured; `pushed`: their number."""
        least = self._settings.chronic_fault_steps
        return self.steps == least or (self.steps > least and not pushed % _STEPS_BETWEEN_CHECKS)

    def unexplained(self, levels: PeerLevels) -> Floats:
        """Return the relative levels by step and rank, without the reported rises of `levels`."""
        return levels.unexplained_rows(self._relative)

    def found(
        self, rows: Floats, levels: PeerLevels, accident: float
    ) -> Iterator[tuple[int, float]]:
        """Yield new slow ranks, each with its level.

        Args:
            rows: as `unexplained` returns them.
            levels: of the same steps.
            accident: the highest level that ranks which wait for CPUs by chance would have.
        """
        settings = self._settings
        is_early = self.steps < settings.chronic_steps
        least = settings.chronic_fault_slowdown if is_early else settings.chronic_slowdown
        # Exceeded in three of four steps, so that noise around the threshold causes no finding.
        level = np.sort(np.where(np.isnan(rows), -np.inf, rows), axis=0)[len(rows) // 4]
        typical = column_medians(rows)
        is_clear = level >= max(levels.needed * _error_of_median(rows), accident)
        for rank in np.flatnonzero(is_clear & (level >= math.log(least))).tolist():
            is_known = rank in self.known or levels.explained[rank]
            if not is_known and not self._is_like_others(rank, typical):
                yield rank, float(typical[rank])

    def began_later(self, rank: int, size: float) -> bool:
        """Return whether a rank that is slow by `size` was about as fast as its peers at first."""
        return self._first is not None and bool(self._first[0][rank] < size / 2.0)

    def steps_since_rise(self, rank: int, size: float) -> int | None:
        """Return for how many steps a rank that began to be slow later has been so.

        None if it has not become slower itself, but its peers faster.
        """
        if self._first is None or not self.began_later(rank, size):
            return None
        relative, absolute = self._first
        changed = column_medians(np.array(self._levels)) - absolute
        first, end = self._stage_of(rank)
        others = np.delete(changed[first:end], rank - first)
        of_others = column_medians(others[:, np.newaxis])[0]
        if not (changed[rank] >= size / 2.0 and of_others > -size / 2.0):
            return None
        risen = np.array(self._relative)[:, rank] - relative[rank]
        return steps_since_jump(risen, size) or self.steps

    def recovered(self, rows: Floats) -> list[int]:
        """Return the ranks with advice that have been as fast as their peers for long enough.

        `rows`: as `unexplained` returns them.
        """
        recent = column_medians(rows[-self._settings.chronic_steps :])
        return [
            rank
            for rank in self.known
            if recent[rank] < math.log(self._settings.chronic_slowdown) / 2.0
        ]

    def with_lines(self, observation: Observation) -> list[Finding]:
        """Return the advice on ranks whose Python line is known by now."""
        found = []
        for rank, known in self.known.items():
            before, search = known.finding, known.search
            if search.finds(before.detected_ns, observation) and search.line is not None:
                known.finding = msgspec.structs.replace(
                    before,
                    summary=f"{before.summary} {search.line.sentence_about(rank)}",
                    evidence=[*before.evidence, search.line.evidence],
                    detected_ns=observation.now_ns,
                )
                found.append(known.finding)
        return found

    def advise(
        self,
        blank: Finding,
        rank: int,
        subject: str,
        slowdown: float,
        speedup: float | None,
        search: LineSearch,
    ) -> Finding:
        """Return the advice on a rank, which is known from now on.

        Args:
            blank: a finding of its straggler without a text.
            subject: as a sentence about the rank begins.
            speedup: of a job in which the rank is as fast as its peers; None if it is unknown.
            search: for its Python line.
        """
        whom = "peers" if self.is_outlier else "only peer"
        majority = "" if self.is_outlier else "two ranks have no majority, so "
        if self.began_later(rank, math.log(slowdown)):
            cause = UNKNOWN
            lasts = f"was {slowdown:.2f}x slower than its {whom} in most of the last {self.steps} "
            lasts += "steps, but not in the first ones"
            why, of_other = "its work or its device changed", "those of the other"
            advice = f"Compare the device, node and data of rank {rank} with those at the start."
        else:
            cause = "chronic imbalance"
            lasts = f"has been {slowdown:.2f}x slower than its {whom} since the first step"
            why = "it has more work or a weaker device"
            of_other = "the other has less work or a better one"
            advice = (
                f"Give rank {rank} less work, or another device at the next start. "
                "A restart alone changes nothing."
            )
        if not self.is_outlier:
            why += f", or {of_other}"
        cost_ratio = cost_of(speedup)
        cost = "" if cost_ratio is None else f" It {cost_text(cost_ratio, speedup)}."
        finding = msgspec.structs.replace(
            blank,
            fingerprint=f"straggler:chronic:{rank}",
            cause=cause,
            persistence="chronic",
            severity="info",
            slowdown=slowdown,
            cost_ratio=cost_ratio,
            speedup=speedup,
            summary=f"{subject} {lasts}: {majority}{why}.{cost}",
            advice=advice,
            evidence=[
                Evidence(
                    f"compute time {slowdown:.2f}x that of the other ranks of its stage in most of "
                    f"{self.steps} steps",
                    "self_seconds_ratio",
                    slowdown,
                    1.0,
                )
            ],
            profiles_wanted=search.ranks,
        )
        self.known[rank] = _Advice(finding, search)
        return finding

    def _stage_of(self, rank: int) -> tuple[int, int]:
        """Return the first rank of its stage, and that after the last."""
        size = self._peers + 1
        return rank // size * size, (rank // size + 1) * size

    def _is_like_others(self, rank: int, typical: Floats) -> bool:
        """Return whether the other ranks of its stage differ among each other about as much.

        They do if sequences of different lengths make some of them slow for a number of steps.
        """
        first, end = self._stage_of(rank)
        others = np.delete(typical[first:end], rank - first)
        others = others[~np.isnan(others)]
        if others.size < 2:
            return False
        between = MAD_TO_SIGMA * median(np.abs(others - median(others)))
        return bool(typical[rank] < _CHANCE_SIGMAS * between)


def _error_of_median(rows: Floats) -> float:
    """Return the standard error of the median of a column; columns scatter alike."""
    around = np.abs(rows - column_medians(rows)).ravel()
    known = around[~np.isnan(around)]
    scatter = MAD_TO_SIGMA * median(known) if known.size else 0.0
    return scatter * math.sqrt(MEDIAN_VARIANCE / max(len(rows), 1))
