"""Progress lines of the installer, `install_environment.py`, which make runs first."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "install_environment.py"
_spec = importlib.util.spec_from_file_location("install_environment", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
install_environment = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(install_environment)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            "Downloading numpy-2.3.1-cp311-cp311-manylinux_2_28_x86_64.whl (16.9 MB)",
            "downloading numpy-2.3.1 (16.9 MB)",
        ),
        (
            "  Using cached click-8.2.1-py3-none-any.whl (102 kB)",
            "using local click-8.2.1 (102 kB)",
        ),
        (
            "Processing /opt/wheels/torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl",
            "using local torch-2.13.0+cpu",
        ),
        ("  Downloading click-8.2.1-py3-none-any.whl.metadata (2.5 kB)", None),
        ("Collecting click>=8.1 (from paceline==0.1.0)", None),
    ],
)
def test_each_downloaded_package_is_one_line_with_its_size(line: str, text: str | None) -> None:
    assert install_environment.describe_download(line) == text


def test_the_plan_is_printed_before_anything_is_installed(tmp_path: Path) -> None:
    (tmp_path / "venv").write_text("a file where the environment should be created")
    result = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path / "venv")], capture_output=True, text=True
    )
    assert result.returncode != 0
    for line in ("packages", "download", "disk", "time"):
        assert f"\n  {line} " in result.stdout


def test_a_failure_of_pip_shows_its_output(capsys: pytest.CaptureFixture[str]) -> None:
    progress = install_environment.InstallationProgress()
    script = "print('Collecting a'); print('ERROR: no space left'); raise SystemExit(2)"
    status = install_environment.run_plain([sys.executable, "-c", script], progress)
    assert status == 2
    assert "ERROR: no space left" in capsys.readouterr().out
