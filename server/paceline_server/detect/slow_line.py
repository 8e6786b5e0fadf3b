"""The Python line in which a slow rank spends more of its time than a peer, or than before.

The rank and its peer are sampled during the same seconds. A rank that is slow for a reason of its
own, such as a queue that it waits for, is often found in a line in which its peers rarely are; they
wait for it in other lines. So are the workers of a data loader that is slow. Without a peer, or
where all ranks are slow, the rank is compared with itself: the first rank of each pipeline stage is
also sampled while nothing is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from paceline_server.detect.finding import Evidence
from paceline_server.detect.observation import Generation, Observation
from paceline_server.detect.script_frame import script_frame
from paceline_server.percent import percent
from paceline_wire.batch import RankProfile
from paceline_wire.stacks import Profile, StackFrame

LEAST_SAMPLES = 50
LEAST_DIFFERENCE = 0.1  # between the shares of time in a line of two ranks
LEAST_CHANGE = 0.05  # growth of one rank's share of time in a line
_PART_OF_STEP = 0.5  # samples begin and end within a step: so much of one may be in them too often
_LEAST_TRAINING = 0.95  # share of the sampled time without evaluations and checkpoints
LEAST_DEVIATIONS = 4.0  # multiple of the difference's standard deviation by chance
# Share of the largest difference: such lines are on the same way to where the time is spent.
_ALIKE = 0.8


@dataclass(frozen=True, slots=True)
class SlowLine:
    """The innermost line of the script on the way to where a slow rank spends more time."""

    rank: int
    peer: int | None  # None: compared with the rank itself before
    of_workers: bool  # whether the workers of its data loader are in this line
    line: StackFrame
    called: StackFrame | None  # by this line; None: nothing that is written in Python
    share: float  # share of time that the rank is in this line
    other_share: float  # the share of the peer, or the one before

    def sentence_about(self, rank: int | None) -> str:
        """Return the line as part of a summary about the rank, or about the job."""
        who = "its loader workers are" if self.of_workers else "it is"
        who = self._who if rank is None else who
        return f"{who[0].upper()}{who[1:]} in {self.line} for {self._times}."

    @property
    def evidence(self) -> Evidence:
        called = "" if self.called is None else f", which calls {self.called},"
        return Evidence(f"{self._who} in {self.line}{called} for {self._times}")

    @property
    def _who(self) -> str:
        rank = f"rank {self.rank}"
        return f"loader workers of {rank} are" if self.of_workers else f"{rank} is"

    @property
    def _times(self) -> str:
        share, other = percent(self.share), percent(self.other_share)
        if self.peer is None:
            return f"{share} of the time, {other} before"
        peer = f"{'those of ' if self.of_workers else ''}rank {self.peer}"
        return f"{share} of the time, {peer} for {other}"


@dataclass(slots=True)
class LineSearch:
    """The search for the line of one slow rank. Each pair of samples is looked at once."""

    of_workers: bool = False  # look at the workers of its data loader, if it has any
    ranks: list[int] = field(default_factory=list)  # the slow one and the peer, if there is one
    line: SlowLine | None = None
    _compared: tuple[int, int] | None = None  # times of the samples

    def begin(self, rank: int, slow: Container[int], generation: Generation) -> None:
        """Choose another rank of its stage, which is not slow; the first choice stands."""
        if self.ranks:
            return
        stage = generation.stage(rank)
        others = range(generation.topology.world_size)
        peers = (one for one in others if one not in slow and generation.stage(one) == stage)
        self.ranks = [rank, *islice(peers, 1)]

    def begin_alone(self, rank: int) -> None:
        """Compare this rank with itself before; the first choice stands."""
        self.ranks = self.ranks or [rank]

    def finds(self, since_ns: int, observation: Observation) -> bool:
        """Return whether the line is known now, and was not before.

        There is no such line if the rank is slower in all of them alike.

        Args:
            since_ns: server's CLOCK_REALTIME, when the rank became slow.
        """
        if self.line is not None or not self.ranks:
            return False
        with_peer = len(self.ranks) > 1
        slow, other = self._samples(since_ns, observation)
        if slow is None or other is None:
            return False
        times = slow.time_ns, other.time_ns
        if times == self._compared:
            return False
        self._compared = times
        least = LEAST_DIFFERENCE if with_peer else _least_change(slow, other, observation)
        of_workers = self.of_workers and slow.workers.samples > 0
        of_slow, of_other = (one.workers if of_workers else one.main for one in (slow, other))
        if (found := _slow_line(of_slow, of_other, least)) is not None:
            peer = other.rank if with_peer else None
            self.line = SlowLine(slow.rank, peer, of_workers, *found)
        return self.line is not None

    def _samples(
        self, since_ns: int, observation: Observation
    ) -> tuple[RankProfile | None, RankProfile | None]:
        """Return those of the slow rank, and those of the peer or of the rank before."""

        def newest(rank: int, fits: Callable[[RankProfile], bool]) -> RankProfile | None:
            return next(filter(fits, reversed(observation.profiles.get(rank, ()))), None)

        rank, *peers = self.ranks
        if peers:
            slow, peer = (newest(each, lambda one: one.time_ns >= since_ns) for each in self.ranks)
            return slow, peer
        now = newest(rank, lambda one: one.begun_ns >= since_ns)
        return now, newest(rank, lambda one: one.time_ns <= since_ns)


def _least_change(now: RankProfile, before: RankProfile, observation: Observation) -> float:
    """Return how much the share of time in a line must have grown to be no accident."""
    change = LEAST_CHANGE
    for one in (now, before):
        seconds = (one.time_ns - one.begun_ns) / 1e9
        trained = observation.training_seconds(one.begun_ns, one.time_ns)
        if not 0.0 < seconds * _LEAST_TRAINING <= trained:
            return math.inf
        change += _PART_OF_STEP * (observation.step_seconds or 0.0) / seconds
    return change


def _slow_line(
    slow: Profile, other: Profile, least: float
) -> tuple[StackFrame, StackFrame | None, float, float] | None:
    """Return the line, what it calls, and the shares of both."""
    if min(slow.samples, other.samples) < LEAST_SAMPLES:
        return None
    shares, others = _shares(slow), _shares(other)
    differences = {frame: share - others.get(frame, 0.0) for frame, share in shares.items()}
    most = max(differences.values(), default=0.0)
    if most < least:
        return None
    way = _longest_way(slow, differences, _ALIKE * most)
    line = script_frame(way)
    if line is None:
        return None
    share, rest = shares[line], others.get(line, 0.0)
    together = (share * slow.samples + rest * other.samples) / (slow.samples + other.samples)
    variance = together * (1.0 - together) * (1.0 / slow.samples + 1.0 / other.samples)
    if share - rest < LEAST_DEVIATIONS * math.sqrt(max(variance, 0.0)):
        return None
    return line, None if line == way[0] else way[way.index(line) - 1], share, rest


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
