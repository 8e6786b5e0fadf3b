"""How a rank reports in its metadata what of its communication is recorded."""

from __future__ import annotations

RECORDER = "communication_recorder"  # "C++ library", "Python" or "none"
NOT_RECORDED = "communication_not_recorded"  # why some or all of it is not; absent: all of it is
TORCH = "torch"  # its version

OLDEST_TORCH = (2, 6)
NEWEST_TORCH = (2, 14)  # the newest tested one; later ones are recorded if their operators fit


def release_of(torch_version: str) -> tuple[int, int] | None:
    """Return major and minor of a version such as 2.13.0+cu130; None if it is not one."""
    try:
        major, minor = torch_version.split(".")[:2]
        return int(major), int(minor)
    except ValueError:
        return None
