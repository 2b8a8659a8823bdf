"""Metrics of speculation in TACO-LLM's terms, for users and for the log.

Names and meanings are those of its manual: an iteration is a decoding step of one request, a hit is
an accepted draft token. TACO averages each ratio over requests; here a ratio is that of the sums
over all requests, so a long request weighs more than a short one.
"""

from __future__ import annotations

import logging

from hetero_llm.config.engine_config import SpeculationConfig
from hetero_llm.scheduler.stats import SchedulerStats

logger = logging.getLogger(__name__)


def speculation_metrics(stats: SchedulerStats) -> dict[str, float]:
    """num_iters, hit_iters, hit_len and invalid_len per request, and TACO's four ratios."""
    requests = max(stats.num_requests_begun, 1)
    # An iteration yields its hits and one more token; the last one of a request may end within
    # its hits.
    iterations = stats.generation_tokens - stats.num_accepted_tokens - stats.num_first_tokens
    iterations = max(iterations, stats.num_hit_drafts)
    hits, drafted = stats.num_accepted_tokens, stats.num_draft_tokens
    return {
        "num_iters": iterations / requests,
        "hit_iters": stats.num_hit_drafts / requests,
        "hit_len": hits / requests,
        "invalid_len": (drafted - hits) / requests,
        "hit_rate": stats.num_hit_drafts / max(iterations, 1),
        "global_average_hit_len": hits / max(iterations, 1),
        "valid_average_hit_len": hits / max(stats.num_hit_drafts, 1),
        "hit_valid_rate": hits / max(drafted, 1),
    }


class SpeculationLog:
    """Logs the metrics every `interval` steps, in the form of TACO's line (is_debug and
    log_interval)."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._next = interval

    def note(self, stats: SchedulerStats) -> None:
        """Called after each step: logs if `interval` steps have passed since the last line."""
        if stats.num_steps < self._next:
            return
        self._next = stats.num_steps + self._interval
        figures = speculation_metrics(stats)
        logger.info("%s", ", ".join(f"{name}: {value:.4f}" for name, value in figures.items()))


def make_log(speculation: SpeculationConfig | None) -> SpeculationLog | None:
    """The log that `is_debug` asks for, else None."""
    config = None if speculation is None else speculation.lookahead
    return SpeculationLog(config.log_interval) if config is not None and config.is_debug else None
