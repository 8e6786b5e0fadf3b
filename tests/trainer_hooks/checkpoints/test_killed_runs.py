"""A run whose ranks are killed at random ends with the bits of the uninterrupted one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import forked_python

PROGRAM = Path(__file__).with_name("killed_runs.py")
KINDS = [
    "ddp",
    "stateful",
    "zero",
    "compiled",
    "accumulated",
    "fsdp2",
    "fsdp2_tp",
    "pipelining",
    "plain",
]


TIERS = ["disk", "memory", "peer"]


def run(kind: str, kills: int, epochs: int, directory: Path, tier: str) -> None:
    arguments = (PROGRAM, kind, kills, epochs, directory, tier)
    ended = forked_python.run(arguments, os.environ, timeout=1200)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"ended after {kills} kills\n"


def assert_equal(directory: Path, kind: str, tier: str, kills: int, epochs: int) -> None:
    """Compare losses and batches of each step, and the weights and optimizer states at the end."""
    run(kind, 0, epochs, directory / "whole", "disk")
    run(kind, kills, epochs, directory / "killed", tier)
    for path in (directory / "whole").glob("rank*"):
        whole, killed = path.read_text(), (directory / "killed" / path.name).read_text()
        assert len(whole.splitlines()) == 12 * epochs
        # Steps after the last checkpoint are repeated; there may be none after a copy in memory.
        assert len(killed.splitlines()) >= 12 * epochs + (tier == "disk")
        assert set(killed.splitlines()) == set(whole.splitlines())
    for path in (directory / "whole").glob("final.*"):
        assert (directory / "killed" / path.name).read_text() == path.read_text()
    resumed = set((directory / "killed" / "resumed").read_text().split())
    assert tier in resumed
    assert resumed <= {tier, "None"}  # a rank was killed before the first copy


@pytest.mark.parametrize("kind", ["ddp", pytest.param("zero", marks=pytest.mark.campaign)])
def test_a_run_that_is_killed_ends_bit_for_bit_the_same(tmp_path: Path, kind: str) -> None:
    assert_equal(tmp_path, kind, "memory", kills=3, epochs=4)


@pytest.mark.campaign
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_killed_20_times_ends_bit_for_bit_the_same(
    tmp_path: Path, kind: str, tier: str
) -> None:
    assert_equal(tmp_path, kind, tier, kills=20, epochs=20)  # a busy host may kill some steps late
