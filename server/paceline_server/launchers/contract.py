"""The contract of a launcher's backend, and its errors.

    LauncherError                       it failed; the request is repeated
    ├── LauncherUnavailableError        it does not answer
    └── LauncherRefusedError            repeating does not help: no permission, no commands

A request is carried out by repeating two calls until its effect is observed:

    seen = backend.observe(request)     # reads only
    backend.begin(request, seen)        # one external action that brings it closer

Both may be interrupted at any moment, also by the death of the server. Every decision follows from
what the launcher shows, not from what this process remembers, so the next server continues where
the last one stopped. `begin` is called only by the holder of a lease, just after it was confirmed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self

import msgspec

from paceline_server.decide.types import LaunchRequest
from paceline_server.engine.types import Launch
from paceline_server.store.database import Database

ObservedState = Literal[
    "ready",  # nothing was done yet, and it can be done
    "begun",  # on its way
    "done",  # the effect is there
    "refused",  # it cannot be done, or not now
    "over",  # a person or the launcher itself ended the job
]


class LauncherError(Exception):
    """A launcher did not do what was expected; the message has a sentence for people."""


class LauncherUnavailableError(LauncherError):
    """The launcher does not answer."""


class LauncherRefusedError(LauncherError):
    """This server cannot use the launcher, or not for this."""


class ShownRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as the launcher shows it now."""

    state: ObservedState
    detail: str
    content: Any = None  # for the backend's own `begin`
    has_effect: bool = False  # the restart has ended the ranks, or will


class LauncherSettings(Protocol):
    """The settings of backends."""

    @property
    def kubernetes_url(self) -> str | None: ...

    @property
    def kubernetes_credentials(self) -> Path | None: ...


@dataclass(frozen=True, slots=True)
class LauncherParts:
    """The parts of the server that a backend may use."""

    settings: LauncherSettings
    database: Database


class Launcher(Protocol):
    """A backend. `observe` and `begin` are called from one thread."""

    name: ClassVar[str]

    @classmethod
    def create(cls, parts: LauncherParts) -> Self:
        """Return the backend of a server; it connects to the launcher at its first use."""
        ...

    @classmethod
    def recognize(cls, metadata: Mapping[str, Mapping[str, str]]) -> Launch | None:
        """Return the launch that these ranks report; None if it is not of this launcher.

        Args:
            metadata: of one rank of each node, by agent id.
        """
        ...

    def observe(self, request: LaunchRequest) -> ShownRequest:
        """Return how far the request is. Raises LauncherError."""
        ...

    def begin(self, request: LaunchRequest, seen: ShownRequest) -> None:
        """Do the next external action, if one is due. Raises LauncherError."""
        ...

    def close(self) -> None:
        """Close what is open to the launcher."""
