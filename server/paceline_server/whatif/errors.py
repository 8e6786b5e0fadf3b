"""Errors of a trace.

WhatIfError
├── TraceError      the trace cannot be read, or cannot have been recorded from a training run
└── MetadataError   the metadata cannot be read, or is not that of the trace
"""


class WhatIfError(ValueError):
    """The message is one sentence for the user: what was expected and what was found."""


class TraceError(WhatIfError):
    pass


class MetadataError(WhatIfError):
    pass
