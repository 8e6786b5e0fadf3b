"""The Python line in which a slow rank spends more of its time than a peer.

Both are sampled during the same seconds. A rank that is slow for a reason of its own, such as a
queue that it waits for, is often found in a line in which its peers rarely are; they wait for it in
other lines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline_server.detect.finding import Evidence
from paceline_server.detect.script_frame import script_frame
from paceline_server.percent import percent
from paceline_wire.batch import RankProfile
from paceline_wire.stacks import StackFrame

LEAST_SAMPLES = 50
LEAST_DIFFERENCE = 0.1  # between the shares of time in a line
LEAST_DEVIATIONS = 4.0  # multiple of the difference's standard deviation by chance
# Share of the largest difference: such lines are on the same way to where the time is spent.
_ALIKE = 0.8


@dataclass(frozen=True, slots=True)
class SlowLine:
    """The innermost line of the script on the way to where a slow rank spends more time."""

    rank: int
    peer: int
    line: StackFrame
    called: StackFrame | None  # by this line; None: nothing that is written in Python
    share: float  # share of time that the rank is in this line
    share_of_peer: float

    @property
    def sentence(self) -> str:
        """The line as part of a summary."""
        return f"It is in {self.line} for {self._times}."

    @property
    def evidence(self) -> Evidence:
        called = "" if self.called is None else f", which calls {self.called},"
        return Evidence(f"rank {self.rank} is in {self.line}{called} for {self._times}")

    @property
    def _times(self) -> str:
        peers = f"rank {self.peer} for {percent(self.share_of_peer)}"
        return f"{percent(self.share)} of the time, {peers}"


def slow_line(slow: RankProfile, peer: RankProfile) -> SlowLine | None:
    """Return in which line the slow rank is more often than the peer, and how often.

    None if there is no such line, as when the rank is slower in all of them alike.
    """
    if min(slow.samples, peer.samples) < LEAST_SAMPLES:
        return None
    shares, others = _shares(slow), _shares(peer)
    differences = {frame: share - others.get(frame, 0.0) for frame, share in shares.items()}
    most = max(differences.values(), default=0.0)
    if most < LEAST_DIFFERENCE:
        return None
    way = _longest_way(slow, differences, _ALIKE * most)
    line = script_frame(way)
    if line is None:
        return None
    share, other = shares[line], others.get(line, 0.0)
    together = (share * slow.samples + other * peer.samples) / (slow.samples + peer.samples)
    variance = together * (1.0 - together) * (1.0 / slow.samples + 1.0 / peer.samples)
    if share - other < LEAST_DEVIATIONS * math.sqrt(max(variance, 0.0)):
        return None
    called = None if line == way[0] else way[way.index(line) - 1]
    return SlowLine(slow.rank, peer.rank, line, called, share, other)


def _shares(profile: RankProfile) -> Mapping[StackFrame, float]:
    """Return in which share of the samples each line was found."""
    found: dict[StackFrame, float] = {}
    for stack in profile.stacks:
        for frame in set(stack.frames):
            found[frame] = found.get(frame, 0.0) + stack.samples / profile.samples
    return found


def _longest_way(
    profile: RankProfile, differences: Mapping[StackFrame, float], least: float
) -> Sequence[StackFrame]:
    """Return the lines of the stack that has most of them, whose difference is at least that; the
    innermost first."""
    ways = (
        [frame for frame in stack.frames if differences[frame] >= least] for stack in profile.stacks
    )
    return max(ways, key=len, default=[])
