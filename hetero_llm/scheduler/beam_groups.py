"""The scheduler's side of beam search: between a request's sequences and `beam_search`.

Nothing here changes a slot or a block; the scheduler acts on what is returned.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

from hetero_llm.core.request import FinishReason, Request, Sequence
from hetero_llm.core.step import SampleLogprobs
from hetero_llm.scheduler.beam_search import (
    BeamGroup,
    Continuation,
    Hypothesis,
    advance,
    candidates_needed,
)

HoldsStop = Callable[[Request, list[int]], bool]
"""Whether the text of some tokens, the last one new, holds one of a request's stop strings."""


@dataclass(frozen=True, slots=True)
class GrownBeam:
    """A beam to go on with: `beams[parent]` followed by `token`."""

    parent: int
    token: int
    score: float
    logprobs: list[SampleLogprobs] | None


def open_group(request: Request) -> BeamGroup:
    """The search of a new request."""
    params = request.params
    return BeamGroup(
        params.width,
        len(request.prompt_token_ids),
        request.max_total_tokens,
        params.length_penalty,
        params.early_stopping,
    )


def grow_beams(
    request: Request, group: BeamGroup, beams: list[Sequence], holds_stop: HoldsStop | None
) -> list[GrownBeam]:
    """One step of the search, once `group.pending` has every live beam's candidates.

    Returns:
        The beams to go on with, best first; empty when the search is over.
    """
    candidates = [group.pending[s.index] for s in beams]
    needed = candidates_needed(group.width, len(request.end_ids))
    wanted = request.params.logprobs

    def ends(item: Continuation) -> bool:
        beam = beams[item.parent]
        if not beam.may_end(len(beam.token_ids) + 1):
            return False
        if item.token in request.end_ids:
            return True
        if not request.params.stop:
            return False
        assert holds_stop is not None
        return holds_stop(request, [*beam.output_ids, item.token])

    def logprobs_of(item: Continuation) -> list[SampleLogprobs] | None:
        before = beams[item.parent].logprobs
        if before is None or wanted is None:
            return None
        top = candidates[item.parent][:wanted]
        return [*before, SampleLogprobs(item.logprob, item.rank, top)]

    chosen = advance(
        group,
        [(s.token_ids.tolist(), s.cumulative_logprob) for s in beams],
        [c[:needed] for c in candidates],
        ends,
        logprobs_of,
    )
    group.pending = {}
    return [GrownBeam(c.parent, c.token, c.score, logprobs_of(c)) for c in chosen]


def best_sequences(request: Request, group: BeamGroup, beams: list[Sequence]) -> list[Sequence]:
    """The result of a search that is over: finished sequences, best first."""
    hypotheses = list(group.hypotheses)
    if len(hypotheses) < request.params.n:  # the search stopped before enough had ended
        hypotheses += [
            Hypothesis(s.token_ids.tolist(), s.cumulative_logprob, s.cumulative_logprob, s.logprobs)
            for s in sorted(beams, key=lambda s: -s.cumulative_logprob)
        ]
    finished: list[Sequence] = []
    for index, hypothesis in enumerate(hypotheses[: request.params.n]):
        last = hypothesis.token_ids[-1]
        ended = last in request.end_ids
        finished.append(
            Sequence(
                request,
                index,
                array("i", hypothesis.token_ids),
                beams[0].num_prompt_tokens,
                cumulative_logprob=hypothesis.score,
                logprobs=hypothesis.record,
                finish_reason=FinishReason.STOP if ended else FinishReason.LENGTH,
                stop_reason=last if ended and last not in request.eos_ids else None,
            )
        )
    return finished


def unchosen(beams: list[Sequence], chosen: list[GrownBeam]) -> list[Sequence]:
    """Beams that nobody goes on with."""
    parents = {item.parent for item in chosen}
    return [beam for index, beam in enumerate(beams) if index not in parents]


def continue_beams(
    beams: list[Sequence],
    chosen: list[GrownBeam],
    width: int,
    fork: Callable[[Sequence, int], Sequence],
) -> list[Sequence]:
    """Gives each chosen continuation a sequence: the parent's own, or one that `fork` makes of it
    with an index that is free."""
    used = {beams[item.parent].index for item in chosen}
    spare = [index for index in range(width) if index not in used]
    grown: list[Sequence] = []
    seen: set[int] = set()
    for item in chosen:
        beam = beams[item.parent]
        if item.parent in seen:
            beam = fork(beam, spare.pop(0))
        seen.add(item.parent)
        grown.append(beam)
    for beam, item in zip(grown, chosen, strict=True):  # after all forks: those copy the parent
        beam.token_ids.append(item.token)
        beam.cumulative_logprob = item.score
        beam.logprobs = item.logprobs
    return grown
