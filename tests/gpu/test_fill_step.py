"""A step's input buffer: every part against a plain reading of the step, and the work list's
coverage."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.step import SchedulerOutput
from hetero_llm.gpu.attention_plan import PlanLimits, plan_work
from hetero_llm.gpu.fill_step import StepFiller
from hetero_llm.gpu.model_runner import drafted_sizes, verified_output
from hetero_llm.gpu.step_buffer import (
    RING,
    StepBuffer,
    StepLayout,
    step_offsets,
    step_views,
)
from tests.helpers.harness import tokens_of

SLOTS, COLUMNS, BLOCK = 9, 12, 16


@st.composite
def steps(draw: st.DrawFn) -> SchedulerOutput:
    """Prompt chunks, decoding rows, forking prompts and draft trees in any order."""
    slots = draw(st.permutations(range(SLOTS)))[: draw(st.integers(1, 6))]
    starts, counts, samples, nodes, parents = [], [], [], [], []
    any_tree = draw(st.booleans())
    for _ in slots:
        count = draw(st.integers(1, 20))
        start = draw(st.integers(0, COLUMNS * BLOCK - count))
        if any_tree and count > 1 and draw(st.booleans()):
            samples.append(1)
            nodes.append(count - 1)
            parents += [draw(st.integers(-1, i - 1)) for i in range(count - 1)]
        else:
            samples.append(draw(st.integers(0, 3)))
            nodes.append(0)
        starts.append(start)
        counts.append(count)
    drafted = sum(nodes)
    known = sum(counts) - drafted
    tokens = draw(st.lists(st.integers(-1, 99), min_size=known, max_size=known))
    node_ids = draw(st.lists(st.integers(0, 99), min_size=drafted, max_size=drafted))
    drafts = DraftBatch(*(np.array(values, np.int32) for values in (nodes, node_ids, parents)))
    write = st.tuples(st.integers(0, 8), st.integers(0, 2), st.integers(0, 500))
    writes = draw(st.lists(write, max_size=6))
    return SchedulerOutput(
        request_slots=np.array(slots, np.int32),
        num_computed_tokens=np.array(starts, np.int32),
        num_scheduled_tokens=np.array(counts, np.int32),
        token_ids=np.array(tokens, np.int32),
        num_samples=np.array(samples, np.int32),
        prompt_logprob_spans=(),
        admitted=(),
        block_table_writes=np.array(writes, np.int32).reshape(-1, 3).T,
        block_copies=np.zeros((2, 0), np.int32),
        drafts=drafts if drafted else None,
    )


def is_tree(step: SchedulerOutput) -> np.ndarray:
    return (
        np.zeros(len(step.request_slots), bool) if step.drafts is None else step.drafts.counts > 0
    )


def filler() -> StepFiller:
    made = StepFiller(
        20000,
        torch.zeros(SLOTS, COLUMNS, dtype=torch.int32),
        block_size=BLOCK,
        vocab_size=100,
        windows=(None, 37),
    )
    rng = np.random.default_rng(0)
    made.block_tables[:] = rng.permutation(SLOTS * COLUMNS).reshape(SLOTS, COLUMNS)
    made.sampling.packed[:] = rng.integers(0, 1000, made.sampling.packed.shape)
    return made


FILLER = filler()
LIMITS = PlanLimits(4, 8, 5, 30, 16)


def buffer_of(layout: StepLayout) -> StepBuffer:
    offsets = step_offsets(layout)
    words = torch.zeros(int(offsets["words"][0]), dtype=torch.int32)
    return StepBuffer(layout, offsets, LIMITS, words, step_views(words, layout))


# large: compares every part of the buffer.
@settings(max_examples=150, deadline=None)
@given(steps())
def test_every_part(step: SchedulerOutput) -> None:
    trees = is_tree(step)
    tokens, parents = tokens_of(step)
    total = len(tokens)
    groups = total + 20 if step.drafts is not None else 0
    layout = StepLayout(total + 3, total + 20, total + 40, total + 3, 6, 2, groups)
    FILLER.write_tables(step.block_table_writes)
    for slot, column, block in {w[:2]: w for w in zip(*step.block_table_writes.tolist())}.values():
        assert FILLER.block_tables[slot, column] == block
    FILLER.ring[:] = 7  # what earlier steps left
    any_cut = FILLER.fill(step, buffer_of(layout))
    views = step_views(FILLER.filled, layout)
    row = sample = group = 0
    for slot, start, count, draws, tree in zip(
        *(
            a.tolist()
            for a in (
                step.request_slots,
                step.num_computed_tokens,
                step.num_scheduled_tokens,
                step.num_samples,
            )
        ),
        trees,
    ):
        depths, masks = [0] * count, [0] * count
        for i in range(count):
            if tree:
                parent = parents[row + i]
                depths[i] = depths[parent] + 1 if i else 0
                masks[i] = (masks[parent] if i else 0) | 1 << i
            place = start + i
            assert views.token_ids[row + i] == tokens[row + i]
            assert views.token_slots[row + i] == slot
            assert views.positions[row + i] == (start + depths[i] if tree else place)
            assert views.limits[row + i] == (start if tree else place + 1)
            assert (
                views.slot_mapping[row + i]
                == FILLER.block_tables[slot, place // BLOCK] * BLOCK + place % BLOCK
            )
            if views.tree is not None:
                assert views.tree.ancestors[row + i] == masks[i]
        for draw in range(count if tree else draws):
            source = row + draw if tree else row + count - 1
            assert views.sample_rows[sample] == source
            assert views.sample_slots[sample] == slot
            expected = FILLER.sampling.packed[:, slot].copy()
            if draws > 1:
                expected[6] = draw
            expected[7] = start + (depths[draw] + 1 if tree else count)
            assert views.sampling[:, sample].tolist() == expected.tolist()
            if views.tree is not None:
                assert views.tree.draft_tokens[sample] == tokens[source]
                assert views.tree.parents[sample] == parents[source]
                assert views.tree.slot_mapping[sample] == views.slot_mapping[source]
                if not tree or draw == 0:
                    size = count if tree else 1
                    assert views.tree.groups[:, group].tolist() == [sample, size, slot]
                    group += 1
            sample += 1
        row += count
    assert (views.slot_mapping[total:] == -1).all() and (views.limits[total:] == 0).all()
    assert (views.sampling[7, sample:] == -1).all() and (views.sample_slots[sample:] == -1).all()
    if views.tree is not None:
        assert (views.tree.groups[2, group:] == -1).all()
        assert (views.tree.groups[1, group:] == 0).all()
    num_writes = step.block_table_writes.shape[1]
    assert views.write_count[0] == num_writes
    last = {(slot, column): block for slot, column, block in step.block_table_writes.T.tolist()}
    for slot, column, block in views.writes[:, :num_writes].T.tolist():
        assert block == last[slot, column]  # of two writes to one place the last counts
    assert np.array_equal(views.writes[:2, :num_writes], step.block_table_writes[:2])
    for index, window in enumerate((None, 37)):
        items, cut = plan_work(
            step.request_slots,
            step.num_computed_tokens,
            step.num_scheduled_tokens,
            trees,
            window,
            LIMITS,
            FILLER.block_tables,
            BLOCK,
        )
        assert views.work_counts[index].tolist() == [len(items), len(cut)]
        assert np.array_equal(views.items[index][: len(items), :6], items[:, :6])
        assert np.array_equal(views.cut_rows[index][: len(cut)], cut)
    assert any_cut == bool(views.work_counts[:, 1].any())


@st.composite
def shared_tables(draw: st.DrawFn) -> np.ndarray:
    """[SLOTS, COLUMNS] block ids: each slot may begin with blocks of the one before it, except for
    one of them."""
    tables = np.arange(SLOTS * COLUMNS, dtype=np.int32).reshape(SLOTS, COLUMNS)
    for slot in range(1, SLOTS):
        same = draw(st.sampled_from([0, 5, COLUMNS, COLUMNS]))
        differs = draw(st.sampled_from([COLUMNS, COLUMNS, 0, 4, 6]))
        for column in range(same):
            if column != differs:
                tables[slot, column] = tables[slot - 1, column]
    return tables


@st.composite
def steps_that_share(draw: st.DrawFn) -> tuple[SchedulerOutput, np.ndarray, np.ndarray]:
    """A step of slots in order, with few rows each and long contexts; tables; who is chosen."""
    step = draw(steps())
    num = len(step.request_slots)
    counts = [draw(st.integers(1, 3)) for _ in range(num)]
    starts = [draw(st.integers(60, COLUMNS * BLOCK - 3)) for _ in range(num)]
    few = draw(st.booleans())
    step = SchedulerOutput(
        request_slots=np.sort(step.request_slots) if few else step.request_slots,
        num_computed_tokens=np.array(starts, np.int32) if few else step.num_computed_tokens,
        num_scheduled_tokens=np.array(counts, np.int32) if few else step.num_scheduled_tokens,
        token_ids=step.token_ids,
        num_samples=step.num_samples,
        prompt_logprob_spans=(),
        admitted=(),
        block_table_writes=step.block_table_writes,
        block_copies=step.block_copies,
        drafts=step.drafts,
    )
    chosen = np.array([draw(st.integers(0, 9)) > 0 for _ in range(num)])
    return step, draw(shared_tables()), chosen


@settings(max_examples=400, deadline=None)
@given(
    steps_that_share(),
    st.sampled_from([None, None, 20, 70]),
    st.sampled_from([1, 1, 2, 3, 40]),
    st.sampled_from([0, 3, 12, 64]),
    st.sampled_from([3, 8]),
)
def test_the_work_list_covers_every_key_once(
    case: tuple[SchedulerOutput, np.ndarray, np.ndarray],
    window: int | None,
    parallel: int,
    max_pieces: int,
    tile_rows: int,
) -> None:
    step, tables, chosen = case
    trees = is_tree(step)
    limits = PlanLimits(tile_rows, 8, parallel, max_pieces, 16)
    plan = (
        step.request_slots,
        step.num_computed_tokens,
        step.num_scheduled_tokens,
        trees,
        window,
        limits,
    )
    items, cut_rows = plan_work(*plan, tables, BLOCK, chosen)
    pieces = [piece for piece in items[:, 5].tolist() if piece >= 0]
    assert pieces == list(range(len(pieces))) and len(pieces) <= max_pieces
    slots, starts = (
        np.repeat(a, step.num_scheduled_tokens).tolist()
        for a in (step.request_slots, step.num_computed_tokens)
    )
    seen: dict[int, list[int]] = {}
    for slot, first, rows, begin, end, *_ in items.tolist():
        assert begin % 8 == 0 and begin < end and 1 <= rows <= tile_rows
        for row in range(first, first + rows):
            seen.setdefault(row, []).extend(range(begin, end))
            if slots[first : first + rows] == [slot] * rows:
                continue  # else all see all of it, and their tables agree
            assert window is None and max_pieces > 0
            assert slot == slots[first] and end <= starts[row] and end % 8 == 0
            blocks = -(-end // BLOCK)
            assert np.array_equal(tables[slot, :blocks], tables[slots[row], :blocks])
    row = 0
    for start, count, tree, taken in zip(
        step.num_computed_tokens.tolist(),
        step.num_scheduled_tokens.tolist(),
        trees,
        chosen.tolist(),
    ):
        for i in range(count):
            keys = sorted(seen.get(row + i, []))
            assert bool(keys) == taken
            if taken:
                assert keys == list(range(keys[0], keys[-1] + 1)), "a gap, or a key twice"
                last = start + (count if tree else i + 1)
                low = 0 if window is None else max(0, start + (0 if tree else i) - window + 1)
                assert keys[0] <= low and last - 1 <= keys[-1]
        row += count
    check_cut_rows(items, cut_rows)
    if not any(slots[f : f + n] != [s] * n for s, f, n, *_ in items.tolist()):
        alone = plan_work(*plan, chosen=chosen)
        assert np.array_equal(items, alone[0]) and np.array_equal(cut_rows, alone[1])


def check_cut_rows(items: np.ndarray, cut_rows: np.ndarray) -> None:
    """Each row joins all of its pieces and no others, and each piece by its place in the tile."""
    joined = {}
    for row, *fields, unused in cut_rows.tolist():
        assert row not in joined and unused == 0
        joined[row] = {
            piece: index
            for first, count, index in (fields[:3], fields[3:])
            for piece in range(first, first + count)
        }
        assert len(joined[row]) == fields[1] + fields[4]
    for _, first, rows, _, _, piece, *_ in items.tolist():
        for within in range(rows):
            if piece < 0:
                assert first + within not in joined
            else:
                assert joined[first + within].pop(piece) == within
    assert not any(joined.values())


def plan_sharing(
    tables: np.ndarray, starts: int | list[int], count: int, limits: PlanLimits, **others: Any
) -> tuple[np.ndarray, np.ndarray]:
    """The plan of a step of all slots, of `count` rows each."""
    num = len(tables)
    given = np.broadcast_to(np.array(starts, np.int32), num)
    slots, counts = np.arange(num, dtype=np.int32), np.full(num, count, np.int32)
    others = {"is_tree": None, "window": None, **others}
    return plan_work(
        slots, given, counts, limits=limits, block_tables=tables, block_size=BLOCK, **others
    )


@pytest.mark.parametrize("tile_rows, keys", [(16, 25 * 10240), (32, 13 * 10240)])
def test_groups_of_a_long_prefix(tile_rows: int, keys: int) -> None:
    """50 sequences of 8 rows on 10K keys: a tile of 16 rows reads them for two, of 32 for four."""
    tables = np.arange(50 * 648, dtype=np.int32).reshape(50, 648)
    limits = PlanLimits(tile_rows, 64, 33, 132, 128)
    alone, cut = plan_sharing(tables, 10250, 8, limits)
    assert len(alone) == 50 and len(cut) == 0
    tables[:, :640] = tables[0, :640]
    items, cut = plan_sharing(tables, 10250, 8, limits)
    shared = items[items[:, 3] < 10240]
    assert (shared[:, 4] - shared[:, 3]).sum() == keys
    assert (shared[:, 2] <= tile_rows).all() and len(items) - len(shared) == 50
    assert len(cut) == 400 and (items[:, 5] >= 0).all()
    check_cut_rows(items, cut)
    trees = np.ones(50, bool)
    assert np.array_equal(plan_sharing(tables, 10250, 8, limits, is_tree=trees)[0][:50], items[:50])


def small_tables(num: int, columns: int = 64) -> np.ndarray:
    """[num, columns] that begin with the same 60 blocks."""
    tables = np.arange(num * columns, dtype=np.int32).reshape(num, columns)
    tables[:, :60] = tables[0, :60]
    return tables


SHARING = PlanLimits(8, 16, 2, 64, 32)


def shared_ranges(items: np.ndarray, count: int) -> list[tuple[int, int, int]]:
    """(first slot, slots, keys) of what several sequences of `count` rows read together."""
    ranges: dict[tuple[int, int], int] = {}
    for slot, _, rows, begin, end, *_ in items.tolist():
        if rows > count:
            key = (slot, rows // count)
            ranges[key] = ranges.get(key, 0) + end - begin
    return [(slot, slots, keys) for (slot, slots), keys in ranges.items()]


def test_where_sharing_ends() -> None:
    """At the first block that differs, at whole blocks and key steps, where a member's rows begin,
    and at sequences that the list leaves out."""
    tables = small_tables(4)

    def groups(
        tables: np.ndarray, starts: int | list[int], limits: PlanLimits, **others: Any
    ) -> list[tuple[int, int, int]]:
        return shared_ranges(plan_sharing(tables, starts, 2, limits, **others)[0], 2)

    assert groups(tables, 1000, SHARING) == [(0, 4, 960)]
    assert groups(tables, [1000, 999, 950, 1000], SHARING) == [(0, 4, 944)]
    coarse = PlanLimits(8, 64, 2, 64, 64)
    assert groups(tables, [1000, 999, 950, 1000], coarse) == [(0, 4, 896)]
    tables[2, 30] = 9999  # though the blocks that follow are the same
    assert groups(tables, 1000, PlanLimits(6, 16, 2, 64, 32)) == [(0, 2, 960), (2, 2, 480)]
    assert groups(tables, 1000, PlanLimits(4, 16, 2, 64, 32)) == [(0, 2, 960), (2, 2, 480)]
    tables[2, 0] = 9999
    assert groups(tables, 1000, SHARING) == [(0, 2, 960)]
    left_out = np.array([True, False, True, True])
    assert groups(small_tables(4), 1000, SHARING, chosen=left_out) == [(2, 2, 960)]
    items, _ = plan_sharing(small_tables(2), 1000, 5, SHARING)  # more rows than a tile has
    assert (items[:, 2] == 5).all()


@pytest.mark.parametrize("differs", range(60))
def test_a_block_that_differs_ends_sharing(differs: int) -> None:
    """Even where all others are the same ones."""
    tables = small_tables(2)
    tables[1, differs] = 9999
    items, cut = plan_sharing(tables, 1000, 2, PlanLimits(8, 16, 1, 64, 32))
    assert shared_ranges(items, 2) == ([(0, 2, 16 * differs)] if differs >= 8 else [])
    check_cut_rows(items, cut)


@pytest.mark.parametrize("tile_rows", [16, 32])
def test_pieces_of_groups_fit_the_workspace(tile_rows: int) -> None:
    tables = small_tables(50, columns=640)
    tables[:] = tables[0]
    counts = np.full(50, 8)
    for max_pieces in range(200):
        limits = PlanLimits(tile_rows, 64, 33, max_pieces, 128)
        items, cut = plan_sharing(tables, 10230, 8, limits)
        assert items[:, 5].max() < max_pieces and len(items) <= limits.most_items(counts)
        check_cut_rows(items, cut)


def test_when_nothing_is_shared() -> None:
    """With a window, where nothing may be cut, or where the workspace is too small, the plan is
    what it is without tables."""
    tables = small_tables(4)
    for limits, window in (
        (SHARING, 2000),
        (PlanLimits(8, 16, 2, 0, 32), None),
        (PlanLimits(8, 16, 2, 2, 32), None),
        (PlanLimits(8, 512, 2, 64, 512), None),  # fewer keys than are worth it
    ):
        items, cut = plan_sharing(tables, 1000, 2, limits, window=window)
        alone, cut_alone = plan_sharing(tables[:, :0], 1000, 2, limits, window=window)
        assert np.array_equal(items, alone) and np.array_equal(cut, cut_alone)
    few = PlanLimits(8, 16, 2, 4, 32)  # a piece for the group and three of its members
    assert shared_ranges(plan_sharing(tables, 1000, 2, few)[0], 2) == [(0, 3, 960)]


def test_long_contexts_are_spread_evenly() -> None:
    """One sequence of 32K keys fills all places; many equal ones are left whole."""
    limits = PlanLimits(4, 128, 33, 132, 256)
    one = np.array([0], np.int32)
    items, _ = plan_work(one, one + 32767, one + 1, None, None, limits)
    lengths = items[:, 4] - items[:, 3]
    assert len(items) in range(30, 34) and lengths.max() <= 1024
    many = np.arange(32, dtype=np.int32)
    items, cut = plan_work(many, many * 0 + 8191, many * 0 + 1, None, None, limits)
    assert len(items) == 32 and len(cut) == 0


def test_verified_output_reads_groups() -> None:
    step = SchedulerOutput(
        request_slots=np.array([3, 1, 2], np.int32),
        num_computed_tokens=np.array([5, 6, 7], np.int32),
        num_scheduled_tokens=np.array([4, 2, 1], np.int32),
        token_ids=np.zeros(4, np.int32),
        num_samples=np.array([1, 2, 1], np.int32),
        prompt_logprob_spans=(),
        admitted=(),
        block_table_writes=np.zeros((3, 0), np.int32),
        block_copies=np.zeros((2, 0), np.int32),
        drafts=DraftBatch(*(np.array(v, np.int32) for v in ([3, 0, 0], [5, 6, 7], [-1, 0, -1]))),
    )
    packed = [3, 1, 1, 1, 0, 0, *(10, 11, 12, 99), *(20, 21), 30, 7, 7]
    output = verified_output(step, np.array(packed), 6)
    assert output.token_ids == [10, 11, 12, 20, 21, 30]
    assert output.num_tokens == [3, 2, 1]


@settings(max_examples=50, deadline=None)
@given(steps().filter(lambda step: step.drafts is not None))
def test_sizes_of_a_drafted_step(step: SchedulerOutput) -> None:
    sizes = drafted_sizes(step)
    trees, contexts = is_tree(step), step.num_computed_tokens + step.num_scheduled_tokens
    assert sizes.num_tokens == step.num_scheduled_tokens.sum()
    samples = np.where(trees, step.num_scheduled_tokens, step.num_samples)
    assert sizes.num_samples == samples.sum()
    assert sizes.num_groups == np.where(trees, 1, step.num_samples).sum()
    assert (sizes.longest, sizes.num_keys) == (contexts.max(), contexts.sum())


def test_withdrawn_trees_are_padding() -> None:
    one = np.ones(1, np.int32)
    none = np.zeros((3, 0), np.int32)
    drafts = DraftBatch(2 * one, np.zeros(2, np.int32), np.array([-1, 0], np.int32))
    step = SchedulerOutput(one, one, 3 * one, one, one, (), (), none, none[:2], drafts)
    layout = StepLayout(3, 3, 9, 3, 0, 2, 3)
    for _ in range(RING + 1):
        FILLER.fill(step, buffer_of(layout))
        before = FILLER.ring.clone()
        views = step_views(FILLER.filled, layout)
        assert views.tree is not None and views.tree.groups[:, 0].tolist() == [0, 3, 1]
        FILLER.withdraw_trees(layout)
        assert views.tree.groups[1:].tolist() == [[0, 0, 0], [-1, -1, -1]]
        views.tree.groups[1:, 0] = 3, 1
        assert torch.equal(FILLER.ring, before)  # nothing else has changed


@pytest.mark.parametrize("parents", [[0, 0], [-1, 1], [-2, 0]])
def test_a_parent_comes_before_its_child(parents: list[int]) -> None:
    one = np.ones(1, np.int32)
    drafts = DraftBatch(2 * one, np.zeros(2, np.int32), np.array(parents, np.int32))
    none = np.zeros((3, 0), np.int32)
    step = SchedulerOutput(one, one, 3 * one, one, one, (), (), none, none[:2], drafts)
    with pytest.raises(AssertionError, match="parent comes before"):
        FILLER.fill(step, buffer_of(StepLayout(3, 3, 9, 3, 0, 2, 3)))


@pytest.mark.parametrize("groups", [0, 5])
def test_parts_do_not_overlap(groups: int) -> None:
    layout = StepLayout(7, 5, 9, 7, 3, 2, groups)
    marks = np.zeros(int(step_offsets(layout)["words"][0]), np.int32)
    views = step_views(marks, layout)
    parts = [views.write_count, views.work_counts, views.token_ids, views.token_slots]
    parts += [views.positions, views.limits, views.slot_mapping, views.sample_rows]
    parts += [views.sample_slots, views.sampling, views.writes, *views.items, *views.cut_rows]
    if views.tree is not None:
        tree = views.tree
        parts += [tree.ancestors.view(np.int32), tree.draft_tokens, tree.parents]
        parts += [tree.slot_mapping, tree.groups]
    for part in parts:
        part += 1
    assert marks.max() == 1 and marks.sum() == sum(part.size for part in parts)


_IN_A_THREAD = """
import threading, torch
from hetero_llm.gpu.fill_step import StepFiller, compile_in_thread
from hetero_llm.utils.jit import num_compiled

compile_in_thread()
for thread in threading.enumerate():
    if thread.name == "hetero-llm-fill-step":
        thread.join()
compiled = num_compiled()
StepFiller(512, torch.zeros(3, 7, dtype=torch.int32), block_size=32, vocab_size=9, windows=(5,))
assert compiled == num_compiled() and any(compiled.values())
"""


def test_a_thread_compiles_all_that_a_filler_calls() -> None:
    subprocess.run([sys.executable, "-c", _IN_A_THREAD], check=True)
