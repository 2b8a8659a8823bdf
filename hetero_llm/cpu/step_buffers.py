"""The arrays of plain steps, filled by compiled code: a small model's step takes a millisecond, and
building its arrays one by one would take a tenth of that.

Plain: no draft trees, no log-probabilities, and no draws but greedy and temperature-only ones.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from hetero_llm.core.step import SchedulerOutput
from hetero_llm.cpu.executor import LOGITS_ONLY, StepDraws, StepRows


class StepBuffers:
    """Room for a step of `most_rows` rows of `most_sequences` sequences with as many draws.

    Args:
        tables: [slots, columns] int32, the runner's own.

    Attributes:
        rows, draws, tokens: what `Executor.prepare` takes; their first entries are the step's.
    """

    def __init__(self, most_rows: int, most_sequences: int, tables: np.ndarray) -> None:
        self._most_rows, self._most_sequences = most_rows, most_sequences
        of_rows = [np.zeros(most_rows, np.int32) for _ in range(3)]
        of_sequences = [np.zeros(most_sequences, np.int32) for _ in range(3)]
        self.rows = StepRows(
            *of_rows,
            *of_sequences,
            bases=np.zeros(most_sequences, np.int32),
            is_tree=np.zeros(most_sequences, np.uint8),
            ancestors=np.zeros(most_rows, np.uint64),
            tables=tables,
        )
        self.draws = StepDraws(
            rows=np.zeros(most_sequences, np.int32),
            modes=np.zeros(most_sequences, np.uint8),
            temperatures=np.zeros(most_sequences, np.float32),
            seeds=np.zeros(most_sequences, np.uint64),
            positions=np.zeros(most_sequences, np.int32),
            sample_indices=np.zeros(most_sequences, np.int32),
        )
        self.tokens = np.zeros(most_sequences, np.int64)
        self._compile()

    def _compile(self) -> None:
        """Takes a step of one row over, so that no request waits for the compiler."""
        one = np.ones(1, np.int32)
        none = np.zeros((3, 0), np.int32)
        step = SchedulerOutput(one - 1, one - 1, one, one, one, (), (), none, none[:2])
        self.fill(step, self.draws, 16)

    def fill(self, step: SchedulerOutput, sampling: StepDraws, block_size: int) -> int | None:
        """Takes a step over; returns its number of draws, None if it is not plain or too large.

        Args:
            sampling: of every slot; its `rows` and `positions` are not looked at.
        """
        if len(step.token_ids) > self._most_rows or len(step.request_slots) > self._most_sequences:
            return None
        rows, draws = self.rows, self.draws
        count: int = _fill(
            step.request_slots,
            step.num_computed_tokens,
            step.num_scheduled_tokens,
            step.token_ids,
            step.num_samples,
            rows.tables,
            block_size,
            (sampling.modes, sampling.temperatures, sampling.seeds, sampling.sample_indices),
            (rows.slots, rows.starts, rows.counts),
            (rows.token_ids, rows.positions, rows.cache_rows),
            (draws.rows, draws.positions, draws.sample_indices),
            (draws.modes, draws.temperatures, draws.seeds),
        )
        return None if count < 0 else count


@njit(cache=True, nogil=True)
def _fill(
    slots: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    token_ids: np.ndarray,
    num_samples: np.ndarray,
    tables: np.ndarray,
    block_size: int,
    sampling: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    sequences: tuple[np.ndarray, np.ndarray, np.ndarray],
    rows: tuple[np.ndarray, np.ndarray, np.ndarray],
    draws: tuple[np.ndarray, np.ndarray, np.ndarray],
    choices: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> int:
    """Number of draws; -1 if a draw is not for the library, or they are too many."""
    modes, temperatures, seeds, sample_indices = sampling
    row = drawn = 0
    for sequence in range(len(slots)):
        slot, start, count = slots[sequence], starts[sequence], counts[sequence]
        sequences[0][sequence], sequences[1][sequence] = slot, start
        sequences[2][sequence] = count
        for i in range(count):
            place = start + i
            rows[0][row + i], rows[1][row + i] = token_ids[row + i], place
            block = tables[slot, place // block_size]
            rows[2][row + i] = block * block_size + place % block_size
        row += count
        samples = num_samples[sequence]
        if samples and (modes[slot] == LOGITS_ONLY or drawn + samples > len(draws[0])):
            return -1
        for sample in range(samples):
            draws[0][drawn], draws[1][drawn] = row - 1, start + count
            # A prompt's end that forks draws for samples 0, 1, ...
            draws[2][drawn] = sample if samples > 1 else sample_indices[slot]
            choices[0][drawn], choices[1][drawn] = modes[slot], temperatures[slot]
            choices[2][drawn] = seeds[slot]
            drawn += 1
    return drawn
