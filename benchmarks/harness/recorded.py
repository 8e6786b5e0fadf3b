"""A check that the hooks recorded something: in a process without an agent they do nothing."""

from __future__ import annotations

from pathlib import Path

from paceline_wire import ring
from paceline_wire.ring import RingReader


def check_recorded(directory: str) -> None:
    """Raise RuntimeError if no ring in the directory has a span."""
    for path in Path(directory).glob("*.ring"):
        reader = RingReader(path)
        spans = reader.state[ring.STATE_HEAD]
        reader.close()
        if spans:
            return
    raise RuntimeError(f"the hooks recorded nothing in {directory}: nothing was measured")
