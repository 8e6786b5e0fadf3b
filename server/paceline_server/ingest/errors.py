"""Errors of storing a valid batch.

IngestError
├── BusyError           too many batches wait to be written; retry
├── UnavailableError    the database is unavailable; retry
└── UnstorableError     the database rejects this batch; do not retry
"""

from __future__ import annotations


class IngestError(Exception):
    """A batch was not stored. `reason` is the label of the counter of rejected requests."""

    reason = "error"


class BusyError(IngestError):
    """Too many batches wait to be written."""

    reason = "busy"


class UnavailableError(IngestError):
    """The database is unavailable."""

    reason = "unavailable"


class UnstorableError(IngestError):
    """The database rejects this batch."""

    reason = "unstorable"
