from __future__ import annotations

import json

import pytest

from paceline_agent.collect.kernel_log.records import Record, records_of

MESSAGE = "NVRM: Xid (PCI:0000:9b:00): 79, GPU has fallen off the bus."


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "[...] ",
        "[12345.678901] ",
        "[    0.000123] ",
        "<3>[12345.678901] ",
        "<3>",
        "kern  :err   : [12345.678901] ",
        "kern  :err   : [Sun Feb 23 16:24:18 2025] ",
        "kern  :err   : 2025-02-23T16:24:18,123456+00:00 ",
        "kern  :err   : ",
        "[Sun Feb 23 16:24:18 2025] ",
        "[Sun Feb  2 16:24:18 2025] ",
        "[So Feb  2 16:24:18 2025] ",
        "[Feb23 16:24] ",
        "[  +0.000123] ",
        "[12345.678901][ T1234] ",
        "[12345.678901] [  T1234] ",
        "2025-02-23T16:24:18,123456+00:00 ",
        "2025-02-23T16:24:18.123456+01:00 gpu-7 kernel: ",
        "2025-02-23T16:24:18+0000 gpu-7 kernel: [12345.678901] ",
        "2025-02-23T16:24:18Z gpu-7 kernel: ",
        "Feb 23 16:24:18 gpu-7 kernel: ",
        "Feb  2 16:24:18 gpu-7 kernel: [12345.678901] ",
        "[12345.678901] gpu-7 kernel: ",
        "[Sun Dec  1 14:54:40 2024] gpu-7 kernel: ",
        "1753012800.123456 gpu-7 kernel: ",
        "Feb 23 16:24:18.123456 gpu-7 kernel: ",
        "Sun 2025-02-23 16:24:18 UTC gpu-7 kernel: ",
        "Sun 2025-02-23 16:24:18 CEST gpu-7 kernel: ",
        "Sun 2025-02-23 16:24:18 +0530 gpu-7 kernel: ",
        "Sun 2025-02-23 16:24:18 -03 gpu-7 kernel: ",
        "2025-02-23T16:24:18 GPU kernel: ",
        "févr. 23 16:24:18 gpu-7 kernel: ",
        "2月 23 16:24:18 gpu-7 kernel: ",
        "192.168.11.119: kern:     err: [2025-02-23T16:24:18.458998481Z]: ",
        "kern: warning: [2025-02-23T16:24:18.458998481Z]: ",
        "<4>1 2025-02-23T16:24:18.123456Z gpu-7 kernel - - - ",
        "[12345.678901 <    0.000003>] ",
        "[12345.678901 <    0.000003 >] gpu-7 kernel: ",
        "[12345.678901 <    0.000003*>] gpu-7 kernel: ",
        "[12345.678901                ] gpu-7 kernel: ",
        "[<    0.000003>] ",
        "[Sun Feb 23 16:24:18 2025 <    0.000003>] ",
        "kernel: ",
        "gpu-7 kernel: ",
        "6,1234,5678,-;",
        "3,1234,5678,-,caller=T1234;",
    ],
)
def test_what_stands_before_a_message_is_no_part_of_it(prefix):
    (record,) = records_of(f"{prefix}{MESSAGE}\n")
    assert record.message == MESSAGE


def test_a_raw_record():
    assert list(records_of("6,3964,206764307,-;nvidia-nvswitch2: open (major=510)")) == [
        Record("nvidia-nvswitch2: open (major=510)", boot_us=206764307, sequence=3964)
    ]


def test_a_raw_record_of_several_lines():
    found = records_of(r"4,7,99,-;NVRM: (PCI ID: 10de:15f8)\x0aNVRM: fallen off the bus \xc3")
    assert [record.message for record in found] == [
        "NVRM: (PCI ID: 10de:15f8)",
        "NVRM: fallen off the bus \xc3",
    ]


def test_a_message_of_several_lines_that_syslog_escaped():
    line = "2025-02-23T16:24:18Z n1 kernel: NVRM: The NVIDIA GPU 0000:04:00.0#012NVRM: fallen\r\n"
    first, second = records_of(line)
    assert (first.message, second.message) == ("NVRM: The NVIDIA GPU 0000:04:00.0", "NVRM: fallen")
    assert first.wall_ns == second.wall_ns == 1740327858_000000000


def test_what_a_raw_record_says_of_its_device_is_no_record():
    assert not list(records_of(" SUBSYSTEM=pci"))
    assert not list(records_of(" DEVICE=+pci:0000:9b:00.0"))
    assert not list(records_of("\n"))


def test_times():
    (boot,) = records_of("[12345.678901] x")
    assert boot.boot_us == 12345678901
    (wall,) = records_of("2025-02-23T16:24:18.5+01:00 host kernel: x")
    assert wall.wall_ns == 1740324258_500000000
    (utc,) = records_of("Sun 2025-02-23 15:24:18 UTC host kernel: x")
    assert utc.wall_ns == 1740324258_000000000
    (west,) = records_of("Sun 2025-02-23 12:24:18 -03 host kernel: x")
    assert west.wall_ns == 1740324258_000000000
    (talos,) = records_of("n1: kern: info: [2025-02-23T15:24:18.5Z]: x")
    assert talos.wall_ns == 1740324258_500000000
    (unix,) = records_of("1753012800.123456 host kernel: x")
    assert unix.wall_ns == 1753012800_123456000


@pytest.mark.parametrize("line", ["[Sun Feb 31 99:24:18 2025] x", "2025-99-23T16:24:18Z x"])
def test_an_impossible_time_is_unknown(line):
    (record,) = records_of(line)
    assert (record.message, record.wall_ns) == ("x", None)


def test_the_journal_as_json():
    fields = {"__REALTIME_TIMESTAMP": "1753012800000000", "MESSAGE": MESSAGE, "PRIORITY": "3"}
    line = json.dumps(fields)
    assert list(records_of(line)) == [Record(MESSAGE, wall_ns=1753012800_000000000)]
    fields["MESSAGE"] = [*MESSAGE.encode(), 0xFF]  # not UTF-8
    assert next(records_of(json.dumps(fields))).message == f"{MESSAGE}\ufffd"
    assert not list(records_of('{"MESSAGE":[1,256]}'))
    assert not list(records_of('{"MESSAGE":["x"]}'))
    assert not list(records_of('{"MESSAGE":null}'))
    assert not list(records_of("{not json}"))


@pytest.mark.parametrize(
    "fields",
    [
        {"pri": 4, "time": 8.5, "msg": MESSAGE},  # dmesg -J | jq -c .dmesg[]
        {"priority": 4, "sequence": 7, "sec": 8, "usec": 5, "msg": MESSAGE},  # Fluent Bit's kmsg
        {"_TRANSPORT": "kernel", "host": "n1", "message": MESSAGE},  # Vector
        {"hostname": "n1", "programname": "kernel", "message": f"[8.5] {MESSAGE}"},  # rsyslog
    ],
)
def test_json_of_what_forwards_a_log(fields):
    assert [record.message for record in records_of(json.dumps(fields))] == [MESSAGE]
    assert not list(records_of(json.dumps({**fields, "programname": "sshd", "_TRANSPORT": "x"})))


def test_dmesg_as_json():
    lines = ['      {', '         "pri": 4,', '         "time":      8.5,',
             f'         "msg": "{MESSAGE} \\"x\\""', '      },{']  # fmt: skip
    messages = [record.message for line in lines for record in records_of(line)]
    assert f'{MESSAGE} "x"' in messages
    assert not list(records_of('  "msg": "\\q"'))


def test_the_journal_as_pretty_json():
    lines = ["{", '\t"_TRANSPORT" : "kernel",', f'\t"MESSAGE" : "{MESSAGE} \\"x\\"",', "}"]
    messages = [record.message for line in lines for record in records_of(line)]
    assert f'{MESSAGE} "x"' in messages


def test_what_begins_with_capitals_is_no_time_zone():
    (record,) = records_of("2025-02-23T16:24:18,123456 XFS (dm-0): Internal error")
    assert record.message == "XFS (dm-0): Internal error"


@pytest.mark.parametrize("line", ["MESSAGE=NVRM: Xid", "    MESSAGE=NVRM: Xid"])
def test_the_journal_with_all_its_fields(line: str):
    assert [record.message for record in records_of(line)] == ["NVRM: Xid"]


def test_what_a_program_wrote_into_the_journal_is_not_the_kernels():
    def messages(**fields: str) -> list[str]:
        return [record.message for record in records_of(json.dumps({"MESSAGE": "x", **fields}))]

    assert messages(_TRANSPORT="stdout", SYSLOG_IDENTIFIER="watcher") == []
    assert messages(_TRANSPORT="kernel") == ["x"]
    assert messages(_TRANSPORT="syslog", SYSLOG_IDENTIFIER="kernel") == ["x"]


def test_a_message_that_syslog_folded():
    (record,) = records_of(
        f"Feb 23 16:24:18 gpu-7 kernel: [12345.6] message repeated 3 times: [ {MESSAGE}]"
    )
    assert (record.message, record.times) == (MESSAGE, 3)
