"""Write traces: Parquet in the trace layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from paceline_server.whatif.export import Export


def to_parquet(exported: Export) -> bytes:
    """Return the content of the Parquet file."""
    columns: dict[str, Any] = {}
    for name, values in exported.columns.items():
        if name == "optype":
            columns[name] = pyarrow.array(values.tolist()).dictionary_encode()
        elif values.dtype.kind == "f":
            columns[name] = pyarrow.array(values)
        else:
            columns[name] = pyarrow.array(values.astype(np.int32))
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink, compression="zstd")
    content: bytes = sink.getvalue().to_pybytes()
    return content
