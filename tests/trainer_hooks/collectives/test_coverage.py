"""A rank reports what of its communication is not recorded."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from paceline.collectives import coverage
from paceline_wire.coverage import NOT_RECORDED, RECORDER
from paceline_wire.ring import RingReader
from tests import forked_python

START = """
import sys, torch, torch.distributed as dist, paceline
from torch.testing._internal.distributed.fake_pg import FakeStore
store = FakeStore() if sys.argv[1] == "fake" else dist.HashStore()
dist.init_process_group(sys.argv[1], store=store, rank=0, world_size=1)
paceline.init()
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""


def reported(tmp_path: Path, backend: str, source: str = START, pure: str = "") -> dict[str, str]:
    finished = forked_python.run(
        ["-c", source, backend],
        {
            **os.environ,
            "PACELINE_RING_DIRECTORY": str(tmp_path),
            "PACELINE_JOB": "job",
            "PACELINE_PURE_PYTHON": pure,
            "PACELINE_BUILD": "0",
        },
    )
    assert finished.returncode == 0, finished.stderr
    found: dict[str, str] = {}
    for description in RingReader(tmp_path / "job.g0.r0.ring").new_descriptions():
        found |= description.metadata
    return found


@pytest.mark.parametrize("pure", ["", "1"], ids=["built", "pure"])
def test_a_backend_that_is_recorded_needs_no_reason(
    tmp_path: Path, pure: str, library_of_process_groups: None
) -> None:
    found = reported(tmp_path, "gloo", pure=pure)
    assert NOT_RECORDED not in found
    assert found[RECORDER] in (("Python",) if pure else ("C++ library", "Python"))


def test_an_unknown_backend_is_named(tmp_path: Path) -> None:
    """The fake backend has a class of Work with a wait of its own."""
    found = reported(tmp_path, "fake")
    name = "fake" if "fake" in found[NOT_RECORDED] else "FakeProcessGroup"  # in older torch
    assert found[NOT_RECORDED] == f"waits of the backend {name} are unknown to Paceline"


def test_an_old_torch_is_named_and_left_alone(tmp_path: Path) -> None:
    old = START.replace("paceline.init()", 'torch.__version__ = "2.4.1"; paceline.init()')
    found = reported(tmp_path, "gloo", old)
    assert found == {RECORDER: "none", NOT_RECORDED: "torch 2.4.1 is older than 2.6"}


def test_an_error_at_the_start_is_named(tmp_path: Path) -> None:
    broken = START.replace("paceline.init()", "del dist.Work.unbox; paceline.init()")
    found = reported(tmp_path, "gloo", broken, pure="1")
    assert found[RECORDER] == "none"
    assert found[NOT_RECORDED].startswith("AttributeError: ")


@pytest.mark.parametrize("version", ["2.6.0", "2.13.0+cpu", "2.14.0a0+git12", "3.0", "custom"])
def test_other_releases_are_recorded(version: str) -> None:
    assert coverage.reason_of_release(version) is None


def test_ranks_that_are_forked_know_the_operators_of_torch() -> None:
    source = """
import paceline.preloaded
from paceline.hooks import reason_of_operators
assert reason_of_operators.cache_info().currsize == 1
"""
    finished = forked_python.run(["-c", source], os.environ)
    assert finished.returncode == 0, finished.stderr


def test_operators_of_another_torch_are_named() -> None:
    assert coverage.reason_of_operators(torch) is None
    names = [*torch._C._dispatch_get_all_op_names(), "c10d::allreduce_v2_"]
    renamed = SimpleNamespace(
        __version__="2.99.0",
        ops=torch.ops,
        _C=SimpleNamespace(_dispatch_get_all_op_names=lambda: names),
    )
    reason = coverage.reason_of_operators(renamed)
    assert reason == "torch 2.99.0 has other operators: allreduce_v2_"
