"""The arrays of plain steps, filled by compiled code: a small model's step takes a third of a
millisecond, and building its arrays one by one in numpy would double that where it has draft trees.

Plain steps have no log-probabilities, and sample greedily or with temperature only, of all tokens
or of those that a mask allows.
"""

from __future__ import annotations

import numpy as np

from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.step import AdmittedSequence, SchedulerOutput, depends_on_history
from hetero_llm.cpu.executor import (
    GREEDY,
    LOGITS_ONLY,
    NOISY,
    SampleMasks,
    StepInput,
    StepSamples,
)
from hetero_llm.sampling.sampler import restricts_support
from hetero_llm.sampling.token_masks import NO_MASK
from hetero_llm.spec_decode.verify import walk_sampled
from hetero_llm.utils.jit import njit

_SEED_MASK = (1 << 64) - 1
_NO_DRAFTS = DraftBatch(*(np.zeros(0, np.int32) for _ in range(3)))


class SlotSampling:
    """How the library samples for each request slot.

    Attributes:
        modes: [request slots] uint8; `LOGITS_ONLY` where only the torch sampler can.
        temperatures: [request slots] float32.
        seeds: [request slots] uint64.
        sample_indices: [request slots] int32.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.modes = np.zeros(max_num_seqs, np.uint8)
        self.temperatures = np.ones(max_num_seqs, np.float32)
        self.seeds = np.zeros(max_num_seqs, np.uint64)
        self.sample_indices = np.zeros(max_num_seqs, np.int32)

    def admit(self, state: AdmittedSequence) -> None:
        """Sets the slot of a sequence that enters it."""
        slot, params = state.request_slot, state.params
        if state.num_logprobs is not None or depends_on_history(
            params, state.end_ids, state.bad_word_ids
        ):
            self.modes[slot] = LOGITS_ONLY
        elif params.greedy:
            self.modes[slot] = GREEDY
        else:
            self.modes[slot] = LOGITS_ONLY if restricts_support(params) else NOISY
        self.temperatures[slot] = 1.0 if params.greedy else params.temperature
        self.seeds[slot] = state.seed & _SEED_MASK
        self.sample_indices[slot] = state.sample_index


class StepBuffers:
    """Arrays for steps of up to `max_tokens` tokens of `max_sequences` sequences, with as many
    samples as the larger of the two.

    Args:
        block_tables: [request slots, columns] int32, the runner's own.
        mask_words: int32 words of a token mask.

    Attributes:
        inputs, samples, tokens: what `Executor.prepare` takes; their first entries are the step's.
    """

    def __init__(
        self, max_tokens: int, max_sequences: int, block_tables: np.ndarray, mask_words: int
    ) -> None:
        def of_tokens(dtype: type = np.int32) -> np.ndarray:
            return np.zeros(max_tokens, dtype)

        def of_sequences(dtype: type = np.int32) -> np.ndarray:
            return np.zeros(max_sequences, dtype)

        def of_samples(dtype: type = np.int32) -> np.ndarray:
            return np.zeros(max(max_tokens, max_sequences), dtype)

        self._max_tokens, self._max_sequences = max_tokens, max_sequences
        self.inputs = StepInput(
            token_ids=of_tokens(),
            positions=of_tokens(),
            slot_mapping=of_tokens(),
            request_slots=of_sequences(),
            num_computed_tokens=of_sequences(),
            num_scheduled_tokens=of_sequences(),
            bases=of_sequences(),
            is_tree=of_sequences(np.uint8),
            ancestors=of_tokens(np.uint64),
            block_tables=block_tables,
        )
        self._masks = SampleMasks(
            np.full(max(max_tokens, max_sequences), NO_MASK, np.int32),
            np.zeros((max_sequences, mask_words), np.int32),
        )
        self.samples = StepSamples(
            token_indices=of_samples(),
            modes=of_samples(np.uint8),
            temperatures=of_samples(np.float32),
            seeds=of_samples(np.uint64),
            positions=of_samples(),
            sample_indices=of_samples(),
            masks=self._masks,
        )
        self._num_masked = 0  # samples of the last step that may have masks
        self.tokens = of_samples(np.int64)
        self._compile()

    def _compile(self) -> None:
        """Fills in a step of one token and verifies it, so that no request waits for the
        compiler."""
        one = np.ones(1, np.int32)
        none = np.zeros((3, 0), np.int32)
        step = SchedulerOutput(one - 1, one - 1, one, one, one, (), (), none, none[:2])
        self.fill(step, SlotSampling(1), 16)
        self.verify(step, DraftBatch(one - 1, one[:0], one[:0]), 1)

    def fill(self, step: SchedulerOutput, sampling: SlotSampling, block_size: int) -> int | None:
        """Fills in a step.

        Returns:
            Its number of samples; None if the step is not plain or too large.
        """
        num_nodes = 0 if step.drafts is None else len(step.drafts.token_ids)
        num_tokens, num_sequences = len(step.token_ids) + num_nodes, len(step.request_slots)
        if num_tokens > self._max_tokens or num_sequences > self._max_sequences:
            return None
        inputs, samples = self.inputs, self.samples
        drafts = step.drafts or _NO_DRAFTS
        count: int = _fill(
            step.request_slots,
            step.num_computed_tokens,
            step.num_scheduled_tokens,
            step.token_ids,
            step.num_samples,
            (drafts.counts, drafts.token_ids, drafts.parents),
            inputs.block_tables,
            block_size,
            (sampling.modes, sampling.temperatures, sampling.seeds, sampling.sample_indices),
            (inputs.request_slots, inputs.num_computed_tokens, inputs.num_scheduled_tokens),
            (inputs.is_tree, inputs.bases),
            (inputs.token_ids, inputs.positions, inputs.slot_mapping, inputs.ancestors),
            (samples.token_indices, samples.positions, samples.sample_indices),
            (samples.modes, samples.temperatures, samples.seeds),
        )
        return None if count < 0 else count

    @property
    def mask_words(self) -> np.ndarray:
        """[num_masks, words] int32 masks of the step, to be written."""
        return self._masks.words

    @property
    def num_masks(self) -> int:
        """The most masks of a step."""
        return len(self.mask_words)

    def set_masks(self, places: np.ndarray | None) -> None:
        """Sets the rows of `samples.masks` that the step's samples use.

        Args:
            places: [N] int32; None: no sample has a mask.
        """
        if places is None and not self._num_masked:
            return
        self._masks.rows[: self._num_masked] = NO_MASK
        self._num_masked = 0 if places is None else len(places)
        if places is not None:
            self._masks.rows[: len(places)] = places

    def verify(
        self, step: SchedulerOutput, drafts: DraftBatch, num_samples: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Walks the draft trees of the step that the buffers hold, whose tokens are sampled.

        Returns:
            [N] int64 tokens that are kept and [S] int64 how many of each sequence; [2, M] int32 KV
            slots from which and to which the KV of accepted nodes moves.
        """
        kept = np.empty(num_samples, np.int64)
        num_tokens = np.empty(len(drafts.counts), np.int64)
        moves = np.empty((2, num_samples), np.int32)
        num_kept, num_moves = walk_sampled(
            step.num_scheduled_tokens, step.num_samples, drafts.counts, drafts.token_ids,
            drafts.parents, self.tokens, self.inputs.slot_mapping, kept, num_tokens, moves,
        )  # fmt: skip
        return kept[:num_kept], num_tokens, moves[:, :num_moves]


@njit(cache=True, nogil=True)
def _fill(
    request_slots: np.ndarray,
    num_computed_tokens: np.ndarray,
    num_scheduled_tokens: np.ndarray,
    token_ids: np.ndarray,
    num_samples: np.ndarray,
    drafts: tuple[np.ndarray, np.ndarray, np.ndarray],
    block_tables: np.ndarray,
    block_size: int,
    sampling: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    sequences: tuple[np.ndarray, np.ndarray, np.ndarray],
    trees: tuple[np.ndarray, np.ndarray],
    tokens: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    samples: tuple[np.ndarray, np.ndarray, np.ndarray],
    parameters: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> int:
    """Writes the last five tuples (see `fill`). Returns the number of samples; -1 if one is
    `LOGITS_ONLY` or there are too many."""
    modes, temperatures, seeds, sample_indices = sampling
    node_counts, node_ids, parents = drafts
    token = sampled = given = node = 0
    for sequence in range(len(request_slots)):
        slot, start = request_slots[sequence], num_computed_tokens[sequence]
        count = num_scheduled_tokens[sequence]
        num_nodes = node_counts[sequence] if len(node_counts) else 0
        sequences[0][sequence], sequences[1][sequence] = slot, start
        sequences[2][sequence] = count
        trees[0][sequence], trees[1][sequence] = num_nodes > 0, start
        for i in range(count):
            at = token + i
            index = start + i
            block = block_tables[slot, index // block_size]
            tokens[2][at] = block * block_size + index % block_size
            if num_nodes == 0:
                tokens[0][at], tokens[1][at] = token_ids[given + i], index
            elif i == 0:
                tokens[0][at], tokens[1][at] = token_ids[given], index
                tokens[3][at] = np.uint64(1)
            else:
                parent = token + 1 + parents[node + i - 1]
                tokens[0][at], tokens[1][at] = node_ids[node + i - 1], tokens[1][parent] + 1
                tokens[3][at] = tokens[3][parent] | (np.uint64(1) << np.uint64(i))
        own = num_samples[sequence]
        if num_nodes > 0:
            own = count
        if own and (modes[slot] == LOGITS_ONLY or sampled + own > len(samples[0])):
            return -1
        for sample in range(own):
            after = token + sample if num_nodes > 0 else token + count - 1
            samples[0][sampled], samples[1][sampled] = after, tokens[1][after] + 1
            # The end of a prompt that forks samples for indices 0, 1, ...
            forks = own > 1 and num_nodes == 0
            samples[2][sampled] = sample if forks else sample_indices[slot]
            parameters[0][sampled], parameters[1][sampled] = modes[slot], temperatures[slot]
            parameters[2][sampled] = seeds[slot]
            sampled += 1
        token += count
        given += count - num_nodes
        node += num_nodes
    return sampled
