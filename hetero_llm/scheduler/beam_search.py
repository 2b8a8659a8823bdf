"""Beam search as transformers' `generate` defines it (its `_beam_search`), on plain numbers.

All live beams of a group advance together: the scheduler collects the best continuations of each
beam and calls `advance` once all are there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Candidates = tuple[tuple[int, float], ...]
"""Most likely next tokens of one beam: (token id, log-probability), best first."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """Beam `parent` continued by `token`, its `rank`-th best continuation (from 1).

    `score` is the summed log-probability, `logprob` the token's share of it.
    """

    parent: int
    token: int
    score: float
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished sequence: `value` is its score over length ** length_penalty, `record` whatever
    the caller keeps with it."""

    token_ids: list[int]
    score: float
    value: float
    record: Any


@dataclass(slots=True)
class BeamGroup:
    """State of one beam search over prompts of `num_prompt` tokens.

    Attributes:
        width: beams kept, and hypotheses kept.
        max_total_tokens: length at which every beam is finished.
        hypotheses: the best `width` finished ones so far, best first.
        improvable: running beams may still beat the finished ones.
        pending: candidates already received, by index of the live beam's sequence.
    """

    width: int
    num_prompt: int
    max_total_tokens: int
    length_penalty: float
    early_stopping: bool | str
    hypotheses: list[Hypothesis] = field(default_factory=list)
    improvable: bool = True
    pending: dict[int, Candidates] = field(default_factory=dict)


def candidates_needed(width: int, num_end_ids: int) -> int:
    """So many continuations per beam leave `width` unfinished ones even if every end token is
    among the best."""
    return max(2, 1 + num_end_ids) * width


def advance(
    group: BeamGroup,
    beams: list[tuple[list[int], float]],
    candidates: list[Candidates],
    ends: Callable[[Continuation], bool],
    record: Callable[[Continuation], Any],
) -> list[Continuation]:
    """One step of the search.

    Args:
        group: updated in place: new hypotheses, `improvable`.
        beams: token ids and summed log-probability of each live beam.
        candidates: for each beam its best continuations.
        ends: whether a continuation ends its sequence.
        record: asked for every sequence that finishes; kept with the hypothesis.

    Returns:
        The beams to go on with, best first; empty when the search is over.
    """
    length = len(beams[0][0]) + 1
    generated = length - group.num_prompt
    at_limit = length >= group.max_total_tokens
    pool = [
        Continuation(index, token, beams[index][1] + logprob, logprob, rank)
        for index, continuations in enumerate(candidates)
        for rank, (token, logprob) in enumerate(continuations, start=1)
    ]
    pool.sort(key=lambda c: -c.score)
    kept = len(candidates[0])
    running: list[Continuation] = []
    full = len(group.hypotheses) == group.width
    accepts = group.improvable and not (full and group.early_stopping is True)
    for rank, item in enumerate(pool[:kept]):
        if not (at_limit or ends(item)):
            if len(running) < group.width:
                running.append(item)
        elif rank < group.width and accepts:
            tokens = [*beams[item.parent][0], item.token]
            value = item.score / generated**group.length_penalty
            group.hypotheses.append(Hypothesis(tokens, item.score, value, record(item)))
    group.hypotheses.sort(key=lambda h: -h.value)
    del group.hypotheses[group.width :]
    if not running:
        return []
    group.improvable = group.improvable and _may_improve(group, running[0].score, generated)
    full = len(group.hypotheses) == group.width
    if not group.improvable or (full and group.early_stopping is True):
        return []
    return running


def _may_improve(group: BeamGroup, best_score: float, generated: int) -> bool:
    if len(group.hypotheses) < group.width:
        return True
    if group.early_stopping == "never" and group.length_penalty > 0.0:
        length = group.max_total_tokens - group.num_prompt
    else:
        length = generated
    return best_score / length**group.length_penalty > group.hypotheses[-1].value
