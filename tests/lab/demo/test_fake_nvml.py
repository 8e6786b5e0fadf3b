from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline_demo.fake_nvml import LIBRARY, CompilerMissing, FakeGpus, build


def test_a_missing_compiler_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(CompilerMissing, match="install gcc or clang"):
        build(tmp_path / "cache")


def test_concurrent_builds_succeed(tmp_path):
    with ThreadPoolExecutor(3) as pool:
        try:
            found = set(pool.map(lambda _: build(tmp_path), range(3)))
        except CompilerMissing as missing:
            pytest.skip(str(missing))
    (directory,) = found
    assert [path.name for path in directory.iterdir()] == [LIBRARY]
    built = (directory / LIBRARY).stat().st_mtime_ns
    assert build(tmp_path) == directory
    assert (directory / LIBRARY).stat().st_mtime_ns == built


def test_two_writers_share_one_state(tmp_path):
    written = FakeGpus.create(tmp_path / "state", 2)
    written.set(1, sm_clock_mhz=900, throttle_reasons=["hw_thermal_slowdown", "hw_slowdown"])
    read = FakeGpus.open(tmp_path / "state")
    assert read.count == 2
    assert (read.get(1, "sm_clock_mhz"), read.get(0, "sm_clock_mhz")) == (900, 1980)
    assert read.get(1, "throttle_reasons") == 0x48
    read.reset(1)
    assert written.get(1, "sm_clock_mhz") == 1980
    read.close()
    written.close()


def test_each_node_has_its_own_gpus(tmp_path):
    uuids = {FakeGpus.create(tmp_path / name, 1)._gpu(0).uuid for name in ("a", "b")}
    assert len(uuids) == 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"clock": 1}, "no field 'clock'"),
        ({"throttle_reasons": ["too_hot"]}, "expected one of"),
        ({"sm_clock_mhz": ["gpu_idle"]}, "takes a number"),
    ],
)
def test_an_invalid_field_is_refused(tmp_path, values, message):
    gpus = FakeGpus.create(tmp_path / "state", 1)
    with pytest.raises(ValueError, match=message):
        gpus.set(0, **values)
    with pytest.raises(IndexError):
        gpus.set(1, lost=1)


def test_another_file_is_refused(tmp_path):
    (tmp_path / "state").write_bytes(b"x" * 100_000)
    with pytest.raises(ValueError, match="not a state file"):
        FakeGpus.open(tmp_path / "state")


def test_importing_it_needs_no_compiler_and_no_driver():
    code = "import paceline_demo.fake_nvml"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
