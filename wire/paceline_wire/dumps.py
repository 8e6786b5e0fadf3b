"""A rank's Flight Recorder dump in transit: the unchanged file, compressed, never unpickled."""

from __future__ import annotations

import zstandard

MAXIMUM_FILE_BYTES = 64 << 20
MAXIMUM_PACKED_BYTES = 4 << 20  # a batch holds at most one of these


def pack(content: bytes) -> bytes:
    """Compress a dump."""
    return zstandard.ZstdCompressor(level=3).compress(content)


def unpack(packed: bytes) -> bytes:
    """Decompress a dump. Raises ValueError if it was not made by `pack` or is too large."""
    try:
        declared = zstandard.get_frame_parameters(packed).content_size
        if not 0 <= declared <= MAXIMUM_FILE_BYTES:
            raise ValueError(f"a dump of {declared} bytes, at most {MAXIMUM_FILE_BYTES}")
        return zstandard.ZstdDecompressor().decompress(packed) if declared else b""
    except zstandard.ZstdError as error:
        raise ValueError(f"not a packed dump: {error}") from error
