"""A step closes when all ranks have ended it, for any order and repetition of spans."""

import random

import numpy as np

from paceline_server.steps.assembly import (
    LEAST_OPEN_STEPS,
    MAXIMUM_OPEN_SPANS,
    MAXIMUM_OPEN_STEPS,
    MAXIMUM_SPANS_PER_RANK,
    STEPS_WITHOUT_A_RANK,
    Assembler,
)
from paceline_server.steps.columns import FIELDS, STEP, Spans, block, concatenate, decode
from paceline_server.steps.peers import medians_of_others
from paceline_wire.batch import SpanBlock
from paceline_wire.spans import RECORD, Flag, Op, to_columns


def step_spans(
    rank: int, step: int, index: int = 0, *, ended: bool = True, flags: int = 0
) -> Spans:
    """Return a forward and the end of the step."""
    table = np.zeros((FIELDS, 2), dtype=np.int64)
    for column, op in enumerate((Op.FORWARD, Op.STEP if ended else Op.BACKWARD)):
        table[:, column] = [
            rank, index + column, op, 0, -1, flags, step, -1, -1, 0, 0, step * 100, 50,
        ]  # fmt: skip
    return Spans(table)


def finished(assembler: Assembler) -> list[int]:
    return [step for step, _ in assembler.take_finished()]


def test_a_step_is_complete_when_the_last_rank_ends_it():
    assembler = Assembler(2)
    assembler.add(step_spans(0, 5))
    assert finished(assembler) == []
    assembler.add(step_spans(1, 5))
    assert finished(assembler) == [5]
    assert assembler.newest_step(0) == 5


def test_repeated_spans_count_once_and_late_ones_are_counted():
    assembler = Assembler(1)
    assembler.add(step_spans(0, 1))
    assembler.add(step_spans(0, 1))
    [(_, spans)] = assembler.take_finished()
    assert spans.op.tolist() == [Op.FORWARD, Op.STEP]
    assembler.add(step_spans(0, 1))
    assert finished(assembler) == []
    assert assembler.late_spans == 2


def test_one_block_may_hold_several_steps():
    assembler = Assembler(1)
    assembler.add(concatenate([step_spans(0, 3, 0), step_spans(0, 4, 2)]))
    assert finished(assembler) == [3, 4]


def test_a_step_closes_two_steps_later_without_a_rank_whose_end_was_lost():
    assembler = Assembler(2)
    for step in (1, 2, 3):
        assembler.add(step_spans(0, step, 2 * step))
        assembler.add(step_spans(1, step, 2 * step, ended=step != 2))
    assert finished(assembler) == [1]
    for rank in (0, 1):
        assembler.add(step_spans(rank, 4, 8))
    [(step, spans), *rest] = assembler.take_finished()
    assert (step, set(spans.rank.tolist()), [number for number, _ in rest]) == (2, {0}, [3, 4])


def test_the_steps_of_the_others_close_without_a_rank_that_has_none():
    assembler = Assembler(3)
    last = STEPS_WITHOUT_A_RANK
    for step in range(last):
        assembler.add(concatenate([step_spans(rank, step, 2 * step) for rank in (1, 2)]))
        assert finished(assembler) == []
    for step in (last, last + 1):
        assembler.add(step_spans(1, step, 2 * step))
    assert finished(assembler) == list(range(last))  # then rank 2 is waited for
    assembler.add(step_spans(2, last, 2 * last))
    assert finished(assembler) == [last]
    assembler.add(step_spans(0, last))  # its agent sends late: from now on it is waited for
    assembler.add(step_spans(2, last + 1, 2 * last + 2))
    assert finished(assembler) == []
    assembler.add(step_spans(0, last + 1, 2))
    assert finished(assembler) == [last + 1]


def test_a_step_stays_open_until_its_device_spans_arrive():
    assembler = Assembler(1)
    assembler.add(step_spans(0, 1))
    assert finished(assembler) == [1]
    assembler.add(step_spans(0, 2, 2))
    assembler.add(step_spans(0, 2, 4, ended=False, flags=Flag.DEVICE))
    assert finished(assembler) == []
    assembler.add(step_spans(0, 3, 6))
    assert finished(assembler) == [2]


def test_spans_of_many_ranks_and_batches_are_sorted_in_ring_order():
    assembler = Assembler(2)
    assembler.add(step_spans(1, 1, 2))
    assembler.add(concatenate([step_spans(1, 1, 0, ended=False), step_spans(0, 1)]))
    [(_, spans)] = assembler.take_finished()
    assert (spans.rank.tolist(), spans.table[1].tolist()) == (
        [0, 0, 1, 1, 1, 1],
        [0, 1, 0, 1, 2, 3],
    )


def test_device_spans_in_the_block_that_ended_their_step_show_the_delay_too():
    assembler = Assembler(1)
    late = step_spans(0, 1, 2, ended=False, flags=Flag.DEVICE)
    assembler.add(concatenate([step_spans(0, 1), late]))
    assert finished(assembler) == []
    assembler.add(step_spans(0, 2, 4))
    assert finished(assembler) == [1]


def test_a_rank_with_too_many_spans_keeps_its_first_ones_and_the_end_of_its_step():
    assembler = Assembler(1)
    many = step_spans(0, 1, ended=False)
    table = np.repeat(many.table, MAXIMUM_SPANS_PER_RANK // 2, axis=1)
    table[1] = np.arange(table.shape[1])
    assembler.add(Spans(table))
    assembler.add(step_spans(0, 1, table.shape[1]))
    [(_, spans)] = assembler.take_finished()
    assert len(spans) == MAXIMUM_SPANS_PER_RANK + 1
    assert spans.op[-1] == Op.STEP


def test_invalid_step_numbers_do_not_fill_the_memory_or_block_other_steps():
    assembler = Assembler(2)
    chance = random.Random(1)
    for number in range(10 * MAXIMUM_OPEN_STEPS):
        assembler.add(step_spans(0, chance.randrange(1000, 2**32 - 1), number, ended=False))
    assembler.add(step_spans(7, 1))  # no such rank
    for rank in (0, 1):
        assembler.add(step_spans(rank, 1))
    assert finished(assembler) == [1]
    assert assembler.dropped_steps > 0


def test_ranks_that_are_hundreds_of_steps_apart_are_compared():
    assembler = Assembler(2)
    done = []
    for step in range(1, 1501):  # a rank that is as fast again, as between two averages of weights
        assembler.add(step_spans(0, step))
        if step % 2:
            assembler.add(step_spans(1, step // 2))
        done += assembler.take_finished()
    assert [step for step, _ in done] == list(range(750))
    assert all(set(spans.rank.tolist()) == {0, 1} for _, spans in done[1:])
    assert assembler.dropped_steps == 0


def test_steps_of_many_spans_are_fewer():
    assembler = Assembler(2)
    table = np.repeat(step_spans(0, 1, ended=False).table, MAXIMUM_OPEN_SPANS // 100, axis=1)
    for step in range(1, 301):
        assembler.add(concatenate([Spans(table), step_spans(0, step)]))
        table[STEP] = step + 1
    assert assembler.dropped_steps >= 200
    for step in range(1, 301):
        assembler.add(step_spans(1, step))
    kept = [step for step, spans in assembler.take_finished() if 0 in spans.rank]
    assert len(kept) <= LEAST_OPEN_STEPS
    assert kept == list(range(301 - len(kept), 301))


def test_decoding_drops_impossible_times_and_reads_unknown_values():
    def record(start: int, duration: int) -> bytes:
        return RECORD.pack(
            1, Op.FORWARD, 7, 0xFFFF, 2, 41, 0xFFFF_FFFF, 0xFFFF_FFFF, 0, 8, 9, start, duration
        )

    rows = record(1000, 50) + record(2**63 + 5, 1) + record(1000, 2**63)
    came = block(SpanBlock("job", 0, 3, to_columns(rows), 500))
    assert came is not None
    spans = decode([came])
    assert len(spans) == 1
    assert (spans.start_ns[0], spans.end_ns[0], spans.step[0]) == (1500, 1550, 41)
    assert spans.rank[0] == 3
    assert (spans.group[0], spans.flags[0], spans.sequence[0]) == (7, 2, 9)
    assert spans.peer[0] == spans.microbatch[0] == -1
    assert block(SpanBlock("job", 0, 0, to_columns(rows), 2**63 - 1)) is None


def test_a_value_is_not_compared_with_itself():
    chance = np.random.default_rng(3)
    for count in range(2, 10):
        values = chance.random(count)
        expected = [np.median(np.delete(values, place)) for place in range(count)]
        assert np.allclose(medians_of_others(values), expected)
    assert np.isnan(medians_of_others(np.array([1.0]))).all()
