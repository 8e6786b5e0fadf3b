from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline_agent.collect.contract import Collected, Context
from paceline_demo.fake_nvml import CompilerMissing, FakeGpus, build, environment

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    root = tmp_path / "sys"
    root.mkdir()
    return root


@pytest.fixture
def procfs(tmp_path: Path) -> Path:
    root = tmp_path / "proc"
    root.mkdir()
    return root


@pytest.fixture
def context(tmp_path: Path, sysfs: Path, procfs: Path) -> Context:
    return Context(node_directory=tmp_path, sysfs_root=sysfs, procfs_root=procfs, hostname="node-0")


@pytest.fixture
def infiniband(sysfs: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / "infiniband", sysfs / "class" / "infiniband"))


@pytest.fixture
def refusing() -> Path:
    """Return a file whose read fails with EINVAL."""
    path = Path("/sys/class/net/lo/speed")
    try:
        path.read_text()
    except OSError as error:
        if error.errno == errno.EINVAL:
            return path
    pytest.skip(f"{path} can be read here")


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return build(tmp_path_factory.mktemp("fake-nvml"))
    except CompilerMissing as missing:
        pytest.skip(str(missing))


@pytest.fixture
def gpus(nvml_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpus]:
    """Two emulated GPUs, visible to worker processes that are started later."""
    fake = FakeGpus.create(tmp_path / "gpus", 2)
    for name, value in environment(nvml_library, fake.path).items():
        monkeypatch.setenv(name, value)
    yield fake
    for gpu in range(fake.count):
        fake.set(gpu, hang_seconds=0)


Series = Callable[[Collected], dict[str, float]]


@pytest.fixture
def series() -> Series:
    """Return samples as a dictionary of values by `name{label=value,...}`."""

    def of(collected: Collected) -> dict[str, float]:
        found = {}
        samples = collected.everything()
        for sample in samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        assert len(found) == len(samples), "one series was written twice"
        return found

    return of


def write(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


@pytest.fixture(name="write")
def write_fixture() -> Callable[[Path, dict[str, str]], None]:
    return write
