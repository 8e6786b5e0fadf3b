"""The Python line in which a slow rank spends more of its time than a peer.

Both are sampled during the same seconds. A rank that is slow for a reason of its own, such as a
queue that it waits for, is often found in a line in which its peers rarely are; they wait for it in
other lines. So are the workers of a data loader that is slow.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from paceline_server.detect.finding import Evidence
from paceline_server.detect.observation import Generation, Observation
from paceline_server.detect.script_frame import script_frame
from paceline_server.percent import percent
from paceline_wire.stacks import Profile, StackFrame

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
    of_workers: bool  # whether the workers of its data loader are in this line
    line: StackFrame
    called: StackFrame | None  # by this line; None: nothing that is written in Python
    share: float  # share of time that the rank is in this line
    share_of_peer: float

    @property
    def sentence(self) -> str:
        """The line as part of a summary."""
        who = "Its loader workers are" if self.of_workers else "It is"
        return f"{who} in {self.line} for {self._times}."

    @property
    def evidence(self) -> Evidence:
        who = f"loader workers of rank {self.rank} are"
        who = who if self.of_workers else f"rank {self.rank} is"
        called = "" if self.called is None else f", which calls {self.called},"
        return Evidence(f"{who} in {self.line}{called} for {self._times}")

    @property
    def _times(self) -> str:
        peer = f"{'those of ' if self.of_workers else ''}rank {self.peer}"
        return f"{percent(self.share)} of the time, {peer} for {percent(self.share_of_peer)}"


@dataclass(slots=True)
class LineSearch:
    """The search for the line of one slow rank, beside a peer. Each sample is looked at once."""

    of_workers: bool = False  # look at the workers of its data loader, if it has any
    ranks: list[int] = field(default_factory=list)  # the slow one and the peer, if both are known
    line: SlowLine | None = None
    _compared: tuple[int, int] | None = None  # times of the samples

    def begin(self, rank: int, slow: Container[int], generation: Generation) -> None:
        """Choose another rank of its stage, which is not slow; the first choice stands."""
        if self.ranks:
            return
        stage = generation.stage(rank)
        others = range(generation.topology.world_size)
        peers = (one for one in others if one not in slow and generation.stage(one) == stage)
        self.ranks = [rank, peer] if (peer := next(peers, None)) is not None else []

    def finds(self, since_ns: int, observation: Observation) -> bool:
        """Return whether the line is known now, and was not before.

        There is no such line if the rank is slower in all of them alike.

        Args:
            since_ns: server's CLOCK_REALTIME; samples from before it are no evidence.
        """
        if self.line is not None or not self.ranks:
            return False
        slow, peer = map(observation.profiles.get, self.ranks)
        if slow is None or peer is None:
            return False
        times = slow.time_ns, peer.time_ns
        if times == self._compared or min(times) < since_ns:
            return False
        self._compared = times
        of_workers = self.of_workers and slow.workers.samples > 0
        of_both = (one.workers if of_workers else one.main for one in (slow, peer))
        if (found := _slow_line(*of_both)) is not None:
            self.line = SlowLine(slow.rank, peer.rank, of_workers, *found)
        return self.line is not None


def _slow_line(
    slow: Profile, peer: Profile
) -> tuple[StackFrame, StackFrame | None, float, float] | None:
    """Return the line, what it calls, and the shares of both."""
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
    return line, None if line == way[0] else way[way.index(line) - 1], share, other


def _shares(profile: Profile) -> Mapping[StackFrame, float]:
    """Return in which share of the samples each line was found."""
    found: dict[StackFrame, float] = {}
    for stack in profile.stacks:
        for frame in set(stack.frames):
            found[frame] = found.get(frame, 0.0) + stack.samples / profile.samples
    return found


def _longest_way(
    profile: Profile, differences: Mapping[StackFrame, float], least: float
) -> Sequence[StackFrame]:
    """Return the lines of the stack that has most of them, whose difference is at least that; the
    innermost first."""
    ways = (
        [frame for frame in stack.frames if differences[frame] >= least] for stack in profile.stacks
    )
    return max(ways, key=len, default=[])
