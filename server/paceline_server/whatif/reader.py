"""Read recorded traces: Parquet files in the trace layout, and their metadata in YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.parquet
import yaml

from paceline_server.whatif.errors import MetadataError, TraceError
from paceline_server.whatif.trace import COLUMNS, Trace, align

NO_CHUNK = -1  # the value that the trace layout uses
_TOO_LARGE = 2.0**63  # integers are stored as int64
_MAY_BE_NULL = ("mc", "mb_id", "gmc")


class TraceMetadata(msgspec.Struct, frozen=True):
    """Sizes of the job; None: unknown. `dsp_size` counts the ranks that share a sequence."""

    dp_size: int
    pp_size: int
    tp_size: int | None = None
    world_size: int | None = None
    dsp_size: int | None = None
    vpp_size: int | None = None


def read_metadata(path: Path) -> TraceMetadata:
    """Read the metadata of a trace.

    Raises:
        MetadataError: the file cannot be read, or its sizes are invalid.
    """
    try:
        metadata = msgspec.convert(yaml.safe_load(path.read_text()), TraceMetadata)
    except OSError as error:
        raise MetadataError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise MetadataError(f"{path} is not YAML") from error
    except msgspec.ValidationError as error:
        raise MetadataError(f"{path} is not valid trace metadata: {error}") from error
    for name, size in msgspec.structs.asdict(metadata).items():
        if size is not None and size < 1:
            raise MetadataError(f"{path}: {name} is {size}, expected 1 or more")
    _check_world(path, metadata)
    return metadata


def _check_world(path: Path, metadata: TraceMetadata) -> None:
    """Check `world_size`; `dp_size` may or may not include the ranks that share a sequence."""
    if metadata.world_size is None or metadata.tp_size is None:
        return
    product = metadata.dp_size * metadata.pp_size * metadata.tp_size
    if metadata.world_size not in (product, product * (metadata.dsp_size or 1)):
        raise MetadataError(
            f"{path}: world_size is {metadata.world_size}, but dp_size x pp_size x tp_size x "
            f"dsp_size is {product * (metadata.dsp_size or 1)}"
        )


def read_trace(path: Path, metadata: TraceMetadata | None = None) -> Trace:
    """Read a trace.

    Raises:
        TraceError: the file is not a trace of training steps.
        MetadataError: the sizes in `metadata` differ from those of the trace.
    """
    columns, optypes = _read_columns(path)
    trace = align(columns, optypes)
    if metadata is not None:
        _check_sizes(trace, metadata)
    return trace


def _read_columns(path: Path) -> tuple[dict[str, npt.NDArray[Any]], tuple[str, ...]]:
    try:
        if not path.is_file():
            raise TraceError(f"there is no file {path}")
        # Dictionary-encoding optype after reading takes longer than the rest of the reader.
        with pyarrow.parquet.ParquetFile(path, read_dictionary=["optype"]) as file:
            missing = [name for name in COLUMNS if name not in file.schema_arrow.names]
            if missing:
                raise TraceError(f"{path} has no column {', '.join(missing)}")
            table = file.read(columns=list(COLUMNS), use_threads=False)
    except OSError as error:
        raise TraceError(
            f"cannot read {path}: {error.strerror or _first_sentence(error)}"
        ) from error
    except KeyError as error:  # raised by `read_dictionary`
        raise TraceError(f"{path} has no column optype") from error
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:  # invalid column names
        raise TraceError(f"{path} is not Parquet: {_first_sentence(error)}") from error
    columns = {}
    for name in COLUMNS:
        column = table[name]
        if name == "optype":
            columns[name], optypes = _codes(column, path)
        elif name in ("start_ts", "duration"):
            columns[name] = _numbers(column, name, path)
        else:
            columns[name] = _integers(column, name, path)
    return columns, optypes


def _first_sentence(error: Exception) -> str:
    return str(error).partition("\n")[0].partition(". ")[0]


def _codes(column: Any, path: Path) -> tuple[npt.NDArray[Any], tuple[str, ...]]:
    try:
        encoded = column.combine_chunks()
        if not pyarrow.types.is_dictionary(encoded.type):
            encoded = encoded.dictionary_encode()
        encoded.validate(full=True)  # Arrow does not check codes and text when it reads them
        names = tuple(encoded.dictionary.to_pylist())
    except pyarrow.ArrowException as error:
        raise TraceError(f"{path}: column optype does not hold text") from error
    if encoded.null_count:
        raise TraceError(f"{path}: column optype has no value in {encoded.null_count} rows")
    if not all(isinstance(name, str) for name in names):
        raise TraceError(f"{path}: column optype holds {encoded.type.value_type}, expected text")
    return encoded.indices.to_numpy(zero_copy_only=False), names


def _numbers(column: Any, name: str, path: Path) -> npt.NDArray[Any]:
    if not pyarrow.types.is_floating(column.type) and not pyarrow.types.is_integer(column.type):
        raise TraceError(f"{path}: column {name} holds {column.type}, expected seconds")
    values: npt.NDArray[Any] = column.to_numpy()
    return values if values.dtype.kind == "f" else values.astype(np.float64)


def _integers(column: Any, name: str, path: Path) -> npt.NDArray[Any]:
    """Return a column as integers; only chunk and microbatch columns may contain null."""
    if pyarrow.types.is_null(column.type) and name in _MAY_BE_NULL:
        return np.full(len(column), NO_CHUNK)
    values: npt.NDArray[Any] = column.to_numpy()
    if values.dtype.kind in "iu" and values.dtype != np.uint64:
        return values
    if values.dtype.kind not in "fu":
        raise TraceError(f"{path}: column {name} holds {column.type}, expected whole numbers")
    empty = np.isnan(values)
    if name in _MAY_BE_NULL:
        values = np.where(empty, NO_CHUNK, values)
    elif empty.any():
        raise TraceError(f"{path}: column {name} has no value in {empty.sum()} rows")
    if (values != np.floor(values)).any() or not np.isfinite(values).all():
        raise TraceError(f"{path}: column {name} holds fractions, expected whole numbers")
    if (np.abs(values) >= _TOO_LARGE).any():
        raise TraceError(f"{path}: column {name} holds {values.max()}, expected less than 2^63")
    return values.astype(np.int64)


def _check_sizes(trace: Trace, metadata: TraceMetadata) -> None:
    """Check the sizes; `dp_size` may or may not include the ranks that share a sequence."""
    dp_ranks, stages = trace.ranks.shape
    if dp_ranks not in (metadata.dp_size, metadata.dp_size * (metadata.dsp_size or 1)):
        raise MetadataError(
            f"dp_size is {metadata.dp_size} in the metadata, but the trace has {dp_ranks} dp ranks"
        )
    if stages != metadata.pp_size:
        raise MetadataError(
            f"pp_size is {metadata.pp_size} in the metadata, but the trace has {stages} stages"
        )
    chunks = int(trace.operations.chunk.max()) + 1
    if metadata.vpp_size not in (None, chunks):
        raise MetadataError(
            f"vpp_size is {metadata.vpp_size} in the metadata, but the trace has {chunks} chunks "
            "per stage"
        )
