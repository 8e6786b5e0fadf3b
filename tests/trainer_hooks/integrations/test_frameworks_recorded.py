"""Scripts of frameworks that do not know Paceline, two gloo ranks each, as their rings show them.

Each script trains, and trains on from its checkpoint with a second trainer.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from paceline_wire.ending import Ending, read_ending
from paceline_wire.spans import Op
from tests.trainer_hooks.integrations.conftest import Run


def test_hugging_face_trainer(run_ranks: Run) -> None:
    """4 steps of 4 batches, then 2 more: a step is one of the optimizer, not of the loader."""
    for rank in run_ranks("hugging_face_ranks.py", "transformers"):
        assert rank.steps == [0, 1, 2, 3, 4, 5]
        assert rank.counts(Op.FORWARD) == rank.counts(Op.BACKWARD) == dict.fromkeys(range(6), 4)
        assert rank.counts(Op.OPTIMIZER) == dict.fromkeys(range(6), 1)
        assert {*rank.counts(Op.DATA_WAIT)} == {*range(6)}
        assert rank.counts(Op.EVALUATE) == {2: 1, 3: 1, 5: 1}  # each 3 steps, and last
        assert {3, 5} <= {*rank.counts(Op.CHECKPOINT)}
        assert rank.is_communicating()


@pytest.mark.campaign
def test_accelerate(run_ranks: Run) -> None:
    """8 steps of 3 batches, then 4 more; Accelerate counts no steps, its optimizer does."""
    for rank in run_ranks("accelerate_ranks.py", "accelerate"):
        assert rank.steps == list(range(12))
        assert rank.counts(Op.BACKWARD) == dict.fromkeys(range(12), 3)
        assert rank.counts(Op.OPTIMIZER) == dict.fromkeys(range(12), 1)
        assert {4, 8} <= {*rank.counts(Op.CHECKPOINT)}  # saved after 4 steps, loaded after 8
        assert rank.is_communicating()


def test_lightning(run_ranks: Run, tmp_path: Path) -> None:
    """4 steps of 2 batches, then 4 more; the ranks train on different rows."""
    ranks = run_ranks("lightning_ranks.py", "lightning")
    for rank in ranks:
        assert rank.steps == list(range(8))
        assert rank.counts(Op.FORWARD) == rank.counts(Op.BACKWARD) == dict.fromkeys(range(8), 2)
        assert rank.counts(Op.OPTIMIZER) == dict.fromkeys(range(8), 1)
        assert {*rank.counts(Op.DATA_WAIT)} == {*range(8)}
        assert rank.counts(Op.EVALUATE) == {2: 1, 5: 1}  # each 6 batches
        assert {3, 7} <= {*rank.counts(Op.CHECKPOINT)}
        assert rank.view.saved_step == 8
        assert rank.is_communicating()
    rows = [{*(tmp_path / "output" / f"rows.{rank}").read_text().split()} for rank in range(2)]
    assert len(rows[0]) == len(rows[1]) == 16
    assert not rows[0] & rows[1]


def test_a_request_replaces_no_checkpoint_that_lightnings_last_one_links_to(run_ranks: Run) -> None:
    run_ranks("lightning_link.py", "lightning", ranks=1)


@pytest.mark.campaign
def test_a_rank_that_lightning_stops_on_sigterm_is_reported_with_the_signal(
    run_ranks: Run, tmp_path: Path
) -> None:
    run_ranks("lightning_ranks.py", "lightning", TERMINATED_RANK="0")
    rings = sorted((tmp_path / "rings").glob("*.ring"))
    endings = [read_ending(ring, os.getuid()) for ring in rings]
    assert endings == [Ending(signal=signal.SIGTERM), None]


@pytest.mark.campaign
def test_fabric(run_ranks: Run) -> None:
    """6 steps, then 3 more."""
    for rank in run_ranks("fabric_ranks.py", "lightning"):
        assert rank.steps == list(range(9))
        assert rank.counts(Op.BACKWARD) == dict.fromkeys(range(9), 2)
        assert rank.counts(Op.OPTIMIZER) == dict.fromkeys(range(9), 1)
        assert rank.is_communicating()


@pytest.mark.campaign
def test_deepspeed(run_ranks: Run) -> None:
    """8 steps of 3 batches with ZeRO 1, then 4 more with a second engine."""
    for rank in run_ranks("deepspeed_ranks.py", "deepspeed", DS_ACCELERATOR="cpu"):
        assert rank.steps == list(range(12))
        counts = dict.fromkeys(range(12), 3)
        assert rank.counts(Op.FORWARD) == rank.counts(Op.BACKWARD) == counts
        assert rank.counts(Op.OPTIMIZER) == dict.fromkeys(range(12), 1)
        assert rank.view.saved_step == 12
        assert rank.is_communicating()


@pytest.mark.campaign
def test_of_several_deepspeed_engines_one_is_counted(run_ranks: Run) -> None:
    """8 steps of an actor, which the critic joins in each second one; then 3 of another critic."""
    for rank in run_ranks("deepspeed_two_ranks.py", "deepspeed", DS_ACCELERATOR="cpu"):
        assert rank.steps == list(range(12))  # a ninth of the actor had begun
        assert rank.is_communicating()


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("layout", "ranks", "axes"),
    [
        ("pipeline 2", 4, "dp2 pp2 (from DeepSpeed groups)"),
        ("pipeline 2 model 2", 8, "dp2 pp2 tp2 (from DeepSpeed groups)"),
        ("sequence 2", 4, "dp2 cp2 (from DeviceMesh)"),
        ("experts 2", 4, "dp2 ep2 (from DeepSpeed groups)"),
        ("tensor 2", 4, "dp2 tp2 (from DeviceMesh)"),
    ],
)
def test_the_topology_is_that_of_deepspeeds_groups(
    run_ranks: Run, layout: str, ranks: int, axes: str
) -> None:
    found = run_ranks(
        "deepspeed_parallel_ranks.py", "deepspeed", ranks=ranks, DS_ACCELERATOR="cpu", LAYOUT=layout
    )
    assert {rank.metadata["topology"] for rank in found} == {axes}


@pytest.mark.campaign
def test_composer(run_ranks: Run) -> None:
    """4 batches of 2 microbatches, then 4 more."""
    for rank in run_ranks("composer_ranks.py", "composer"):
        assert rank.steps == list(range(8))
        assert rank.counts(Op.FORWARD) == rank.counts(Op.BACKWARD) == dict.fromkeys(range(8), 2)
        assert {2, 5} <= {*rank.counts(Op.EVALUATE)}
        assert {3, 7} <= {*rank.counts(Op.CHECKPOINT)}
        assert rank.is_communicating()
