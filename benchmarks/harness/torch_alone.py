"""Torch without the hooks, in a process that has loaded them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from paceline.collectives.native import Library


@contextlib.contextmanager
def torch_alone() -> Iterator[None]:
    """Run without what the hooks have installed in torch."""
    library = Library.load()
    if library is None:
        raise RuntimeError("run `python -m paceline.collectives` first: the library is not built")
    library.detach()
    try:
        yield
    finally:
        library.attach()
