"""Lets the tests here import `simulated_incident`; the recorded incidents, unpacked."""

import subprocess
import sys
from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dumps of 16 ranks of which two were stopped on the host."""
    return unpacked("lock_gil_1st", tmp_path_factory)


@pytest.fixture(scope="session")
def recorded_gpu_error(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dumps of 16 ranks, two of which have a GPU that stopped working."""
    return unpacked("gpu_error_2nd", tmp_path_factory)


def unpacked(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("recorded")
    subprocess.run(["tar", "-xf", DATA / f"{name}.tar.gz", "-C", directory], check=True)
    return directory / name
