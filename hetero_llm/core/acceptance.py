"""Lossy acceptance of draft tokens: also of some that the target model did not sample."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TypicalAcceptance:
    """Accepts every draft token that the target finds likely enough (Cai et al., Medusa,
    arXiv 2401.10774, section 2.3.1).

    A token of probability p under the target's distribution, after temperature, top-k, top-p and
    min-p, is accepted if p > min(threshold, alpha * exp(-H)); H is the distribution's entropy in
    nats. At temperature 0 that is the argmax alone, so greedy requests stay exact.

    Attributes:
        threshold: a probability above which any token is accepted, in (0, 1].
        alpha: scale of the bound for flat distributions, above 0.
    """

    threshold: float
    alpha: float
