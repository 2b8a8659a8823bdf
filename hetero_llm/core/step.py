"""The contract between engine and runner: one step is one `SchedulerOutput` in, one
`ModelRunnerOutput` out. Plain arrays, no behaviour.

A *request slot* is a running sequence's number at the runner, 0 <= slot < max_num_seqs. The runner
keeps block tables and sampling state by request slot, so a step carries only what changed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.grammar import Grammar
from hetero_llm.core.images import PromptImages
from hetero_llm.core.lora import NO_ADAPTER, AdapterLoad
from hetero_llm.core.sampling_params import SamplingParams

LAST_SAMPLED = -1
"""As an input token: the one last sampled for the request slot, which only the device has yet."""


def depends_on_history(
    params: SamplingParams,
    end_ids: Collection[int],
    bad_word_ids: tuple[tuple[int, ...], ...],
) -> bool:
    """Whether sampling applies any processor besides temperature, top-k/top-p/min-p and a mask.

    Those processors run on the host's record of the tokens so far, so every token has to reach the
    host before the next step is launched. A grammar's mask may come while the step runs.

    Args:
        end_ids: tokens that `min_tokens` forbids at first.
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
    """A sequence that enters a request slot, new, forked or resumed; it replaces what was there.

    Attributes:
        token_ids: all tokens known so far, prompt and output. This is the scheduler's own list, to
            which it appends later: a runner that needs the output tokens copies them in `launch`.
        seed, sample_index: with `params` they determine every token sampled later.
        num_logprobs: most likely tokens to report with each sampled one; None: no log-probabilities
            at all.
        num_prompt_logprobs: the same for prompt tokens.
        end_ids: tokens that end the sequence, which `min_tokens` forbids at first.
        bad_word_ids: token sequences of `bad_words`.
        images: those of its prompt; None without any.
        grammar: that its output follows; None: the output is free.
        adapter_slot: of its adapter; `NO_ADAPTER`: the model alone.
        num_virtual_tokens: tokens at its beginning whose embeddings come from `images` and which
            no processor of logits sees.
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
    grammar: Grammar | None = None
    adapter_slot: int = NO_ADAPTER
    num_virtual_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PromptLogprobSpan:
    """Tokens `first .. first + count - 1` of those scheduled of the step's sequence `index`."""

    index: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's work. Arrays are int32; S sequences, T tokens in all.

    A step may be launched while the one before it is still running. Steps take effect in the order
    of their launch, host-side changes included.

    Attributes:
        request_slots: [S] request slot of each scheduled sequence.
        num_computed_tokens: [S] tokens of it already in the KV cache.
        num_scheduled_tokens: [S] tokens of it in this step, draft nodes included; sum is T.
        token_ids: [T - draft nodes] input tokens, sequence after sequence. `LAST_SAMPLED` (-1)
            stands for the token last sampled for the request slot, which the runner keeps on the
            device. It appears only as a sequence's single token, right after a step that sampled
            one token for the slot, and such a sequence has no draft.
        num_samples: [S] tokens to sample after its last one: 0 while the prompt is unfinished,
            more than 1 when the prompt's end forks into several samples (indices 0, 1, ...). It
            is 1 for a drafted sequence, however many tokens its tree may yield.
        prompt_logprob_spans: tokens whose successor in the prompt needs a log-probability.
        admitted: sequences that enter a request slot in this step, applied first.
        block_table_writes: [3, K] request slot, column and block of each block-table entry to
            write, applied second; of two writes to one entry the later counts.
        block_copies: [2, M] source and destination of each block to copy (copy-on-write), applied
            third, before any token is computed.
        drafts: one draft per scheduled sequence; None if all are empty. A draft's nodes come last
            of the sequence's tokens; its root is the token before, the sequence's last one. Token i
            of a drafted sequence has cache index start + i and position start + depth, where start
            is `num_computed_tokens`. When the step is done, the KV of the accepted nodes lies
            behind the root's without gaps.
        kv_loads: transfer ids (`kv_cache.host_tier`) of loads whose KV this step reads. They may
            still run: each layer's attention waits until that layer is on the device. Such a
            step has no drafts.
        adapter_loads: adapter slots to fill, in order, before anything else; of two loads of one
            slot the later counts.
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
    adapter_loads: tuple[AdapterLoad, ...] = ()

    @property
    def has_chunks(self) -> bool:
        """Whether a sequence has several tokens in this step, draft nodes aside."""
        return len(self.token_ids) > len(self.request_slots)


@dataclass(frozen=True, slots=True)
class SampleLogprobs:
    """Log-probabilities at one sampled position.

    Attributes:
        sampled: that of the sampled token.
        rank: of the sampled token: 1 + number of tokens with a higher log-probability.
        top: (id, log-probability) of the most likely tokens, best first; of equals the lower id.
    """

    sampled: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What one step produced.

    Attributes:
        token_ids: sampled tokens, sequence after sequence, `num_tokens[i]` each.
        logprobs: one entry per token of `token_ids`, None where its request needs none; None if
            none does.
        prompt_logprobs: by request slot, one entry per token of its `prompt_logprob_spans`, in
            order; `sampled` and `rank` are those of the prompt token that follows.
        errors: by request slot, the message of a user's logits processor that raised at the slot's
            first sampled token of this step, which is invalid then. If one raises further down a
            draft, the next step reports it, unless the tokens before end the sequence.
        num_tokens: [S] tokens of each scheduled sequence; None: `num_samples[i]`. A drafted
            sequence has one more than accepted nodes.
        kv_loads_timed_out: the step gave up waiting for one of its `kv_loads`: the tokens that it
            sampled for their sequences and the KV that it wrote for them are invalid.
        arrays: `token_ids` and `num_tokens` as int64 arrays; None if the runner has none.
    """

    token_ids: list[int]
    logprobs: list[SampleLogprobs | None] | None
    prompt_logprobs: dict[int, list[SampleLogprobs]]
    errors: dict[int, str]
    num_tokens: list[int] | None = None
    kv_loads_timed_out: bool = False
    arrays: tuple[np.ndarray, np.ndarray] | None = field(default=None, compare=False)
