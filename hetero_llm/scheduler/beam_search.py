"""Beam search as transformers' `generate` defines it (its `_beam_search`).

All unfinished beams of a request advance together: the scheduler collects the candidates of each
beam in `BeamGroup.pending` and calls `advance_group` once all are there. Nothing here changes a
request slot or a block: the scheduler forks and releases sequences as the result says.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import cache
from heapq import merge
from itertools import islice

from hetero_llm.core.request import FinishReason, Request, Sequence
from hetero_llm.core.step import SampleLogprobs

Candidates = tuple[tuple[int, float], ...]
"""Most likely next tokens of one beam: (token id, log-probability), best first."""

HoldsStop = Callable[[Request, list[int]], bool]
"""Whether the text of these output tokens contains a stop string of the request that the last
token completes."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """Beam `parent` continued by `token`; `rank` is that among the beam's candidates, from 1.

    `score` is the summed log-probability, `logprob` the token's share of it.
    """

    parent: int
    token: int
    score: float
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished sequence. `score` is its summed log-probability, `normalized_score` that over
    length ** length_penalty; `logprobs` has one entry per output token, None if none are wanted."""

    token_ids: list[int]
    score: float
    normalized_score: float
    logprobs: list[SampleLogprobs] | None


@dataclass(slots=True)
class BeamGroup:
    """State of one request's beam search.

    Attributes:
        width: most unfinished beams, and most hypotheses kept.
        max_total_tokens: length, prompt included, at which every beam is finished.
        hypotheses: the best `width` finished sequences so far, best first.
        improvable: unfinished beams may still beat the hypotheses.
        pending: candidates received since the last advance, by `Sequence.index` of the beam.
    """

    width: int
    num_prompt_tokens: int
    max_total_tokens: int
    length_penalty: float
    early_stopping: bool | str
    hypotheses: list[Hypothesis] = field(default_factory=list)
    improvable: bool = True
    pending: dict[int, Candidates] = field(default_factory=dict)

    @classmethod
    def of(cls, request: Request) -> BeamGroup:
        """The search of a new request."""
        params = request.params
        return cls(
            params.width,
            len(request.prompt_token_ids),
            request.max_total_tokens,
            params.length_penalty,
            params.early_stopping,
        )


def candidates_needed(width: int, num_end_ids: int) -> int:
    """How many candidates of each beam the search looks at: as many as leave `width` that do not
    end, should every end token be among the best."""
    return width + max(width, num_end_ids)


def advance_group(
    request: Request, group: BeamGroup, beams: list[Sequence], holds_stop: HoldsStop | None
) -> list[tuple[Continuation, list[SampleLogprobs] | None]]:
    """Advances a request's search by one token, once `group.pending` has the candidates of all its
    unfinished `beams`; clears `group.pending`.

    Returns:
        The continuations to keep, best first, each with the log-probabilities of its output tokens
        (None if the request wants none); empty when the search has ended.
    """
    # Forbidden tokens are candidates where fewer others are left.
    candidates = [
        tuple(item for item in group.pending[s.index] if item[1] > -math.inf) for s in beams
    ]
    needed = candidates_needed(group.width, len(request.end_ids))
    wanted = request.params.logprobs
    may_end = beams[0].may_end(len(beams[0].token_ids) + 1)  # all beams have one length

    stop = (request.params.stop or ()) if may_end else ()

    @cache
    def completes_stop(item: Continuation) -> bool:
        if not stop:
            return False
        assert holds_stop is not None
        beam = beams[item.parent]
        return holds_stop(request, [*beam.token_ids[beam.num_prompt_tokens :], item.token])

    def logprobs_of(item: Continuation) -> list[SampleLogprobs] | None:
        before = beams[item.parent].logprobs
        if before is None or wanted is None:
            return None
        top = candidates[item.parent][:wanted]
        return [*before, SampleLogprobs(item.logprob, item.rank, top)]

    kept = advance(
        group,
        [(s.token_ids, s.cumulative_logprob) for s in beams],
        [c[:needed] for c in candidates],
        request.end_ids if may_end else _ends_of_grammar(request),
        completes_stop,
        logprobs_of,
    )
    group.pending = {}
    return [(item, logprobs_of(item)) for item in kept]


def _ends_of_grammar(request: Request) -> frozenset[int]:
    """The tokens that end a sequence although `min_tokens` forbids them, see `ends_with`."""
    return frozenset() if request.grammar is None else request.end_ids & request.eos_ids


def advance(
    group: BeamGroup,
    beams: SequenceOf[tuple[SequenceOf[int], float]],
    candidates: SequenceOf[Candidates],
    end_ids: frozenset[int],
    completes_stop: Callable[[Continuation], bool],
    logprobs_of: Callable[[Continuation], list[SampleLogprobs] | None],
) -> list[Continuation]:
    """Advances a search by one token; the algorithm itself, on plain numbers.

    The `width` best continuations that end become hypotheses if they are among the `width` best of
    all; the `width` best that do not end go on. All candidates are looked at only for the ids of
    their tokens: a request with many end tokens must not hold up the others.

    Args:
        group: updated in place: new hypotheses, `improvable`.
        beams: token ids and summed log-probability of each unfinished beam.
        candidates: of each beam, best first.
        end_ids: tokens that end a sequence now.
        completes_stop: whether the text of a continuation completes a stop string. Asked for at
            most 3 * `width` of them.
        logprobs_of: log-probabilities of a continuation that becomes a hypothesis.

    Returns:
        The continuations to keep, best first; empty when the search has ended.
    """
    length = len(beams[0][0]) + 1
    num_generated = length - group.num_prompt_tokens
    at_limit = length >= group.max_total_tokens
    full = len(group.hypotheses) == group.width
    if group.improvable and not (full and group.early_stopping is True):
        for item in islice(_best_first(beams, candidates), group.width):
            if at_limit or item.token in end_ids or completes_stop(item):
                tokens = [*beams[item.parent][0], item.token]
                normalized = _normalized(item.score, num_generated, group.length_penalty)
                group.hypotheses.append(
                    Hypothesis(tokens, item.score, normalized, logprobs_of(item))
                )
    unfinished: list[Continuation] = []
    if not at_limit:
        going_on = _best_first(beams, candidates, without=end_ids)
        texts = (item for item in islice(going_on, 2 * group.width) if not completes_stop(item))
        unfinished = list(islice(texts, group.width))
    group.hypotheses.sort(key=lambda h: -h.normalized_score)
    del group.hypotheses[group.width :]
    if not unfinished:
        return []
    best_score = unfinished[0].score
    group.improvable = group.improvable and _may_improve(group, best_score, num_generated)
    full = len(group.hypotheses) == group.width
    if not group.improvable or (full and group.early_stopping is True):
        return []
    return unfinished


def _best_first(
    beams: SequenceOf[tuple[SequenceOf[int], float]],
    candidates: SequenceOf[Candidates],
    without: frozenset[int] = frozenset(),
) -> Iterator[Continuation]:
    """The continuations of all beams by their scores, each made when it is taken. Of equal ones
    the earlier beam's comes first, then the better candidate."""

    def of_beam(index: int) -> Iterator[Continuation]:
        summed, rank, before = beams[index][1], 0, math.inf
        for place, (token, logprob) in enumerate(candidates[index], start=1):
            if logprob != before:  # equal ones share a rank
                rank, before = place, logprob
            if token not in without:
                yield Continuation(index, token, summed + logprob, logprob, rank)

    return merge(*map(of_beam, range(len(beams))), key=lambda item: -item.score)


def _normalized(score: float, length: int, penalty: float) -> float:
    """score / length ** penalty; the limit of that where the power is no float any more."""
    try:
        return score / float(length) ** penalty  # of integers it could be huge
    except OverflowError:
        return -0.0
    except ZeroDivisionError:
        return -math.inf


def _may_improve(group: BeamGroup, best_score: float, num_generated: int) -> bool:
    """Whether an unfinished beam of this score may become one of the best hypotheses."""
    if len(group.hypotheses) < group.width:
        return True
    if group.early_stopping == "never" and group.length_penalty > 0.0:
        num_generated = group.max_total_tokens - group.num_prompt_tokens
    normalized = _normalized(best_score, num_generated, group.length_penalty)
    return normalized > group.hypotheses[-1].normalized_score


def best_sequences(request: Request, group: BeamGroup, beams: list[Sequence]) -> list[Sequence]:
    """The result of an ended search: `params.n` finished sequences, best first."""
    hypotheses = list(group.hypotheses)
    if len(hypotheses) < request.params.n:  # the search stopped before enough had ended
        hypotheses += [
            Hypothesis(s.token_ids.tolist(), s.cumulative_logprob, s.cumulative_logprob, s.logprobs)
            for s in sorted(beams, key=lambda s: -s.cumulative_logprob)
        ]
    finished: list[Sequence] = []
    for index, hypothesis in enumerate(hypotheses[: request.params.n]):
        last = hypothesis.token_ids[-1]
        # With a grammar `last` may be a stop token that min_tokens forbids, and that ends nothing.
        ended = beams[0].ends_with(last, len(hypothesis.token_ids))
        finished.append(
            Sequence(
                request,
                index,
                array("i", hypothesis.token_ids),
                beams[0].num_prompt_tokens,
                cumulative_logprob=hypothesis.score,
                logprobs=hypothesis.logprobs,
                finish_reason=FinishReason.STOP if ended else FinishReason.LENGTH,
                stop_reason=last if ended and last not in request.eos_ids else None,
            )
        )
    return finished
