"""Hangs recorded on 16 GPUs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from paceline_server.flight_recorder import report


def test_the_two_ranks_whose_gil_was_held_are_named(recorded: Path) -> None:
    found = report(recorded)
    assert (found.culprits, found.kind, found.is_certain) == ((9, 14), "host", True)
    assert found.first_missing is not None
    assert found.first_missing.not_launched_by == (9, 14)
    assert found.process_group is not None
    assert found.process_group.description == "EXPERT_MODEL_PARALLEL_GROUP"
    assert found.process_group.ranks == tuple(range(8, 16))
    assert found.verdict.startswith("Ranks 9, 14 stopped on the host before launching all_to_all")
    assert found.verdict.endswith("Read their Python stacks and their logs.")


@pytest.mark.parametrize("lost", [{9}, {9, 14}])
def test_the_same_ranks_are_named_when_they_left_no_dump(
    recorded: Path, tmp_path: Path, lost: set[int]
) -> None:
    for path in recorded.glob("_dump_*"):
        if int(path.name.rpartition("_")[2]) not in lost:
            shutil.copy(path, tmp_path)
    found = report(tmp_path)
    assert set(found.culprits) >= lost if len(lost) == 2 else 14 in found.culprits
    assert found.without_dump == tuple(sorted(lost))


def test_a_verdict_names_what_each_rank_did(recorded: Path, tmp_path: Path) -> None:
    for path in recorded.glob("_dump_*"):
        shutil.copy(path, tmp_path)
    (tmp_path / "_dump_9").unlink()
    assert report(tmp_path).verdict == (
        "Rank 9 left no dump, and all other ranks launched send 1->9 14147 of "
        "PIPELINE_MODEL_PARALLEL_GROUP (42) (group of ranks 1, 9; rank 1 waited in it). "
        "Rank 14 stopped on the host. Check whether the process is alive, its log and its node."
    )


def test_one_dump_without_a_wait_shows_no_healthy_job(recorded: Path, tmp_path: Path) -> None:
    shutil.copy(recorded / "_dump_9", tmp_path)
    assert report(tmp_path).verdict.startswith(
        "No dump shows a rank that waits for another one, but ranks 0, 1, 2, 3, 4, 5, "
    )


def test_what_is_left_of_a_stage_still_leads_to_the_other_stage(
    recorded: Path, tmp_path: Path
) -> None:
    """With only the dumps of the first stage, the result is that it waits for the second stage."""
    for rank in range(8):
        shutil.copy(recorded / f"_dump_{rank}", tmp_path)
    found = report(tmp_path)
    assert set(found.culprits) == set(range(8, 16))
    assert found.kind == "host"


def test_the_two_ranks_whose_gpu_stopped_are_named(recorded_gpu_error: Path) -> None:
    """Their hosts stopped too, later: all other ranks wait for what these did not launch."""
    found = report(recorded_gpu_error)
    assert (found.culprits, found.kind, found.is_certain) == ((9, 14), "device", True)
    assert found.verdict.startswith("Ranks 9, 14 stopped on the device: every rank launched")
