"""The tables of nccl-tests: complete, truncated, and mixed with launchers' prefixes."""

from __future__ import annotations

import json

import pytest

from paceline_cli.preflight.nccl_tests import NcclTestRow, Output, checks, parse
from paceline_cli.preflight.verdict import Check

HEADER = """\
# nThread 1 nGpus 8 minBytes 1048576 maxBytes 8589934592 step: 2(factor) warmup iters: 5 iters: 20
#
# Using devices
#  Rank  0 Group  0 Pid 166840 on     node-1 device  0 [0x07] NVIDIA H100 80GB HBM3
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""  # noqa: E501
ROWS = """\
     1048576        262144     float     sum      -1    71.30   14.71   27.57      0    70.92   14.78   27.72      0
     8388608       2097152     float     sum      -1    151.1   55.52  104.10      0    149.9   55.96  104.93      0
   134217728      33554432     float     sum      -1    780.2  172.03  322.55      0    778.0  172.52  323.47      0
  8589934592    2147483648     float     sum      -1    35211  243.96  457.42      0    35195  244.07  457.63      0
"""  # noqa: E501
FOOTER = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 228.174\n#\n"
WHOLE = "all_reduce_perf -b 1M -e 8G -f 2 -g 8\n" + HEADER + ROWS + FOOTER


def judged(**outputs: str) -> dict[str, Check]:
    return {check.name: check for check in checks({n: parse(t) for n, t in outputs.items()})}


def test_a_table_is_read() -> None:
    output = parse(WHOLE)
    assert len(output.rows) == 8
    last = output.rows[-1]
    assert (last.size_bytes, last.in_place, last.wrong) == (8_589_934_592, True, 0)
    assert last.bus_gigabytes_per_second == 457.63
    assert last.time_seconds == pytest.approx(0.035195)
    assert (output.test, output.out_of_bounds) == ("all_reduce_perf", 0)
    assert output.average_gigabytes_per_second == 228.174
    assert all(check.status == "pass" for check in judged(a=WHOLE).values())


def test_an_incomplete_run_is_reported() -> None:
    cut = HEADER + "".join(ROWS.splitlines(keepends=True)[:2])
    check = judged(a=WHOLE, b=cut)["nccl-tests end"]
    assert (check.status, check.evidence) == ("warn", "b: stops after 8388608 bytes")


@pytest.mark.parametrize(
    "prefix",
    [
        "[1,0]<stdout>:",
        "[prterun-node-1-4711@1,0]<stdout>: ",
        "0: ",
        "node-1: ",
        "2025-09-22T10:11:12.131415Z ",
        "",
    ],
)
def test_launchers_prefixes_are_left_out(prefix: str) -> None:
    text = "\n".join(prefix + each for each in WHOLE.splitlines())
    assert parse(text).rows == parse(WHOLE).rows


def test_the_json_file_says_what_the_table_says() -> None:
    table = parse(WHOLE)

    def timing(row: NcclTestRow) -> dict[str, float]:
        return {
            "time": row.time_seconds * 1e6,
            "alg_bw": row.bus_gigabytes_per_second / 2,
            "bus_bw": row.bus_gigabytes_per_second,
            "nwrong": 0.0,
        }

    pairs = zip(table.rows[::2], table.rows[1::2], strict=True)
    file = {
        "version": 2,
        "args": ["/opt/nccl-tests/build/all_reduce_perf", "-g", "8"],
        "results": [
            {"size": out.size_bytes, "out_of_place": timing(out), "in_place": timing(inside)}
            for out, inside in pairs
        ],
        "out_of_bounds": {"count": 0, "okay": "true"},
        "average_bus_bandwidth": {"bandwidth": 228.174, "okay": "unchecked"},
        "errors": [],
    }
    read = parse(json.dumps(file))
    assert (read.test, read.out_of_bounds, read.failures) == ("all_reduce_perf", 0, [])
    assert read.average_gigabytes_per_second == table.average_gigabytes_per_second
    assert [each.bus_gigabytes_per_second for each in read.rows] == [
        each.bus_gigabytes_per_second for each in table.rows
    ]
    assert [each.in_place for each in read.rows] == [each.in_place for each in table.rows]


def test_truncated_json_is_reported() -> None:
    check = judged(a='{"version": 2, "results": [{"size": 8')["nccl-tests read"]
    assert check.status == "fail"
    assert "is no JSON of nccl-tests" in check.evidence


def test_the_time_may_be_the_processors() -> None:
    assert parse(HEADER.replace(" time ", " cputime ") + ROWS).rows == parse(WHOLE).rows


def test_figures_of_each_iteration_may_stand_between() -> None:
    rows = [line.split() for line in ROWS.splitlines()]
    longer = "".join(" ".join([*row[:9], "70.1", *row[9:], "70.2"]) + "\n" for row in rows)
    assert parse(HEADER.replace("#wrong", "#wrong i_max") + longer).rows == parse(WHOLE).rows


def test_a_second_table_is_no_dip() -> None:
    assert judged(a=WHOLE + WHOLE)["nccl-tests curve"].status == "pass"


def test_columns_are_found_by_name() -> None:
    old = (
        "#       size         count    type   redop     time   algbw   busbw  error     time   "
        "algbw   busbw  error\n"
        "     1048576        262144   float     sum    71.30   14.71   27.57  0e+00    70.92   "
        "14.78   27.72    N/A\n"
    )
    first, second = parse(old).rows
    assert (first.bus_gigabytes_per_second, first.wrong) == (27.57, 0)
    assert (second.bus_gigabytes_per_second, second.wrong) == (27.72, None)


def test_a_log_that_is_cut_short_gives_what_is_there() -> None:
    assert len(parse(WHOLE[: WHOLE.index("322.55")]).rows) == 4


def test_wrong_values_fail() -> None:
    check = judged(a=WHOLE.replace("104.10      0", "104.10    512"))["nccl-tests results"]
    assert (check.status, check.nodes) == ("fail", ["a"])
    assert "512 wrong values" in check.evidence


def test_values_that_were_not_checked_are_not_called_right() -> None:
    unchecked = WHOLE.replace("      0\n", "    N/A\n").replace("      0 ", "    N/A ")
    check = judged(a=WHOLE, b=unchecked)["nccl-tests results"]
    assert (check.status, check.evidence) == ("skip", "values were not checked (-c 0): b")
    in_place_only = WHOLE.replace("      0\n", "    N/A\n")  # like alltoall_perf
    assert judged(a=in_place_only)["nccl-tests results"].status == "pass"


def test_bandwidth_that_falls_with_the_size_is_reported() -> None:
    check = judged(a=WHOLE.replace("322.55", "60.15"))["nccl-tests curve"]
    assert check.status == "warn"
    assert "60.15 GB/s at 134217728 bytes out of place, 104.1 before" in check.evidence


def test_the_slow_one_of_several_files_is_named() -> None:
    slow = WHOLE.replace("457.42", "301.00").replace("457.63", "302.00").replace("323.47", "301.0")
    slow = slow.replace("322.55", "300.00")
    check = judged(a=WHOLE, b=slow, c=WHOLE)["nccl-tests bandwidth"]
    assert (check.status, check.nodes) == ("fail", ["b"])


def test_different_tests_are_not_compared() -> None:
    other = WHOLE.replace("all_reduce_perf", "alltoall_perf").replace("457", "45")
    assert judged(a=WHOLE, b=other)["nccl-tests bandwidth"].status == "skip"


def test_what_is_no_table_fails_with_its_own_words() -> None:
    text = "node-1: Test NCCL failure common.cu:958 'unhandled system error' \n"
    check = judged(a=text)["nccl-tests read"]
    assert check.status == "fail"
    assert "unhandled system error" in check.evidence
    assert judged(a="")["nccl-tests read"].status == "fail"
    assert parse("") == Output(None, [], None, None, [], is_whole=False)


WARNED = "n1:10:11 [0] ras/client_support.cc:159 NCCL WARN Call to bind failed: Address in use"


def test_what_nccl_only_warned_of_made_no_value_wrong() -> None:
    found = judged(a=f"{WARNED}\n{WHOLE}")
    assert found["nccl-tests results"].status == "pass"
    assert found["nccl-tests warnings"].status == "warn"
    assert "Call to bind failed" in found["nccl-tests warnings"].evidence


def test_what_nccl_warned_of_before_a_run_stopped_is_why() -> None:
    cut = HEADER + "".join(ROWS.splitlines(keepends=True)[:2])
    found = judged(a=f"{cut}{WARNED}\n")
    assert found["nccl-tests results"].status == "fail"
    assert "Call to bind failed" in found["nccl-tests results"].evidence
    assert found["nccl-tests warnings"].status == "pass"
    (check,) = judged(a=f"{WARNED}\n").values()
    assert "Call to bind failed" in check.evidence
