"""Reading trace and metadata files: what is accepted, and the errors for the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from synthetic_trace import SyntheticRun

from paceline_server.whatif import reader
from paceline_server.whatif.analysis import analyze
from paceline_server.whatif.errors import MetadataError, TraceError
from paceline_server.whatif.reader import read_metadata, read_trace

RUN = {"dp": 2, "pp": 2, "tp": 2, "jitter": 0.1}


def table(**replaced: Any) -> pa.Table:
    columns: dict[str, Any] = {**SyntheticRun(**RUN).columns(), **replaced}  # type: ignore[arg-type]
    return pa.table({name: values for name, values in columns.items() if values is not None})


def written(tmp_path: Path, content: pa.Table) -> Path:
    path = tmp_path / "trace.parquet"
    pq.write_table(content, path, row_group_size=100)
    return path


def metadata(tmp_path: Path, **replaced: Any) -> Path:
    sizes = {"dp_size": 2, "pp_size": 2, "tp_size": 2, "world_size": 8, **replaced}
    path = tmp_path / "meta.yaml"
    path.write_text("".join(f"{name}: {size}\n" for name, size in sizes.items() if size))
    return path


def test_text_and_dictionary_columns_give_the_same_result(tmp_path: Path) -> None:
    plain = analyze(read_trace(written(tmp_path, table())))
    content = table()
    encoded = content.set_column(
        content.schema.get_field_index("optype"), "optype", content["optype"].dictionary_encode()
    )
    assert analyze(read_trace(written(tmp_path, encoded))) == plain


def test_missing_chunks_and_microbatches_may_be_null(tmp_path: Path) -> None:
    content = table()
    for name in ("mc", "mb_id", "gmc"):
        values = [None if value < 0 else value for value in content[name].to_pylist()]
        at = content.schema.get_field_index(name)
        content = content.set_column(at, name, pa.array(values))
    trace = read_trace(written(tmp_path, content))
    assert analyze(trace) == analyze(read_trace(written(tmp_path, table())))


def test_column_of_type_null_means_no_chunk(tmp_path: Path) -> None:
    content = table()
    for name in ("mb_id", "gmc"):
        at = content.schema.get_field_index(name)
        content = content.set_column(at, name, pa.nulls(len(content)))
    assert analyze(read_trace(written(tmp_path, content))) == analyze(
        read_trace(written(tmp_path, table()))
    )


def test_all_number_types_give_the_same_result(tmp_path: Path) -> None:
    plain = analyze(read_trace(written(tmp_path, table())))
    for kind in (pa.uint64(), pa.uint8(), pa.int32(), pa.float64()):
        content = table()
        for name in ("step", "dp_rank", "stage", "rank"):
            at = content.schema.get_field_index(name)
            content = content.set_column(at, name, content[name].cast(kind))
        assert analyze(read_trace(written(tmp_path, content))) == plain


def test_matching_metadata_is_accepted(tmp_path: Path) -> None:
    sizes = read_metadata(metadata(tmp_path, trial_name="x", run_id=1))
    assert read_trace(written(tmp_path, table()), sizes).ranks.shape == (2, 2)


@pytest.mark.parametrize(
    "sizes", [{"dp_size": 1}, {"dp_size": 2, "world_size": 16}, {"dp_size": 2, "world_size": 8}]
)
def test_dp_size_may_include_ranks_that_share_a_sequence(
    tmp_path: Path, sizes: dict[str, int]
) -> None:
    read = read_metadata(metadata(tmp_path, dsp_size=2, **sizes))
    assert read_trace(written(tmp_path, table()), read).ranks.shape == (2, 2)


def test_missing_sizes_are_not_checked(tmp_path: Path) -> None:
    read = read_metadata(metadata(tmp_path, tp_size=None, world_size=None, vpp_size="null"))
    assert read_trace(written(tmp_path, table()), read).ranks.shape == (2, 2)


@pytest.mark.parametrize(
    ("replaced", "sentence"),
    [
        (
            {"dp_size": 4, "world_size": 16},
            "dp_size is 4 in the metadata, but the trace has 2 dp ranks",
        ),
        (
            {"pp_size": 4, "world_size": 16},
            "pp_size is 4 in the metadata, but the trace has 2 stages",
        ),
        ({"vpp_size": 2}, "vpp_size is 2 in the metadata, but the trace has 1 chunks per stage"),
        ({"world_size": 9}, "world_size is 9, but dp_size x pp_size x tp_size x dsp_size is 8"),
        ({"dp_size": "many"}, "is not valid trace metadata"),
        ({"dp_size": None}, "dp_size"),
        ({"tp_size": -2}, "tp_size is -2, expected 1 or more"),
    ],
)
def test_mismatched_metadata_is_rejected(
    tmp_path: Path, replaced: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(MetadataError, match=sentence):
        read_trace(written(tmp_path, table()), read_metadata(metadata(tmp_path, **replaced)))


@pytest.mark.parametrize("content", [b"\x80\x81", b"a: [", b"- 1\n", b""])
def test_invalid_metadata_file_is_rejected(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "meta.yaml"
    path.write_bytes(content)
    with pytest.raises(MetadataError, match=r"meta\.yaml"):
        read_metadata(path)


def test_error_names_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"there is no file .*gone"):
        read_trace(tmp_path / "gone")
    with pytest.raises(MetadataError, match=r"cannot read .*gone"):
        read_metadata(tmp_path / "gone")


@pytest.mark.parametrize(
    "content", [b"", b"PAR1", b"dp_rank,stage\n0,0\n", b"PAR1" + bytes(64) + b"PAR1"]
)
def test_file_that_is_not_parquet_is_rejected(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.parquet"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"trace\.parquet"):
        read_trace(path)


def test_column_name_that_is_not_utf8_is_rejected(tmp_path: Path) -> None:
    path = written(tmp_path, table())
    path.write_bytes(path.read_bytes().replace(b"duration", b"d\xffration"))
    with pytest.raises(TraceError, match="is not Parquet: 'utf-8' codec can't decode byte 0xff"):
        read_trace(path)


def test_codes_without_text_are_rejected() -> None:
    """Arrow does not check the codes of a damaged file."""
    codes = pa.DictionaryArray.from_arrays(pa.array([0, 7]), pa.array(["gc"]), safe=False)
    with pytest.raises(TraceError, match="optype does not hold text"):
        reader._codes(pa.chunked_array([codes]), Path("trace.parquet"))


COUNT = len(SyntheticRun(**RUN).columns()["step"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("replaced", "sentence"),
    [
        ({"gmc": None, "mc": None}, "no column mc, gmc"),
        ({"optype": None}, "no column optype"),
        ({"start_ts": ["soon"] * COUNT}, "start_ts holds string, expected seconds"),
        ({"stage": ["first"] * COUNT}, "stage holds string, expected whole numbers"),
        ({"optype": [3] * COUNT}, "optype holds int64, expected text"),
        ({"optype": [None] + ["gc"] * (COUNT - 1)}, "optype has no value in 1 rows"),
        ({"step": [None] + [7] * (COUNT - 1)}, "step has no value in 1 rows"),
        ({"seq_id": [0.5] * COUNT}, "seq_id holds fractions"),
        ({"step": pa.array([1 << 63] * COUNT, pa.uint64())}, "step holds 9223372036854775808"),
        ({"seq_id": [1e300] * COUNT}, "seq_id holds 1e.300, expected less than"),
        ({"duration": [None] + [0.1] * (COUNT - 1)}, "duration is not a finite number in 1 of"),
    ],
)
def test_invalid_columns_are_rejected(
    tmp_path: Path, replaced: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(TraceError, match=sentence):
        read_trace(written(tmp_path, table(**replaced)))


def test_trace_without_rows_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no operations"):
        read_trace(written(tmp_path, table().slice(0, 0)))
