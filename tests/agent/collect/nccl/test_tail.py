from __future__ import annotations

import ctypes
import os

import pytest

from paceline_agent.collect.nccl.tail import Tail

IN_OPEN = 0x20  # sys/inotify.h


@pytest.fixture
def log(tmp_path):
    return tmp_path / "x.log"


def test_lines_are_read_once_and_whole(log):
    tail = Tail(log)
    assert tail.read_lines() == []
    log.write_bytes(b"one\ntw")
    assert tail.read_lines() == [b"one"]
    with log.open("ab") as file:
        file.write(b"o\nthree\n")
    assert tail.read_lines() == [b"two", b"three"]
    assert tail.read_lines() == []
    tail.close()


def test_a_file_that_is_cut_is_read_from_its_new_beginning(log):
    tail = Tail(log)
    log.write_bytes(b"one\ntwo\nhal")
    assert tail.read_lines() == [b"one", b"two"]
    log.write_bytes(b"new\n")
    assert tail.read_lines() == [b"new"]
    tail.close()


def test_a_replaced_file_is_read_to_its_end_and_then_its_successor_whole(log, tmp_path):
    tail = Tail(log)
    log.write_bytes(b"one\n")
    tail.read_lines()
    with log.open("ab") as file:
        file.write(b"last\n")
    log.rename(tmp_path / "x.log.1")
    log.write_bytes(b"n" * 10 + b"\n" + b"next\n")
    assert tail.read_lines() == [b"last"]
    assert tail.read_lines() == [b"n" * 10, b"next"]
    log.unlink()
    assert tail.read_lines() == []
    tail.close()


def test_of_a_long_file_only_the_end_is_read_at_first(log):
    log.write_bytes(b"".join(b"line %05d\n" % number for number in range(1000)))
    tail = Tail(log, first_bytes=25)
    assert tail.read_lines() == [b"line 00998", b"line 00999"]
    tail.close()


def test_the_work_of_a_look_is_bounded_and_nothing_is_lost_while_we_keep_up(log):
    lines = [b"line %05d" % number for number in range(1000)]
    log.write_bytes(b"\n".join(lines) + b"\n")
    tail = Tail(log, look_bytes=3000, first_bytes=1 << 20, lag_bytes=1 << 20)
    looks = []
    while look := tail.read_lines():
        looks.append(look)
    assert [line for look in looks for line in look] == lines
    assert max(len(look) for look in looks) <= 3000 // 11 + 1
    assert tail.skipped_bytes == 0
    tail.close()


def test_a_writer_that_is_too_fast_costs_the_oldest_lines_and_that_is_counted(log):
    log.write_bytes(b"first\n")
    tail = Tail(log, look_bytes=22, lag_bytes=44)
    tail.read_lines()
    with log.open("ab") as file:
        file.write(b"".join(b"line %05d\n" % number for number in range(100)))
    assert tail.read_lines() == [b"line 00099"]
    assert tail.skipped_bytes == 1100 - 22
    tail.close()


def test_a_line_without_end_is_let_go(log):
    tail = Tail(log, look_bytes=100, first_bytes=1000, lag_bytes=10_000)
    log.write_bytes(b"x" * 500 + b"\nnext\n")
    found = [line for _ in range(8) for line in tail.read_lines()]
    assert found == [b"next"]
    tail.close()


def test_a_file_of_another_user_is_not_read(log):
    log.write_bytes(b"one\n")
    assert Tail(log, owner=os.getuid() + 1).read_lines() == []
    tail = Tail(log, owner=os.getuid())
    assert tail.read_lines() == [b"one"]
    tail.close()


def test_what_is_no_file_is_not_even_opened(log):
    os.mkfifo(log)
    libc = ctypes.CDLL(None)
    notifications = libc.inotify_init1(os.O_NONBLOCK)
    assert libc.inotify_add_watch(notifications, os.fsencode(log), IN_OPEN) > 0
    assert Tail(log).read_lines() == []
    with pytest.raises(BlockingIOError):
        os.read(notifications, 4096)
    os.close(notifications)
