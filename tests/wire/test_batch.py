"""Batches are decoded as they were encoded; anything else is rejected with a reason."""

from __future__ import annotations

import contextlib
import math
import tracemalloc
from itertools import chain

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from paceline_wire import batch as wire
from paceline_wire.batch import (
    AgentHello,
    Batch,
    BatchError,
    CollectorEvent,
    CommandResult,
    DeviceEvent,
    GpuInfo,
    RankAcknowledged,
    RankDefined,
    RankExited,
    RankStarted,
    Sample,
    SampleBlock,
    SpanBlock,
    decode,
    encode,
    pack_series,
    pack_values,
)
from paceline_wire.ring import GroupDefinition, RankDescription, SectionDefinition
from paceline_wire.topology import Coordinates, Topology

text = st.text(max_size=20)
u63 = st.integers(0, 2**63 - 1)
small = st.integers(0, 2**31)
finite = st.floats(allow_nan=False, allow_infinity=False)
rank = {"time_ns": u63, "job": text, "generation": small, "rank": small}
definitions = st.one_of(
    st.builds(SectionDefinition, small, text),
    st.builds(GroupDefinition, small, text, st.lists(small, max_size=4), st.none() | text),
)
sizes = st.integers(1, 4)
descriptions = st.builds(
    RankDescription,
    source=text,
    topology=st.none() | st.builds(Topology, sizes, sizes, sizes, sizes, sizes),
    coordinates=st.none() | st.builds(Coordinates, *[st.integers(0, 9)] * 5),
    metadata=st.dictionaries(text, text, max_size=2),
)
events = st.one_of(
    st.builds(
        AgentHello,
        time_ns=u63,
        hostname=text,
        version=text,
        address=text,
        rendezvous_port=small,
        slots=small,
        gpus=st.lists(st.builds(GpuInfo, small, text, text, text), max_size=2),
        labels=st.dictionaries(text, text, max_size=2),
    ),
    st.builds(RankStarted, pid=small, **rank),
    st.builds(
        RankDefined,
        definitions=st.lists(definitions, max_size=3),
        descriptions=st.lists(descriptions, max_size=2),
        **rank,
    ),
    st.builds(
        RankExited,
        pid=small,
        exit_code=st.none() | st.integers(0, 255),
        signal=st.none() | st.integers(1, 64),
        commanded=st.booleans(),
        drained=st.booleans(),
        log_tail=text,
        **rank,
    ),
    st.builds(RankAcknowledged, command_id=u63, status=text, step=small, **rank),
    st.builds(CommandResult, time_ns=u63, command_id=u63, ok=st.booleans(), detail=text),
    st.builds(DeviceEvent, time_ns=u63, kind=text, device=text, detail=text),
    st.builds(CollectorEvent, time_ns=u63, collector=text, kind=text, detail=text),
)
blocks = st.builds(
    SpanBlock,
    text,
    small,
    small,
    st.integers(0, 5).flatmap(lambda n: st.binary(min_size=64 * n, max_size=64 * n)),
    st.integers(-(2**62), 2**62),
    small,
)
series = st.lists(st.tuples(text, st.dictionaries(text, text, max_size=2)), max_size=3)
sample_blocks = series.flatmap(
    lambda rows: st.builds(
        SampleBlock,
        st.just(pack_series(rows)),
        st.lists(finite | st.just(math.nan), min_size=len(rows), max_size=len(rows)).map(
            pack_values
        ),
        u63,
    )
)
samples = st.builds(Sample, text, st.dictionaries(text, text, max_size=2), finite, u63)
identifiers = st.text(min_size=1, max_size=128)
batches = st.builds(
    Batch,
    agent_id=identifiers,
    boot_id=identifiers,
    sequence=u63,
    packed_ns=u63,
    events=st.lists(events, max_size=4),
    spans=st.lists(blocks, max_size=3),
    samples=st.lists(samples, max_size=4),
    dropped_batches=small,
)


def packed(**changes: object) -> bytes:
    """Return a payload whose fields need not be valid."""
    fields: dict[str, object] = {
        "version": wire.VERSION,
        "agent_id": "node-0",
        "boot_id": "boot",
        "sequence": 0,
        "packed_ns": 1,
    }
    content = msgspec.msgpack.encode({**fields, **changes})
    return wire.pack_content(content)


def reason(payload: bytes) -> str:
    with pytest.raises(BatchError) as caught:
        decode(payload)
    return caught.value.reason


@given(batches)
def test_a_batch_is_decoded_as_it_was_encoded(batch: Batch) -> None:
    assert decode(encode(batch)) == batch


@given(st.binary(max_size=400))
def test_noise_is_refused_with_a_reason(noise: bytes) -> None:
    assert reason(noise) in {"compression", "malformed"}


@given(st.binary(max_size=400))
def test_noise_inside_a_valid_frame_is_refused(noise: bytes) -> None:
    payload = wire.pack_content(noise)
    assert reason(payload) in {"malformed", "version", "compression"}


@given(batches, st.data())
def test_a_truncated_batch_is_refused(batch: Batch, data: st.DataObject) -> None:
    payload = encode(batch)
    length = data.draw(st.integers(0, len(payload) - 1))
    assert reason(payload[:length]) == "compression"


@given(batches, st.data())
def test_a_flipped_bit_is_refused_or_still_a_batch(batch: Batch, data: st.DataObject) -> None:
    payload = bytearray(encode(batch))
    bit = data.draw(st.integers(0, len(payload) * 8 - 1))
    payload[bit // 8] ^= 1 << bit % 8
    with contextlib.suppress(BatchError):  # any other error fails the test
        assert isinstance(decode(bytes(payload)), Batch)


@given(batches, st.lists(sample_blocks, max_size=3))
def test_values_in_blocks_are_decoded_as_samples(batch: Batch, blocks: list[SampleBlock]) -> None:
    samples = [*batch.samples, *chain.from_iterable(block.samples() for block in blocks)]
    decoded = decode(encode(msgspec.structs.replace(batch, blocks=blocks)))
    assert decoded == msgspec.structs.replace(batch, samples=samples)
    assert len(samples) <= len(batch.samples) + sum(block.count for block in blocks)


def test_a_batch_of_an_older_agent_is_read() -> None:
    assert decode(packed(version=1, samples=[["up", {}, 1.0, 7]])).samples == [
        Sample("up", {}, 1.0, 7)
    ]


def test_another_version_is_the_first_error_reported() -> None:
    assert reason(packed(version=wire.VERSION + 1, agent_id=17)) == "version"


@pytest.mark.parametrize(
    "changes",
    [
        {"agent_id": ""},
        {"boot_id": ""},
        {"sequence": -1},
        {"agent_id": "x" * 129},
        {"boot_id": "x" * 129},
        {
            "spans": [
                {"job": "j", "generation": 0, "rank": 0, "columns": b"1", "clock_offset_ns": 0}
            ]
        },
        {"blocks": [[[["up", {}]], b"1234567", 0]]},
        {"blocks": [[[["up", {}]], bytes(16), 0]]},
        {"blocks": [[[], bytes(8), 0]]},
        {"blocks": [[[["up", {}]], pack_values([math.inf]), 0]]},
        {"samples": [["up", {}, math.nan, 0]]},
        {"samples": [["up", {}, math.inf, 0]]},
    ],
)
def test_a_batch_with_invalid_values_is_invalid(changes: dict[str, object]) -> None:
    assert reason(packed(**changes)) == "invalid"


@pytest.mark.parametrize(
    "changes",
    [
        {"agent_id": 3},
        {"events": [{"type": "unheard_of"}]},
        {"samples": [["up", {}]]},
        {"spans": "none"},
    ],
)
def test_a_batch_of_the_wrong_types_is_malformed(changes: dict[str, object]) -> None:
    assert reason(packed(**changes)) == "malformed"


def test_deep_nesting_is_malformed_not_a_crash() -> None:
    deep = b"\x91" * 100_000 + b"\xc0"
    assert reason(wire.pack_content(deep)) == "malformed"


def test_too_many_compressed_bytes_are_not_decompressed() -> None:
    assert reason(bytes(wire.MAXIMUM_COMPRESSED_BYTES + 1)) == "oversized"


def test_a_bomb_with_its_declared_size_is_not_decompressed() -> None:
    bomb = wire.pack_content(bytes(wire.MAXIMUM_BYTES + 1))
    assert len(bomb) < 10_000
    assert reason(bomb) == "oversized"


@pytest.mark.parametrize(
    "options",
    [{}, {"write_content_size": False, "write_checksum": True}, {"write_checksum": False}],
)
def test_a_frame_without_size_or_checksum_is_refused(options: dict[str, bool]) -> None:
    content = msgspec.msgpack.encode(Batch(agent_id="a", boot_id="b", sequence=0, packed_ns=0))
    assert reason(zstandard.ZstdCompressor(**options).compress(content)) == "compression"


def test_a_payload_changed_on_its_way_is_refused() -> None:
    samples = [Sample("paceline_gpu_power_watts", {"gpu": "0"}, 300.5, 7)]
    batch = Batch(agent_id="a", boot_id="b", sequence=0, packed_ns=0, samples=samples)
    whole = encode(batch)
    for place in range(len(whole)):
        for bit in range(8):
            changed = bytearray(whole)
            changed[place] ^= 1 << bit
            with contextlib.suppress(BatchError):  # some bits of a frame have no meaning
                assert decode(bytes(changed)) == batch, (place, bit)
    assert reason(whole + b"\0") == "compression"


def test_a_frame_with_a_wrong_declared_size_is_refused() -> None:
    payload = bytearray(encode(Batch(agent_id="a", boot_id="b", sequence=0, packed_ns=0)))
    payload[5] ^= 0x10  # the single byte of the content size
    assert reason(bytes(payload)) == "compression"


@pytest.mark.parametrize("series", [7, ["up"], [["up"]], [["up", {"a": 1}]], [[b"\xff", {}]]])
def test_invalid_series_are_malformed(series: object) -> None:
    assert reason(packed(blocks=[[series, bytes(8), 0]])) == "malformed"


def many(count: int) -> bytes:
    """Return the msgpack header of a list of `count` entries."""
    return b"\xdd" + count.to_bytes(4, "big")


@pytest.mark.parametrize(
    ("field", "entry"),
    [
        ("samples", msgspec.msgpack.encode(["", {}, 0, 0])),
        ("events", b"\x80"),
        ("spans", b"\x80"),
        ("blocks", msgspec.msgpack.encode([[], b"", 0])),
    ],
)
def test_few_bytes_never_become_a_million_objects(field: str, entry: bytes) -> None:
    count = 1_000_000
    listed = msgspec.Raw(many(count) + entry * count)
    payload = packed(**{field: listed})
    tracemalloc.start()
    try:
        assert reason(payload) == "oversized"
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_blocks_count_as_their_samples() -> None:
    series = [["m", {}]] * 1000
    block = [series, bytes(8 * 1000), 0]
    blocks = [block] * (wire.MAXIMUM_SAMPLES // 1000 + 1)
    assert reason(packed(blocks=blocks)) == "oversized"


def test_a_header_that_is_cut_off_is_malformed() -> None:
    for length in range(1, 40):
        assert reason(wire.pack_content(b"\xdd" * length)) == "malformed"


def test_a_batch_of_zeros_is_read_however_well_it_compresses() -> None:
    """A user's rings may contain anything, and the node's other data is in the same batch."""
    zeros = SpanBlock("j", 0, 0, bytes(64 * (1 << 16)), 0)
    batch = Batch(agent_id="a", boot_id="b", sequence=0, packed_ns=0, spans=[zeros])
    payload = encode(batch)
    assert len(payload) < 10_000
    assert decode(payload) == batch


def test_a_server_without_descriptions_reads_the_event_that_has_them() -> None:
    class EarlierRankDefined(msgspec.Struct, frozen=True, kw_only=True, tag="rank_defined"):
        rank: int
        definitions: list[SectionDefinition | GroupDefinition]

    sent = RankDefined(
        time_ns=1,
        job="job",
        generation=0,
        rank=3,
        definitions=[],
        descriptions=[RankDescription(source="DeviceMesh", topology=Topology(2))],
    )
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=EarlierRankDefined)
    assert read == EarlierRankDefined(rank=3, definitions=[])
