"""The durations of all operations in a range of steps, from the job's shape, noise and faults.

Noise consists of log-normal jitter of every operation, a constant factor per rank (chips differ by
a percent), a slow drift of each node, rare operations of two to five times their length, ranks that
are slow for a step or two, short GC pauses, varying sequence lengths, and slow, uneven first steps.
The amount of each differs from job to job.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline_evaluation.faults import CommonChange, HiddenTraffic, Ints, TrialFault
from paceline_evaluation.program import StepProgram
from paceline_evaluation.shape import JobShape
from paceline_evaluation.timeline import Durations, Floats
from paceline_wire.spans import RECEIVE_OPS, Op

_WARMUP = (3.0, 1.5, 1.15)  # durations of the first steps, relative to later ones


@dataclass(frozen=True, slots=True)
class Noise:
    """Relative sizes of the noise; all zero: no noise."""

    operation: float = 0.02  # log-normal sigma per operation
    step: float = 0.008  # sigma common to all operations of a rank in a step
    chronic: float = 0.01  # sigma between ranks, constant in time
    drift: float = 0.02  # amplitude per node, over hundreds of steps
    # probability per rank and step that an operation takes 2-5 times as long
    outliers: float = 0.004
    hiccups: float = (
        1e-4  # probability per rank and step of being 1.1-1.5 times slower for 1-2 steps
    )
    collections: float = 0.01  # probability per rank and step of a short GC pause
    # probability that a transfer or collective takes 2-10 times as long
    late_messages: float = 0.002
    # probability per rank and step that a data wait takes 2-20 times as long
    late_batches: float = 0.001
    change: CommonChange | None = None  # by other data or a power limit everywhere
    warmup: bool = True


QUIET = Noise(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, warmup=False)


def draw_noise(chance: np.random.Generator) -> Noise:
    """Draw noise between that of a quiet and of a busy cluster."""
    return Noise(
        operation=float(chance.uniform(0.01, 0.05)),
        step=float(chance.uniform(0.002, 0.015)),
        chronic=float(chance.uniform(0.004, 0.012)),
        drift=float(chance.uniform(0.0, 0.03)),
        outliers=float(chance.uniform(0.0, 0.01)),
        hiccups=float(chance.uniform(0.0, 2e-4)),
        collections=float(chance.uniform(0.0, 0.02)),
        late_messages=float(chance.uniform(0.0, 0.004)),
        late_batches=float(chance.uniform(0.0, 0.002)),
        change=_draw_change(chance),
    )


def _draw_change(chance: np.random.Generator) -> CommonChange | None:
    step = int(chance.integers(20, 200)) if chance.random() < 0.2 else None
    factor = float(chance.uniform(0.8, 1.3))
    return None if step is None else CommonChange(step, factor)


class Conditions:
    """Draws `Durations`, and the sequence lengths that belong to them, stretch by stretch."""

    def __init__(
        self,
        shape: JobShape,
        program: StepProgram,
        noise: Noise,
        chance: np.random.Generator,
        faults: tuple[TrialFault, ...] = (),
    ) -> None:
        self.shape, self.program, self.noise, self.chance = shape, program, noise, chance
        self.faults = faults
        topology = shape.topology
        self.grid = (topology.pp, topology.dp, topology.tp)
        self._chronic = np.exp(chance.normal(0.0, noise.chronic, self.grid)).clip(0.97, 1.03)
        self._phase = chance.uniform(0.0, 2 * np.pi, shape.node_count)
        self._period = chance.uniform(150.0, 600.0, shape.node_count)
        self._work = [self._base(stage) for stage in range(topology.pp)]
        self._wire = self._base_transfers()
        self.lengths: tuple[np.ndarray, np.ndarray] | None = (
            None  # as reported: (steps, dp, microbatches)
        )

    def draw(self, first: int, steps: int) -> Durations:
        """Draw the durations of the steps `first` to `first + steps - 1`."""
        shape, noise = self.shape, self.noise
        own = self._own(first, steps)
        by_length = self._by_length(steps)
        compute = []
        for stage, base in enumerate(self._work):
            actions = self.program.computes[stage]
            jitter = self._jitter((len(actions), steps, *self.grid[1:]), noise.operation)
            made = jitter * base[:, None, None, None] * own[None, :, stage]
            if by_length is not None:
                microbatch = [action.microbatch for action in actions]
                made *= by_length[:, :, microbatch].transpose(2, 0, 1)[..., None]
            self._outliers(made)
            compute.append(made)
        busy = sum(float(base.sum()) for base in self._work) / len(self._work)
        durations = Durations(
            compute=compute,
            transfer=self._transfers(first, steps),
            tensor=[
                shape.tensor_collective_seconds
                * self._jitter((len(actions), steps, self.grid[1], 1), 0.1)
                for actions in self.program.computes
            ],
            gc=np.zeros((steps, *self.grid)),
            after_pipeline=np.zeros((steps, *self.grid)),
            gc_place=np.full((steps, *self.grid), -1),
            data=shape.data_seconds * self._jitter((steps, *self.grid), 0.3),
            reduction=shape.reduction_seconds
            * self._jitter((steps, self.grid[0], 1, self.grid[2]), 0.05),
            gather=shape.reduction_seconds
            * self._jitter((steps, self.grid[0], 1, self.grid[2]), 0.05)
            / 2,
            world=0.0005 * self._jitter((steps,), 0.2),
            optimizer=shape.optimizer_seconds * self._jitter((steps, *self.grid), 0.03),
            checkpoint=self._checkpoints(first, steps),
            extra=np.full((steps, self.grid[0], 1, self.grid[2]), np.nan),
        )
        self._lengthen(durations.data, noise.late_batches, 20.0)
        for tensor in durations.tensor:
            self._lengthen(tensor, noise.late_messages, 10.0)
        self._collections(durations, busy)
        number = np.arange(first, first + steps)
        for fault in self.faults:
            if fault.traffic is not None:
                self._add_traffic(fault.traffic, number, durations)
            held = np.array([fault.is_active(step) for step in number.tolist()])
            if held.any():
                self._apply(fault, held, number, durations)
        return durations

    def _base(self, stage: int) -> Floats:
        """Return the seconds of each compute of a stage."""
        shape = self.shape
        seconds = []
        for action in self.program.computes[stage]:
            forward = shape.forward_seconds(action.chunk * shape.topology.pp + stage)
            seconds.append(forward * (1.0 if action.op == Op.FORWARD else shape.backward_ratio))
        return np.array(seconds)

    def _base_transfers(self) -> Floats:
        """Return seconds (transfers, dp, tp), which depend on whether both ends share a node."""
        shape = self.shape
        nodes = np.arange(shape.world_size).reshape(self.grid) // shape.ranks_per_node
        result = np.empty((self.program.transfers, *self.grid[1:]))
        self.ends = np.empty((self.program.transfers, 2), dtype=np.int64)
        for move in self.program.moves:
            if move.action.op in RECEIVE_OPS and move.source is not None:
                is_near = nodes[move.source[0]] == nodes[move.stage]
                result[move.number] = np.where(
                    is_near, shape.near_transfer_seconds, shape.far_transfer_seconds
                )
                self.ends[move.number] = move.source[0], move.stage
        return result

    def _jitter(self, size: tuple[int, ...], sigma: float) -> Floats:
        if not self.noise.operation or not sigma:
            return np.ones(size)
        result: Floats = np.exp(self.chance.standard_normal(size, dtype=np.float32) * sigma).astype(
            np.float64
        )
        return result

    def _own(self, first: int, steps: int) -> Floats:
        """Draw the factor that all operations of a rank in a step share: (steps, pp, dp, tp)."""
        own = self._chronic[None] * self._jitter((steps, *self.grid), self.noise.step)
        number = np.arange(first, first + steps)[:, None]
        drift = 1.0 + self.noise.drift * np.sin(2 * np.pi * number / self._period + self._phase)
        node = np.arange(self.shape.world_size) // self.shape.ranks_per_node
        own = own * drift[:, node].reshape(steps, *self.grid)
        if (change := self.noise.change) is not None:
            own[number[:, 0] >= change.step] *= change.factor
        self._hiccups(own)
        if self.noise.warmup:
            for step, factor in enumerate(_WARMUP):
                if first <= step < first + steps:
                    uneven = np.exp(self.chance.normal(0.0, 0.2, self.grid))
                    own[step - first] *= 1.0 + (factor - 1.0) * uneven
        return own

    def _hiccups(self, own: Floats) -> None:
        if not self.noise.hiccups:
            return
        begins = np.argwhere(self.chance.random(own.shape) < self.noise.hiccups)
        for step, stage, replica, tensor in begins.tolist():
            lasts = int(self.chance.integers(1, 3))
            factor = float(self.chance.uniform(1.1, 1.5))
            own[step : step + lasts, stage, replica, tensor] *= factor

    def _by_length(self, steps: int) -> Floats | None:
        lengths = self.shape.lengths
        if lengths is None:
            self.lengths = None
            return None
        size = (steps, self.shape.topology.dp, self.shape.microbatches)
        drawn = lengths.draw(self.chance, size)
        self.lengths = drawn if lengths.given else None
        return lengths.factor(*drawn)

    def _outliers(self, compute: Floats) -> None:
        self._lengthen(compute, self.noise.outliers / compute.shape[0], 5.0)

    def _transfers(self, first: int, steps: int) -> Floats:
        size = (self.program.transfers, steps, *self.grid[1:])
        result: Floats = self._wire[:, None] * self._jitter(size, 0.1)
        self._lengthen(result, self.noise.late_messages, 10.0)
        return result

    def _lengthen(self, durations: Floats, probability: float, most: float) -> None:
        """Make a few random durations 2 to `most` times as long."""
        if not probability or not durations.size:
            return
        count = int(self.chance.poisson(probability * durations.size))
        place = tuple(self.chance.integers(0, size, count) for size in durations.shape)
        durations[place] *= self.chance.uniform(2.0, most, count)

    def _checkpoints(self, first: int, steps: int) -> Floats:
        every = self.shape.checkpoint_every
        number = np.arange(first + 1, first + 1 + steps)
        due = (number % every == 0) if every else np.zeros(steps, dtype=bool)
        return np.where(due, self.shape.checkpoint_seconds, 0.0) * self._jitter((steps,), 0.1)

    def _collections(self, durations: Durations, busy: float) -> None:
        """Add the short GC pauses that every job has."""
        if self.noise.collections:
            here = self.chance.random(durations.gc.shape) < self.noise.collections
            self._pause(durations, here, 0.01 * busy)

    def _pause(self, durations: Durations, here: np.ndarray, seconds: float) -> None:
        computes = len(self.program.computes[0])
        place = self.chance.integers(0, computes, durations.gc.shape)
        durations.gc_place[here] = place[here]
        durations.gc[here] = seconds * self.chance.uniform(0.5, 1.5, durations.gc.shape)[here]

    def _add_traffic(self, traffic: HiddenTraffic, number: Ints, durations: Durations) -> None:
        """Add the second reduction; it takes a tenth of the usual one."""
        flows = traffic.is_active(number)
        durations.extra[flows] = (
            0.1 * self.shape.reduction_seconds * self._jitter(durations.extra.shape, 0.05)[flows]
        )

    def _apply(
        self, fault: TrialFault, held: np.ndarray, number: Ints, durations: Durations
    ) -> None:
        """Add a fault to those of the steps `number` for which `held` is true."""
        where = np.zeros(self.shape.world_size, dtype=bool)
        where[list(fault.ranks)] = True
        if fault.kind in ("slow_rank", "slow_node"):
            factor = np.where(where, fault.factor, 1.0).reshape(self.grid)
            for stage, compute in enumerate(durations.compute):
                compute[:, held] *= factor[stage]
        elif fault.kind == "data_stall":
            durations.data[held] += np.where(where, fault.seconds, 0.0).reshape(self.grid)
        elif fault.kind == "slow_creep":
            growth = 1.0 + (fault.factor - 1.0) * fault.share(number)
            place = self.shape.topology.coordinates(fault.ranks[0])
            durations.compute[place.pp_rank][..., place.dp_rank, place.tp_rank] *= growth
        elif fault.kind == "late_link":
            place = self.shape.topology.coordinates(fault.ranks[0])
            durations.extra[held, place.pp_rank, 0, place.tp_rank] *= fault.factor
        elif fault.kind in ("transient_stall", "stalled_microbatch"):
            self._stall(fault, held, durations)
        elif fault.kind == "slow_link":
            self._slow_transfers(fault, held, durations)
        elif fault.kind == "gc":
            here = self.chance.random(durations.gc.shape) < fault.factor
            self._pause(durations, here & held[:, None, None, None], fault.seconds)

    def _stall(self, fault: TrialFault, held: np.ndarray, durations: Durations) -> None:
        """Make one operation of the rank per step take `fault.seconds` longer."""
        place = self.shape.topology.coordinates(fault.ranks[0])
        compute = durations.compute[place.pp_rank]
        for step in np.flatnonzero(held):
            number = int(self.chance.integers(compute.shape[0]))
            compute[number, step, place.dp_rank, place.tp_rank] += fault.seconds

    def _slow_transfers(self, fault: TrialFault, held: np.ndarray, durations: Durations) -> None:
        assert fault.link is not None
        one, other = (self.shape.topology.coordinates(rank) for rank in fault.link)
        stages = {one.pp_rank, other.pp_rank}
        for number in range(self.program.transfers):
            if set(self.ends[number].tolist()) == stages:
                durations.transfer[number, held, one.dp_rank, one.tp_rank] *= fault.factor
