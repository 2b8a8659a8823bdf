"""The draft model once more, slowly: every row names the tokens that it sees one by one, and their
keys lie in one long list. No pages, no block tables, no windows of bits."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from hetero_llm.models.layers import CausalLM, RotaryHeads
from hetero_llm.models.rotary import StepRotary
from hetero_llm.sampling.noise import gumbel_noise, signed_seed

SINK = 16


class Memory:
    """Keys and values of every row that ever ran; a row's id is its number."""

    def __init__(self, model: CausalLM, most_rows: int = 4096) -> None:
        config = model.config
        self._model = model
        shape = (config.num_layers, 2, most_rows, config.num_kv_heads, config.head_dim)
        self._kv = torch.zeros(shape)
        self.num_rows = 0

    @torch.inference_mode()
    def run(self, tokens: list[int], positions: list[int], sees: list[list[int]]) -> torch.Tensor:
        """Rows with the ids num_rows, num_rows + 1, ...; sees: ids, a row's own included.

        Returns:
            [rows, vocab] logits.
        """
        attend = _Attend(self._kv, self.num_rows, sees, self._model.config.attn_scale)
        hidden = self._model(torch.tensor(tokens), torch.tensor(positions), attend)
        self.num_rows += len(tokens)
        return self._model.logits(hidden)


@dataclass
class _Attend:
    kv: torch.Tensor
    first: int
    sees: list[list[int]]
    scale: float

    def rotary(
        self, layer: int, qkv: torch.Tensor, heads: RotaryHeads, rows: StepRotary
    ) -> torch.Tensor:
        return self(layer, *heads(qkv, rows))

    def select(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        return x

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        own = slice(self.first, self.first + len(q))
        self.kv[layer, 0, own], self.kv[layer, 1, own] = k, v
        out = torch.empty_like(q)
        group = q.shape[1] // k.shape[1]
        for row, ids in enumerate(self.sees):
            keys, values = self.kv[layer][:, torch.tensor(ids)].repeat_interleave(group, 2)
            scores = torch.einsum("hd,thd->ht", q[row], keys) * self.scale
            out[row] = torch.einsum("ht,thd->hd", scores.softmax(-1), values)
        return out


@dataclass
class SequenceReference:
    """One sequence. prefix: ids of the committed rows that are still seen, oldest first; tree: id
    of the row at each place of the tree window."""

    memory: Memory
    window: int
    capacity: int
    text: list[int]
    temperature: float = 0.0
    seed: int = 0
    sample_index: int = 0
    done: int = 0
    prefix: list[int] = field(default_factory=list)
    tree: dict[int, int] = field(default_factory=dict)

    def positions_to_run(self) -> list[int]:
        """Of the pending rows: the rest of the sink, then what the window sees of the rest."""
        sink = list(range(self.done, min(SINK, len(self.text))))
        behind = range(max(self.done, SINK, len(self.text) - self.window), len(self.text))
        return sink + list(behind)

    def run_trunk(self, count: int) -> torch.Tensor | None:
        """Runs the next pending rows; scores of what may follow the text if they end it."""
        todo = self.positions_to_run()
        chosen = todo[:count]
        assert len(chosen) == count and not self.tree
        if self.done >= SINK and todo[0] > self.done:
            del self.prefix[SINK:]
        while len(self.prefix) + count > self.capacity:
            del self.prefix[SINK : 2 * SINK]
        first = self.memory.num_rows
        sees = [[*self.prefix, *range(first, first + i + 1)] for i in range(count)]
        logits = self.memory.run([self.text[p] for p in chosen], chosen, sees)
        self.prefix += range(first, first + count)
        self.done = chosen[-1] + 1
        return self.scores(logits[-1], len(self.text)) if chosen == todo else None

    def run_nodes(
        self, tokens: list[int], depths: list[int], places: list[int], ancestors: list[int]
    ) -> list[torch.Tensor]:
        """Scores of what may follow each node."""
        first = self.memory.num_rows
        self.tree.update({place: first + i for i, place in enumerate(places)})
        sees = [
            [*self.prefix, *(self.tree[place] for place in range(64) if bits >> place & 1)]
            for bits in ancestors
        ]
        positions = [len(self.text) - 1 + depth for depth in depths]
        logits = self.memory.run(tokens, positions, sees)
        return [self.scores(row, p + 1) for row, p in zip(logits, positions, strict=True)]

    def keep(self, sources: list[int], targets: list[int], num_path: int) -> None:
        """Of the tree only the sources stay."""
        moved = {to: self.tree[at] for at, to in zip(sources, targets, strict=True)}
        self.prefix += [moved.pop(place) for place in range(num_path)]
        self.tree = {place - num_path: row for place, row in moved.items()}
        self.done += num_path
        while len(self.prefix) > self.capacity:
            del self.prefix[SINK : 2 * SINK]

    def scores(self, logits: torch.Tensor, position: int) -> torch.Tensor:
        """[vocab] log-probabilities of logits, noisy ones with a temperature."""
        if self.temperature:
            key = (torch.tensor([signed_seed(self.seed)]), torch.tensor([position]))
            noise = gumbel_noise(*key, torch.tensor([self.sample_index]), len(logits))
            logits = logits / self.temperature + noise[0]
        return logits.log_softmax(-1)


def check(tokens: np.ndarray, log_probs: np.ndarray, scores: torch.Tensor, within: float) -> None:
    """One row of candidates against the scores of all tokens."""
    best = scores.sort(descending=True).values[: len(tokens)]
    np.testing.assert_allclose(log_probs, best.numpy(), atol=within, rtol=0)
    chosen = scores[torch.from_numpy(tokens.astype(np.int64))].numpy()
    np.testing.assert_allclose(log_probs, chosen, atol=within, rtol=0)
    assert len(set(tokens.tolist())) == len(tokens)
