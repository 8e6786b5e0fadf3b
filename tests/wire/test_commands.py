"""Commands are decoded as they were encoded; anything else is an error."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_wire.commands import (
    Command,
    ControlRanks,
    Ping,
    RankSpec,
    StartRanks,
    StopGeneration,
    decode_line,
    encode_line,
)
from paceline_wire.topology import Topology

COMMANDS: list[Command] = [
    StartRanks(
        command_id=1,
        job="job-1",
        generation=3,
        topology=Topology(2, 2, 2),
        ranks=[RankSpec(0, 0, 0), RankSpec(1, 1)],
        argv=["python", "-m", "paceline_trainer", "line\nbreak"],
        environment={"A": "ü"},
        master_address="10.0.0.1",
        master_port=29500,
    ),
    StopGeneration(command_id=2, job="job-1", generation=3, grace_seconds=1.5),
    ControlRanks(command_id=3, job="j", generation=0, kind="checkpoint_and_stop", target_step=7),
    Ping(server_ns=5),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_a_command_is_one_line_and_is_decoded_as_encoded(command: Command) -> None:
    line = encode_line(command)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert decode_line(line) == command


@given(st.binary(max_size=200))
def test_noise_is_an_error(noise: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_line(noise)


@pytest.mark.parametrize("line", ["{}", '{"type":"format_disk"}', '{"type":"ping"}', "null", ""])
def test_an_invalid_command_is_an_error(line: str) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_line(line)
