"""How draft tokens may be accepted that the target did not draw."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TypicalAcceptance:
    """Accept a draft token that is likely enough, drawn or not: lossy (Cai et al., Medusa,
    arXiv 2401.10774, section 2.3.1).

    A token of probability p under the target's distribution, temperature and thresholds applied,
    is accepted where p > min(threshold, alpha * exp(-H)), H the distribution's entropy in nats.
    At temperature 0 that is the argmax alone, so greedy requests stay exact.

    Attributes:
        threshold: what is enough whatever the entropy, in (0, 1].
        alpha: scale of the bound for flat distributions, above 0.
    """

    threshold: float
    alpha: float
