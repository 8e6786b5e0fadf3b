"""The metadata of a job: short texts that its ranks report, by key."""

from __future__ import annotations

from collections.abc import Mapping

MOST_ENTRIES = 128  # more means that a key contains a counter or a rank


def merged(before: Mapping[str, str], reported: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata with what a rank reported; new keys beyond MOST_ENTRIES are ignored."""
    after = dict(before)
    for key, value in reported.items():
        if key in after or len(after) < MOST_ENTRIES:
            after[key] = value
    return after
