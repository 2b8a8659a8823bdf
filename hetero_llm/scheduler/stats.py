"""What the scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from hetero_llm.core.histogram import Histogram
from hetero_llm.core.request import Request

_STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(slots=True)
class SchedulerStats:
    """Counters since start; tokens unless the name says otherwise.

    `num_requests_begun` counts requests whose prompt is done, `num_first_tokens` what was drawn
    from the prompts' own steps.

    `num_drafts` counts draft trees that were verified, `num_hit_drafts` those with an accepted
    node, `num_draft_tokens` their nodes and `num_accepted_tokens` the nodes that the target agreed
    with and that were emitted. `accepted_at[i]` counts those at the i-th place of their draft.

    `step_tokens` holds, for each step, the prompt tokens computed and the tokens generated.
    """

    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_steps: int = 0
    num_requests_begun: int = 0
    num_requests_finished: int = 0
    num_first_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_hit_drafts: int = 0
    accepted_at: list[int] = field(default_factory=list)
    step_tokens: Histogram = field(default_factory=lambda: Histogram.empty(_STEP_TOKENS))

    def note_time(self, request: Request, now: float, samples: int) -> None:
        """A request got tokens; `samples` were drawn at once."""
        request.metrics.last_token_time = now
        if request.metrics.first_token_time is None:
            request.metrics.first_token_time = now
            self.num_requests_begun += 1
            self.num_first_tokens += samples

    def count_draft(self, nodes: int, accepted: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += nodes
        self.num_accepted_tokens += accepted
        self.num_hit_drafts += accepted > 0
        while len(self.accepted_at) < accepted:
            self.accepted_at.append(0)
        for place in range(accepted):
            self.accepted_at[place] += 1
