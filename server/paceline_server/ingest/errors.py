"""Why a good batch was not stored.

IngestError
├── BusyError           more batches wait than are taken; try again
├── UnavailableError    the database does not answer; try again
└── UnstorableError     the database refuses this very batch; never try again
"""

from __future__ import annotations


class IngestError(Exception):
    """`reason` is a short stable word for the counter."""

    reason = "error"


class BusyError(IngestError):
    reason = "busy"


class UnavailableError(IngestError):
    reason = "unavailable"


class UnstorableError(IngestError):
    reason = "unstorable"
