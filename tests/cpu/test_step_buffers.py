"""The arrays of a step with draft trees, against those made tree by tree."""

from __future__ import annotations

import numpy as np

from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.step import SchedulerOutput
from hetero_llm.cpu.executor import GREEDY, LOGITS_ONLY, NOISY
from hetero_llm.cpu.step_buffers import SlotSampling, StepBuffers
from hetero_llm.spec_decode.verify import tree_tokens

SIZE = 4  # of a block


def make_step() -> SchedulerOutput:
    """A chunk without samples, a tree, a decoding sequence, a prompt's end that forks, a tree."""
    drafts = DraftBatch(
        *(
            np.array(a, np.int32)
            for a in ([0, 4, 0, 0, 1], [50, 51, 52, 53, 60], [-1, -1, 1, 2, -1])
        )
    )
    return SchedulerOutput(
        request_slots=np.array([3, 0, 2, 4, 1], np.int32),
        num_computed_tokens=np.array([4, 10, 7, 2, 0], np.int32),
        num_scheduled_tokens=np.array([3, 5, 1, 2, 2], np.int32),
        token_ids=np.array([1, 2, 3, 4, 5, 7, 8, 6], np.int32),
        num_samples=np.array([0, 1, 1, 3, 1], np.int32),
        prompt_logprob_spans=(),
        admitted=(),
        block_table_writes=np.zeros((3, 0), np.int32),
        block_copies=np.zeros((2, 0), np.int32),
        drafts=drafts,
    )


def make_sampling() -> SlotSampling:
    sampling = SlotSampling(5)
    sampling.modes[:] = GREEDY
    sampling.modes[0], sampling.temperatures[0], sampling.seeds[0] = NOISY, 0.7, 11
    sampling.sample_indices[:] = [5, 6, 7, 8, 9]
    return sampling


def test_a_step_with_trees() -> None:
    tables = np.arange(5 * 8, dtype=np.int32).reshape(5, 8)[:, ::-1].copy()
    buffers = StepBuffers(32, 5, tables, 2)
    step = make_step()
    trees = tree_tokens(step, step.drafts)
    assert buffers.fill(step, make_sampling(), SIZE) == 11
    inputs, samples = buffers.inputs, buffers.samples
    owners = np.repeat(step.request_slots, step.num_scheduled_tokens)
    slots = tables[owners, trees.kv_indices // SIZE] * SIZE + trees.kv_indices % SIZE
    count = len(trees.token_ids)
    assert inputs.token_ids[:count].tolist() == trees.token_ids.tolist()
    assert inputs.positions[:count].tolist() == trees.positions.tolist()
    assert inputs.slot_mapping[:count].tolist() == slots.tolist()
    assert inputs.is_tree.tolist() == trees.is_tree.tolist()
    assert inputs.bases.tolist() == step.num_computed_tokens.tolist()
    of_trees = np.repeat(trees.is_tree, step.num_scheduled_tokens) > 0
    assert inputs.ancestors[:count][of_trees].tolist() == trees.ancestors[of_trees].tolist()
    # Every token of a tree, the last one of a decoding sequence, that of the prompt three times.
    after = [3, 4, 5, 6, 7, 8, 10, 10, 10, 11, 12]
    assert samples.token_indices[:11].tolist() == after
    assert samples.positions[:11].tolist() == (trees.positions[after] + 1).tolist()
    assert samples.sample_indices[:11].tolist() == [5, 5, 5, 5, 5, 7, 0, 1, 2, 6, 6]
    assert samples.modes[:11].tolist() == [NOISY] * 5 + [GREEDY] * 6
    assert samples.seeds[:5].tolist() == [11] * 5


def test_a_tree_leaves_nothing_to_the_next_step() -> None:
    buffers = StepBuffers(32, 5, np.zeros((5, 8), np.int32), 2)
    buffers.fill(make_step(), make_sampling(), SIZE)
    one = np.ones(1, np.int32)
    none = np.zeros((3, 0), np.int32)
    plain = SchedulerOutput(one, one, one, one, one, (), (), none, none[:2])
    assert buffers.fill(plain, make_sampling(), SIZE) == 1
    assert buffers.inputs.is_tree[0] == 0 and buffers.samples.token_indices[0] == 0


def test_what_the_buffers_do_not_hold() -> None:
    step, sampling = make_step(), make_sampling()
    assert StepBuffers(12, 5, np.zeros((5, 8), np.int32), 2).fill(step, sampling, SIZE) is None
    sampling.modes[1] = LOGITS_ONLY
    assert StepBuffers(32, 5, np.zeros((5, 8), np.int32), 2).fill(step, sampling, SIZE) is None
