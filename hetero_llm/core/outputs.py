"""What a user gets back. Fields have vLLM's names and meanings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hetero_llm.core.lora import LoRARequest


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability.

    Attributes:
        rank: 1 + number of tokens with a higher log-probability.
        decoded_token: its text; of a token that is part of a character, that of the whole
            character if it completes it here, else "" or U+FFFD. None without detokenization.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""Token id to its log-probability, at one position."""


def shared_ranks(logprobs: Iterable[float]) -> list[int]:
    """Ranks of log-probabilities in descending order, from 1: equal ones share a rank."""
    ranks: list[int] = []
    before = None
    for place, value in enumerate(logprobs, start=1):
        ranks.append(ranks[-1] if value == before else place)
        before = value
    return ranks


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds of the monotonic clock; None until the event has happened."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None

    @property
    def time_in_queue(self) -> float | None:
        """From the arrival to the first step."""
        return _between(self.arrival_time, self.first_scheduled_time)

    @property
    def first_token_latency(self) -> float | None:
        """From the arrival to the first token."""
        return _between(self.arrival_time, self.first_token_time)

    @property
    def queued_ts(self) -> float:
        """`arrival_time`, by its name in vLLM's second engine; as the next three."""
        return self.arrival_time

    @property
    def scheduled_ts(self) -> float | None:
        return self.first_scheduled_time

    @property
    def first_token_ts(self) -> float | None:
        return self.first_token_time

    @property
    def last_token_ts(self) -> float | None:
        return self.last_token_time


def _between(begin: float, end: float | None) -> float | None:
    return None if end is None else end - begin


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence.

    Attributes:
        cumulative_logprob: sum of the sampled tokens' log-probabilities if these were requested or
            are needed (`best_of`, beam search), else None.
        finish_reason: "stop", "length", "abort" or "error"; None while running.
        stop_reason: the stop string or stop token id that ended it; None for the end-of-sequence
            token.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The state of one request: its prompt and the sequences generated for it so far.

    `lora_request` is the one that named its adapter.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    lora_request: LoRARequest | None = None
    num_cached_tokens: int = 0
    error: str | None = field(default=None, repr=False)

    @property
    def encoder_prompt(self) -> None:
        """vLLM's name, as the next two: models with an encoder's prompt and KV transfer are not
        available, so there is none."""

    @property
    def encoder_prompt_token_ids(self) -> None: ...

    @property
    def kv_transfer_params(self) -> None: ...


@dataclass(slots=True)
class BeamSearchSequence:
    """One result of `LLM.beam_search`.

    Attributes:
        tokens: the prompt's and the generated ones.
        logprobs: of each generated token.
        cum_logprob: their sum.
        text: of all `tokens`, special tokens included.
        finish_reason, stop_reason: see `CompletionOutput`.
    """

    tokens: list[int]
    logprobs: list[TokenLogprobs]
    lora_request: LoRARequest | None = None
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The `beam_width` best sequences of one prompt, best first."""

    sequences: list[BeamSearchSequence]
