"""Counters of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

from hetero_llm.core.histogram import Histogram
from hetero_llm.core.request import Request

_STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


# large: one field for each counter.
@dataclass(slots=True)
class SchedulerStats:
    """Counters since start; of tokens unless the name says otherwise.

    Attributes:
        prefix_cache_queries, prefix_cache_hits: tokens of admitted sequences, and those of them
            whose KV was there.
        num_steps_ahead: steps that were made with another one in flight.
        num_requests_begun: requests with a token or more.
        num_first_tokens: tokens sampled at the ends of prompts.
        num_drafts: verified draft trees.
        num_draft_tokens: their nodes.
        num_accepted_tokens: nodes that the target agreed with and that were emitted.
        num_hit_drafts: drafts with an accepted node.
        accepted_at: [i] drafts with more than i accepted nodes.
        step_tokens: of each step, prompt tokens computed plus tokens generated.
    """

    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_steps: int = 0
    num_steps_ahead: int = 0
    num_requests_begun: int = 0
    num_requests_finished: int = 0
    num_first_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_hit_drafts: int = 0
    accepted_at: list[int] = field(default_factory=list)
    step_tokens: Histogram = field(default_factory=lambda: Histogram.empty(_STEP_TOKENS))

    def count_sampled(self, request: Request, now: float, num_samples: int) -> None:
        """Notes that a step ended at `now` which sampled `num_samples` tokens for a request."""
        request.metrics.last_token_time = now
        if request.metrics.first_token_time is None:
            request.metrics.first_token_time = now
            self.num_requests_begun += 1
            self.num_first_tokens += num_samples

    def count_draft(self, num_nodes: int, num_accepted: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += num_nodes
        self.num_accepted_tokens += num_accepted
        self.num_hit_drafts += num_accepted > 0
        while len(self.accepted_at) < num_accepted:
            self.accepted_at.append(0)
        for depth in range(num_accepted):
            self.accepted_at[depth] += 1
