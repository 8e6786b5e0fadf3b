"""Torch without the hooks, in a process that has loaded them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from paceline.collectives.native import Library
from paceline.torch_events import TorchEvents


@contextlib.contextmanager
def torch_alone() -> Iterator[None]:
    """Run without what the hooks have installed in torch.

    The functions of torch that recognition has replaced stay so, but pass each call on at once.
    """
    library, events = Library.load(), TorchEvents.get()
    if library is None:
        raise RuntimeError("run `python -m paceline.collectives` first: the library is not built")
    reported = events.recognition, events.recorder, events.checkpoints, events.saves
    library.detach()
    events.stop()
    try:
        yield
    finally:
        library.attach()
        recognition, recorder, checkpoints, saves = reported
        if recognition and recorder and checkpoints and saves:
            events.start(recognition, recorder, checkpoints, saves)
