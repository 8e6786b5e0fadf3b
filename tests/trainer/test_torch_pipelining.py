"""Stages and bubbles of `torch.distributed.pipelining` equal those that the trainer annotates.

The same schedules, sizes and emulated (sleeping) kernels run with both; only the reference trainer
says which action it executes. Zero-bubble schedules, which the trainer does not have, are compared
with the time in which a rank really slept. `-s` shows the table.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from paceline_server.engine.reported_topology import topology_of
from paceline_server.steps.model import FinishedStep, StepModel
from paceline_wire.batch import SpanBlock
from paceline_wire.ring import GroupDefinition, RingReader
from paceline_wire.spans import to_columns
from paceline_wire.topology import Topology
from tests.trainer.rank_processes import run_ranks
from tests.trainer.test_bubbles import KERNELS_MS, STEPS, WARM_UP_STEPS, plain_idle
from tests.trainer.test_bubbles import run as run_trainer
from tests.trainer.test_bubbles import steps as steps_of_trainer

pytestmark = pytest.mark.campaign

SCRIPT = Path(__file__).parents[1] / "trainer_hooks" / "pipelining_ranks.py"
TOLERANCE = 0.01
SAME = [  # class in torch, name in the trainer, stages, microbatches, chunks per stage
    ("ScheduleGPipe", "gpipe", 2, 4, 1),
    ("ScheduleGPipe", "gpipe", 4, 8, 1),
    ("Schedule1F1B", "1f1b", 2, 4, 1),
    ("Schedule1F1B", "1f1b", 4, 8, 1),
    ("ScheduleInterleaved1F1B", "interleaved", 2, 4, 2),
    ("ScheduleInterleaved1F1B", "interleaved", 4, 4, 2),
]
OTHERS = [  # class in torch, stages, microbatches, chunks per stage
    ("ScheduleLoopedBFS", 2, 4, 2),
    ("ScheduleInterleavedZeroBubble", 2, 4, 2),
    ("ScheduleInterleavedZeroBubble", 4, 8, 2),
    ("ScheduleZBVZeroBubble", 2, 4, 2),
    ("ScheduleZBVZeroBubble", 4, 8, 2),
    ("ScheduleDualPipeV", 2, 8, 2),
]


def run_torch(directory: Path, schedule: str, world_size: int, *numbers: int) -> None:
    """Run one process per rank; `numbers`: microbatches, chunks and, if several, data ranks."""
    microbatches, chunks, *data_ranks = numbers
    directory.mkdir()
    arguments = [SCRIPT, schedule, microbatches, chunks, STEPS, *KERNELS_MS.split(","), *data_ranks]
    run_ranks(directory, arguments, world_size, 300)


def recognized(
    directory: Path, world_size: int
) -> tuple[Topology, dict[str, str], list[FinishedStep]]:
    """Return the topology, the metadata and the steps that the server derives from the rings."""
    readers = [RingReader(directory / f"local.g0.r{rank}.ring") for rank in range(world_size)]
    metadata: dict[str, str] = {}
    places = {}
    sizes = None
    for rank, reader in enumerate(readers):
        for description in reader.new_descriptions():
            metadata |= description.metadata
            if description.coordinates is not None:
                sizes, places[rank] = description.topology, description.coordinates
    assert sizes is not None
    topology = topology_of(sizes, places)
    assert topology is not None
    model = StepModel(0, topology, metadata)
    for rank, reader in enumerate(readers):
        for definition in reader.new_definitions():
            if isinstance(definition, GroupDefinition):
                model.add_group(rank, definition)
        model.add(SpanBlock("local", 0, rank, to_columns(reader.read()), 0))
        assert not reader.lost
        reader.close()
    return topology, metadata, model.take_finished()[WARM_UP_STEPS:]


def measured(finished: list[FinishedStep], stages: int) -> list[float]:
    return [
        median(step.summary.bubbles[stage].measured_ratio for step in finished)
        for stage in range(stages)
    ]


@pytest.mark.parametrize(("schedule", "annotated", "stages", "microbatches", "chunks"), SAME)
def test_bubbles_equal_those_of_the_trainers_annotation(
    tmp_path: Path, schedule: str, annotated: str, stages: int, microbatches: int, chunks: int
) -> None:
    run_torch(tmp_path / "torch", schedule, stages, microbatches, chunks)
    topology, metadata, finished = recognized(tmp_path / "torch", stages)
    assert topology == Topology(pp=stages)
    assert metadata["schedule"] == annotated
    assert metadata["microbatches"] == str(microbatches)
    assert metadata["virtual_stages"] == str(chunks)
    (tmp_path / "trainer").mkdir()
    run_trainer(tmp_path / "trainer", annotated, stages, microbatches, chunks)
    expected = measured(steps_of_trainer(tmp_path / "trainer", stages)[WARM_UP_STEPS:], stages)
    found = measured(finished, stages)
    print(f"\n{schedule} p={stages} m={microbatches} v={chunks}")
    for stage in range(stages):
        print(f"  stage {stage}: recognized {found[stage]:.2%}, annotated {expected[stage]:.2%}")
    assert found == pytest.approx(expected, rel=0, abs=TOLERANCE)


@pytest.mark.parametrize(("schedule", "stages", "microbatches", "chunks"), OTHERS)
def test_bubbles_of_other_schedules_equal_the_time_without_compute(
    tmp_path: Path, schedule: str, stages: int, microbatches: int, chunks: int
) -> None:
    run_torch(tmp_path / "torch", schedule, stages, microbatches, chunks)
    topology, metadata, finished = recognized(tmp_path / "torch", stages)
    assert topology == Topology(pp=stages)
    assert metadata["microbatches"] == str(microbatches)
    found = measured(finished, stages)
    expected = [
        median(plain_idle(step, stages)[stage] for step in finished) for stage in range(stages)
    ]
    theory = [bubble.theory_ratio for bubble in finished[0].summary.bubbles]
    print(f"\n{schedule} p={stages} m={microbatches} v={chunks}")
    for stage in range(stages):
        print(
            f"  stage {stage}: recognized {found[stage]:.2%}, without compute "
            f"{expected[stage]:.2%}, theory {theory[stage]:.2%}"
        )
    assert found == pytest.approx(expected, rel=0, abs=TOLERANCE)


def test_replicas_are_recognized_whatever_the_mesh_calls_them(tmp_path: Path) -> None:
    run_torch(tmp_path / "torch", "Schedule1F1B", 4, 4, 1, 2)
    topology, metadata, finished = recognized(tmp_path / "torch", 4)
    assert (topology.dp, topology.pp) == (2, 2)
    assert [topology.coordinates(rank).pp_rank for rank in range(4)] == [0, 1, 0, 1]
    assert "torch.distributed.pipelining" in metadata["topology"]
    assert measured(finished, 2) == pytest.approx([0.2, 0.2], rel=0, abs=2 * TOLERANCE)
