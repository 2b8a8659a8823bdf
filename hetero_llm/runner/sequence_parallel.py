"""Sequence parallelism: ranks with the whole model share the tokens of steps with long prompts.

Each rank computes queries, keys and values of its own tokens (`split_step`), gathers the keys and
values of all ranks in every layer, stores those of the whole step in its own KV cache, and attends
for its own tokens. Behind the model it gathers the hidden states that are sampled after, so all
ranks sample the same tokens. Afterwards all have the same KV cache: steps that are not split, such
as those that decode, are computed by every rank as if it were alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hetero_llm.core.step import SchedulerOutput
from hetero_llm.models.collectives import Collectives
from hetero_llm.runner.split_step import RowPlaces, SplitStep, split

LEAST_TOKENS = {"cpu": 64, "cuda": 2049}
"""Tokens of chunks in a step from which on it is split, by the kind of device. A split step runs
without a CUDA graph, and launching one takes the host as long as 2,000 tokens of a model of 8
billion parameters take the GPU: what `gpu.graph_set` captures is not split."""


class WholeStep:
    """A step that this rank computes alone: see `SharedStep`."""

    def __init__(self, step: SchedulerOutput) -> None:
        self.own = step

    def gather_kv(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k, v

    def gather_hidden(self, hidden: Tensor) -> Tensor:
        return hidden


class SharedStep:
    """What a rank computes of a step that all ranks share.

    Args:
        device: of the model.

    Attributes:
        own: as a step of its own.
    """

    def __init__(self, step: SplitStep, collectives: Collectives, device: torch.device) -> None:
        self.own = step.own
        self._rows = step.tokens
        self._collectives = collectives
        self._places = torch.from_numpy(step.tokens.places).to(device)

    def gather_kv(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the own tokens, [own tokens, N, D] each, to those of all tokens of the
        step, [T, N, D]."""
        rows = self._gather(torch.cat((k.flatten(1), v.flatten(1)), dim=1))
        keys, values = rows.view(len(rows), 2, *k.shape[1:]).unbind(1)
        return keys, values

    def gather_hidden(self, hidden: Tensor) -> Tensor:
        """[own tokens, hidden] to [T, hidden]."""
        return self._gather(hidden)

    def _gather(self, rows: Tensor) -> Tensor:
        return gather_rows(rows, self._rows, self._collectives).index_select(0, self._places)


def gather_rows(rows: Tensor, places: RowPlaces, collectives: Collectives) -> Tensor:
    """The rows of all ranks, each where `places` says.

    Args:
        rows: [at most width, n] of this rank.

    Returns:
        [width * ranks, n].
    """
    missing = places.width - len(rows)
    assert missing >= 0, (len(rows), places.width)
    if missing:
        rows = F.pad(rows, (0, 0, 0, missing))
    groups = rows.reshape(places.width // places.group, -1)
    return collectives.gather_columns(groups).view(places.width * places.size, -1)


class SequenceParallel:
    """Decides which steps the ranks share.

    Args:
        collectives: of the ranks with the same part of the model.
        least_tokens: see `LEAST_TOKENS`.

    Attributes:
        collectives: see Args.
    """

    def __init__(self, collectives: Collectives, least_tokens: int) -> None:
        assert collectives.rank.size > 1
        self.collectives = collectives
        self.least_tokens = least_tokens

    def split(self, step: SchedulerOutput) -> SplitStep | None:
        """See `split_step.split`."""
        return split(step, self.collectives.rank, least_tokens=self.least_tokens)

    def part(self, step: SchedulerOutput, device: torch.device) -> WholeStep | SharedStep:
        """What this rank computes of a step."""
        found = self.split(step)
        return WholeStep(step) if found is None else SharedStep(found, self.collectives, device)


class NoSequenceParallel:
    """In the place of `SequenceParallel` where each rank computes all tokens of a step."""

    def split(self, step: SchedulerOutput) -> None:
        return None

    def part(self, step: SchedulerOutput, device: torch.device) -> WholeStep:
        return WholeStep(step)


NO_SEQUENCE_PARALLEL = NoSequenceParallel()


def sequence_parallel(
    collectives: Collectives, device: torch.device
) -> SequenceParallel | NoSequenceParallel:
    """That of a rank. `collectives`: of the ranks that share the tokens, perhaps of one alone."""
    if collectives.rank.size == 1:
        return NO_SEQUENCE_PARALLEL
    return SequenceParallel(collectives, LEAST_TOKENS[device.type])
