"""Errors of a folder of Flight Recorder dumps.

FlightRecorderError
├── NoDumpsError      nothing to read in the folder
├── HostileDumpError  a pickle asks for more than data; it was not executed
├── NotADumpError     a file that is empty or does not begin like a dump
└── MalformedDumpError  a dump that is cut off, too large, or of another format
    └── MisnamedDumpError  a dump whose content belongs to another rank
"""

from __future__ import annotations


class FlightRecorderError(Exception):
    """A folder of dumps cannot be analyzed; the message is one sentence for the user."""


class NoDumpsError(FlightRecorderError):
    """The folder does not exist or holds no dump."""


class HostileDumpError(FlightRecorderError):
    """A pickle that is not plain data."""


class NotADumpError(FlightRecorderError):
    """A file beside the dumps that is not a dump."""


class MalformedDumpError(FlightRecorderError):
    """A dump that cannot be parsed."""


class MisnamedDumpError(MalformedDumpError):
    """A dump whose content belongs to another rank than its file name."""
