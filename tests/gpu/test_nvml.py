"""The agent's readings of a real GPU, compared with those of nvidia-smi."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

QUERY = "uuid,memory.total,temperature.gpu,power.draw,clocks.max.sm,clocks.sm,memory.used"


def nvidia_smi() -> dict[str, Any]:
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits", "--id=0"]
    line = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return dict(zip(QUERY.split(","), line.strip().split(", "), strict=True))


@pytest.fixture(scope="module")
def collected() -> dict[str, Any]:
    command = [sys.executable, "-m", "paceline_cli", "agent", "--once", "--json"]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout
    found: dict[str, Any] = json.loads(output)
    return found


def test_the_collector_reads_the_driver(collected: dict[str, Any]) -> None:
    (nvml,) = [each for each in collected["collectors"] if each["collector"] == "nvml"]
    assert nvml == {"collector": "nvml", "success": True, "trouble": None}


def test_readings_agree_with_nvidia_smi(collected: dict[str, Any]) -> None:
    expected = nvidia_smi()
    values = {
        each["name"]: each["value"]
        for each in collected["values"]
        if expected["uuid"] in each["labels"].values()
    }
    assert values["DCGM_FI_DEV_MAX_SM_CLOCK"] == float(expected["clocks.max.sm"])
    assert values["DCGM_FI_DEV_FB_TOTAL"] == pytest.approx(
        float(expected["memory.total"]), rel=0.02
    )
    assert values["DCGM_FI_DEV_FB_USED"] < values["DCGM_FI_DEV_FB_TOTAL"]
    assert abs(values["DCGM_FI_DEV_GPU_TEMP"] - float(expected["temperature.gpu"])) <= 10
    assert 0 < values["DCGM_FI_DEV_POWER_USAGE"] < 1500


def test_the_hooks_name_the_gpu_by_its_uuid() -> None:
    from paceline.environment import _used_gpu_uuid  # noqa: PLC0415 (a test of internals)

    torch.cuda.init()
    assert _used_gpu_uuid() == nvidia_smi()["uuid"]
