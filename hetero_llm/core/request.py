"""A request and its sequences. The scheduler is the only writer of both."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum

from hetero_llm.core.grammar import Grammar
from hetero_llm.core.images import PromptImages
from hetero_llm.core.lora import AdapterRef
from hetero_llm.core.outputs import RequestMetrics
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.core.step import SampleLogprobs, depends_on_history


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


# large: plain data, one field for each fact about a request.
@dataclass(slots=True, eq=False)
class Request:
    """One prompt and how to continue it.

    Attributes:
        seed: for sampling, given or derived.
        end_ids: tokens that end a sequence (EOS unless ignored, and stop_token_ids).
        eos_ids: end-of-sequence tokens that the request does not name: the stop reason is None.
        max_total_tokens: a sequence of this many tokens (prompt included) is finished.
        root_hash: hash that its first block has as parent in the prefix cache.
        num_logprobs: most likely tokens to report with each sampled one; None for no
            log-probabilities. Beam search gets its candidates by this.
        num_prompt_logprobs: the same for prompt tokens.
        bad_word_ids: token sequences of `params.bad_words`.
        prompt_logprobs: one entry per prompt token computed so far, the first is None.
        num_unfinished: how many of `sequences` are not finished.
        packed_prompt: the prompt's tokens as int32 bytes, for the prefix cache; may be empty.
        images: of its prompt; `prompt_token_ids` holds their placeholder tokens. None without any.
        grammar: that its outputs follow; None: they are free.
        adapter: that is added to the model for it; None: the model alone. `root_hash` covers it.
        num_virtual_tokens: tokens at the beginning of `prompt_token_ids` that stand for those of a
            prompt adapter, whose embeddings are `images`; users do not see them.
        failed_field: the user's field at which it failed, if that was its adapter.
        num_cached_tokens: prompt tokens found in the prefix cache at first admission; -1 before.
        synchronous: every token must be known on the host before the next step is made.
        may_draft: its sequences may have drafts; False for beams, which sampling does not continue.
        num_first_samples: tokens sampled where its prompt ends: one for each sample that forks.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    end_ids: frozenset[int]
    eos_ids: frozenset[int]
    max_total_tokens: int
    root_hash: bytes
    metrics: RequestMetrics
    num_logprobs: int | None = None
    num_prompt_logprobs: int = 0
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: list[SampleLogprobs | None] | None = None
    sequences: list[Sequence] = field(default_factory=list)
    num_unfinished: int = 0
    num_cached_tokens: int = -1
    error: str | None = None
    images: PromptImages | None = None
    grammar: Grammar | None = None
    adapter: AdapterRef | None = None
    failed_field: str | None = None
    packed_prompt: bytes = b""
    num_virtual_tokens: int = 0
    synchronous: bool = field(init=False)
    may_draft: bool = field(init=False)
    num_first_samples: int = field(init=False)

    def __post_init__(self) -> None:
        params = self.params
        self.synchronous = params.use_beam_search or depends_on_history(
            params, self.end_ids, self.bad_word_ids
        )
        self.may_draft = not params.use_beam_search
        self.num_first_samples = 1 if params.use_beam_search else params.width

    @property
    def shown_prompt_ids(self) -> list[int]:
        """The tokens of the prompt without virtual ones."""
        virtual = self.num_virtual_tokens
        return self.prompt_token_ids[virtual:] if virtual else self.prompt_token_ids


# large: all that the scheduler knows of one sequence.
@dataclass(slots=True, eq=False)
class Sequence:
    """One continuation of a request's prompt.

    Invariant between steps: the KV of the first `num_computed_tokens` tokens is in the cache, or
    will be when the launched steps are done. A decoding sequence has `num_computed_tokens ==
    len(token_ids) + num_pending_tokens - 1`, except while it is about to fork.

    Attributes:
        token_ids: prompt and output, int32; an array, which garbage collection does not traverse.
        request_slot: its number at the runner and the block manager; -1 while it has none.
        num_pending_tokens: tokens that launched steps sample: they follow `token_ids`, their values
            have not reached the host.
        epoch: how often it has lost its request slot; results of an earlier epoch are void.
        earlier_sums: `cumulative_logprob` before each token that the last step added.
        skips_host: its next prefix is not loaded from host memory, since a load failed.
        kv_counted: what the block manager counted of it in its earlier request slots.
        last_step: number of the last step that computes a token of it; kept where stages share the
            running sequences out among steps.
    """

    request: Request
    index: int
    token_ids: array[int]
    num_prompt_tokens: int
    request_slot: int = -1
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    epoch: int = 0
    cumulative_logprob: float = 0.0
    earlier_sums: list[float] = field(default_factory=list)
    logprobs: list[SampleLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    skips_host: bool = False
    kv_counted: tuple[int, int] = (0, 0)
    last_step: int = 0

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :].tolist()

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def may_end(self, length: int) -> bool:
        """Whether `min_tokens` allows an end token or stop string at `length` tokens in all."""
        return length - self.num_prompt_tokens > self.request.params.min_tokens

    def ends_with(self, token: int, length: int) -> bool:
        """Whether `token` ends the sequence as its last one of `length`. An end-of-sequence token
        that `min_tokens` forbids is only sampled where a grammar allows nothing else."""
        request = self.request
        if token not in request.end_ids:
            return False
        return self.may_end(length) or (request.grammar is not None and token in request.eos_ids)

    def num_before_end(self, new: list[int]) -> int:
        """How many new tokens come before the first that ends the sequence, or before the last one.

        The length ends a sequence at the last one at the earliest: no draft has more nodes.
        """
        end_ids = self.request.end_ids
        if not end_ids.isdisjoint(new):
            length = len(self.token_ids)
            for index, token in enumerate(new):
                if token in end_ids and self.ends_with(token, length + index + 1):
                    return index
        return len(new) - 1

    def drop_tokens(self, count: int) -> None:
        """Drops the last `count` tokens, which the last step added, and their log-probabilities."""
        del self.token_ids[-count:]
        if self.earlier_sums:
            self.cumulative_logprob = self.earlier_sums[-count]
            if self.logprobs is not None:
                del self.logprobs[-count:]
