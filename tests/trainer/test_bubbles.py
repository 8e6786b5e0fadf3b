"""The bubble of real runs equals the theory of their schedule.

Kernels are emulated by sleeping, so four ranks need hardly any CPU; but the machine needs some idle
CPU time, so this is only part of `make campaign`. `-s` shows the table.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

import numpy as np
import pytest

from paceline_server.steps.model import FinishedStep, StepModel
from paceline_wire.batch import SpanBlock
from paceline_wire.ring import GroupDefinition, RingReader
from paceline_wire.spans import Op, to_columns
from paceline_wire.topology import Topology
from tests.trainer.rank_processes import run_ranks

pytestmark = pytest.mark.campaign

STEPS = 7
WARM_UP_STEPS = 2
# Long, so that Python's additional time for each (2 ms with four ranks on two slow cores) does not
# matter.
KERNELS_MS = "100,200"
TOLERANCE = 0.01
UNEXPLAINED = 0.05  # share of the bubble's time that may have no cause
SHAPES = [  # (schedule, stages, microbatches, chunks per stage)
    ("gpipe", 2, 4, 1),
    ("gpipe", 4, 8, 1),
    ("1f1b", 2, 4, 1),
    ("1f1b", 4, 4, 1),
    ("1f1b", 4, 8, 1),
    ("interleaved", 2, 4, 2),
    ("interleaved", 2, 4, 3),
    ("interleaved", 4, 4, 2),
    ("interleaved", 4, 8, 2),
]


def run(
    directory: Path,
    schedule: str,
    stages: int,
    microbatches: int,
    chunks: int,
    *more: str,
) -> None:
    """Run one process per stage, started as by the agent."""
    options = {
        "--schedule": schedule,
        "--virtual-stages": chunks,
        "--steps": STEPS,
        "--global-batch-size": microbatches,
        "--microbatch-size": 1,
        "--layers": stages * chunks,
        "--width": 16,
        "--sequence-length": 16,
        "--evaluate-every": 0,
        "--emulate-kernel-ms": KERNELS_MS,
    }
    arguments = [part for option in options.items() for part in option]
    command = ["-m", "paceline_trainer", *arguments, *more]
    run_ranks(directory, command, stages, 150, PACELINE_PP=str(stages))


def steps(directory: Path, stages: int) -> list[FinishedStep]:
    """Return the steps that the server derives from the rings."""
    model: StepModel | None = None
    for rank in range(stages):
        reader = RingReader(directory / f"local.g0.r{rank}.ring")
        if model is None:
            model = StepModel(0, Topology(1, stages, 1), reader.identity.metadata)
        for definition in reader.new_definitions():
            if isinstance(definition, GroupDefinition):
                model.add_group(rank, definition)
        model.add(SpanBlock("local", 0, rank, to_columns(reader.read()), 0))
        assert not reader.lost
        reader.close()
    assert model is not None
    return model.take_finished()


def plain_idle(finished: FinishedStep, stages: int) -> list[float]:
    """Return the share of the phase in which no forward or backward was running, without any
    model."""
    compute = finished.timing.compute
    phase = int(compute.end_ns.max()) - int(compute.start_ns.min())
    seconds = compute.end_ns - compute.start_ns
    return [1 - float(seconds[compute.rank == stage].sum()) / phase for stage in range(stages)]


@pytest.mark.parametrize(("schedule", "stages", "microbatches", "chunks"), SHAPES)
def test_measured_bubbles_match_theory(
    tmp_path: Path, schedule: str, stages: int, microbatches: int, chunks: int
) -> None:
    run(tmp_path, schedule, stages, microbatches, chunks)
    finished = steps(tmp_path, stages)[WARM_UP_STEPS:]
    assert len(finished) == STEPS - WARM_UP_STEPS
    theory = (stages - 1) / (chunks * microbatches + stages - 1)
    print(f"\n{schedule} p={stages} m={microbatches} v={chunks}: theory {theory:.2%}")
    found = []
    for stage in range(stages):
        bubbles = [step.summary.bubbles[stage] for step in finished]
        measured = median(bubble.measured_ratio for bubble in bubbles)
        plain = median(plain_idle(step, stages)[stage] for step in finished)
        unexplained = median(abs(bubble.other_ratio or 0.0) for bubble in bubbles)
        found.append(measured)
        print(
            f"  stage {stage}: measured {measured:.2%} (no compute {plain:.2%}), of which without "
            f"a cause {unexplained / measured:.2%}"
        )
        assert [bubble.theory_ratio for bubble in bubbles] == pytest.approx(
            [theory] * len(bubbles), abs=TOLERANCE / 2
        )
        assert unexplained <= UNEXPLAINED * measured
    assert found == pytest.approx([theory] * stages, rel=0, abs=TOLERANCE)


def test_both_ends_of_every_transfer_are_matched(tmp_path: Path) -> None:
    """Between two stages with several chunks, activations and gradients use the same directions."""
    run(tmp_path, "interleaved", 2, 4, 3)
    for finished in steps(tmp_path, 2):
        sent = finished.timing.transfers
        assert len(sent.op) == 2 * 4 * (2 * 3 - 1)
        rows = zip(sent.source, sent.op, sent.microbatch, sent.chunk, strict=True)
        assert len({tuple(map(int, row)) for row in rows}) == len(sent.op)
        assert (sent.end_ns >= sent.send_start_ns).all()


def test_long_sequences_take_longer_and_their_lengths_are_recorded(tmp_path: Path) -> None:
    run(tmp_path, "1f1b", 2, 8, 1, "--sequence-spread", "3", "--sequence-length", "64")
    for finished in steps(tmp_path, 2)[WARM_UP_STEPS:]:
        compute = finished.timing.compute
        assert compute.tokens.min() < 40
        assert compute.tokens.max() <= 64
        assert (compute.squared_tokens == compute.tokens**2).all(), "one sequence per microbatch"
        forward = compute.op == Op.FORWARD
        part = compute.tokens[forward] / 64
        expected = 0.100 * (part + part**2) / 2  # as defined by `emulation.length_share`
        # Only the better half: other load on the machine delays some of them.
        late = compute.self_seconds[forward] - expected
        assert late.min() > -0.01
        assert np.median(np.abs(late)) < 0.01
