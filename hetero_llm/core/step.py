"""The contract between engine and runner: one step is one `SchedulerOutput` in, one
`ModelRunnerOutput` out. Plain arrays, no behaviour.

Words: a *row* is one input token of the flattened batch; a *slot* is a runner-side place for one
running sequence, 0 <= slot < max_num_seqs; block tables and sampling state live there, so a step
carries only what changed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.images import PromptImages
from hetero_llm.core.sampling_params import SamplingParams

LAST_SAMPLED = -1
"""As an input token: the one last drawn for the row's slot, which only the device knows yet."""


def depends_on_history(
    params: SamplingParams,
    end_ids: Collection[int],
    bad_word_ids: tuple[tuple[int, ...], ...],
) -> bool:
    """Whether any processor but temperature and top-k/top-p/min-p applies to a sequence's draws.

    Those processors run on the host's record of the tokens so far, so every token has to be known
    there before the next one is drawn.

    Args:
        end_ids: tokens that `min_tokens` forbids for a while.
        bad_word_ids: token sequences of `bad_words`.
    """
    return bool(
        params.logits_processors
        or params.allowed_token_ids is not None
        or bad_word_ids
        or params.no_repeat_ngram_size
        or (params.min_tokens and end_ids)
        or params.logit_bias
        or has_penalties(params)
    )


def has_penalties(params: SamplingParams) -> bool:
    return bool(
        params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
    )


@dataclass(frozen=True, slots=True)
class AdmittedSequence:
    """A sequence that enters `request_slot`, new, forked or resumed; it replaces what was there.

    `token_ids` are all tokens known so far (prompt and output): the scheduler's own, to which it
    appends later, so whoever needs the output's copies it in `launch`. `params` with `seed` and
    `sample_index` fix every later draw. `num_logprobs` is how many of the most likely tokens to
    report with each draw (None: no log-probabilities at all), `num_prompt_logprobs` the same for
    prompt rows. `end_ids` are the tokens that end the sequence, which `min_tokens` forbids for a
    while; `bad_word_ids` are the token sequences of `bad_words`; `images` are those of its prompt.
    """

    request_slot: int
    token_ids: Sequence[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    sample_index: int
    num_logprobs: int | None = None
    num_prompt_logprobs: int = 0
    end_ids: tuple[int, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    images: PromptImages | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobSpan:
    """Rows `first .. first + count - 1` of the chunk of scheduled sequence `index`."""

    index: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's work. Arrays are int32; S sequences, T rows in all.

    A step may be launched while the one before it is still running. Steps take effect in the order
    of their launch, host-side changes included.

    Attributes:
        request_slots: [S] slot of each scheduled sequence.
        num_computed_tokens: [S] tokens of it already in the KV cache.
        num_scheduled_tokens: [S] rows of it in this step, draft nodes included; sum is T.
        token_ids: input tokens of all rows but draft nodes, sequence after sequence. `LAST_SAMPLED`
            (-1) stands for the token last drawn for the row's slot: the runner keeps those on the
            device. It appears only as a sequence's single row, right after a step that drew one
            token for the slot, and is not drafted for.
        num_samples: [S] tokens to draw after its last row: 0 while the prompt is unfinished,
            more than 1 when the prompt's end forks into several samples (indices 0, 1, ...). It
            is 1 for a drafted sequence, however many tokens its tree may yield.
        prompt_logprob_spans: rows whose log-probability of the following prompt token is wanted.
        admitted: sequences that enter a slot in this step, applied first.
        block_table_writes: [3, K] rows request slot, column, block: block-table entries to write,
            second; of two writes to one entry the later counts.
        block_copies: [2, M] rows source, destination: whole blocks to copy, third, before any
            row is computed (copy-on-write).
        drafts: one draft per scheduled sequence; None if nobody has any. Its nodes are the last of
            the sequence's rows; its root is the row before, the sequence's last token. Row i of a
            drafted sequence has cache index start + i and position start + depth. When the step is
            done, the KV of the accepted nodes lies behind the root's without gaps.
        kv_loads: transfer ids (`kv_cache.host_tier`) of loads whose KV this step reads; they may
            still run: each layer's attention waits until that layer is on the device. Such a
            step has no drafts.
    """

    request_slots: np.ndarray
    num_computed_tokens: np.ndarray
    num_scheduled_tokens: np.ndarray
    token_ids: np.ndarray
    num_samples: np.ndarray
    prompt_logprob_spans: tuple[PromptLogprobSpan, ...]
    admitted: tuple[AdmittedSequence, ...]
    block_table_writes: np.ndarray
    block_copies: np.ndarray
    drafts: DraftBatch | None = None
    kv_loads: tuple[int, ...] = ()

    @property
    def has_chunks(self) -> bool:
        """Whether a sequence has several rows of its own, draft nodes aside."""
        return len(self.token_ids) > len(self.request_slots)


@dataclass(frozen=True, slots=True)
class SampleLogprobs:
    """Log-probabilities of one drawn position.

    `sampled` is the drawn token's; `top` the most likely tokens (id, log-probability) best first;
    `rank` the drawn token's rank from 1.
    """

    sampled: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What one step produced.

    Attributes:
        token_ids: drawn tokens, sequence after sequence, `num_tokens[i]` each.
        logprobs: one entry per token of `token_ids`, None where its request needs none; None if
            none does.
        prompt_logprobs: slot to one entry per wanted prompt row, in order; there `drawn` and
            `rank` are those of the prompt token that follows the row.
        errors: slot to the message of a user's logits processor that raised at the slot's first
            draw of this step, whose token means nothing then. One that raises further down a draft
            is reported by the next step, if the tokens before do not end the sequence.
        num_tokens: [S] tokens of each scheduled sequence; None: `num_samples[i]`. A drafted
            sequence has one more than accepted nodes.
        kv_loads_timed_out: the step gave up waiting for one of its `loads`: what it drew for their
            sequences, and the KV it wrote for them, mean nothing.
    """

    token_ids: list[int]
    logprobs: list[SampleLogprobs | None] | None
    prompt_logprobs: dict[int, list[SampleLogprobs]]
    errors: dict[int, str]
    num_tokens: list[int] | None = None
    kv_loads_timed_out: bool = False
