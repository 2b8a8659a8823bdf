"""Attention whose scores change before the softmax, or whose softmax counts one more: soft caps
(Gemma 2), ALiBi (Press et al. 2022) and sinks (gpt-oss). torch's attention takes neither soft cap
nor sinks, so the softmax is written out, in float32.

Shapes: B sequences with R tokens each, H query heads in groups of G per KV head (H = N * G), head
size D, C keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hetero_llm.models.config import ModelConfig

_SCORES_AT_ONCE = 1 << 23  # 32 MB of scores, and as many weights


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a product of query and key becomes a score.

    Attributes:
        scale: `ModelConfig.attn_scale`.
        softcap: `ModelConfig.attn_softcap`.
        slopes: ALiBi's, of each query head.
        sinks: `ModelConfig.attn_sinks`; their values come with each layer's queries.
    """

    scale: float
    softcap: float | None = None
    slopes: tuple[float, ...] | None = None
    sinks: bool = False

    @classmethod
    def of(cls, config: ModelConfig) -> Scoring:
        return cls(config.attn_scale, config.attn_softcap, config.alibi_slopes, config.attn_sinks)

    @property
    def is_plain(self) -> bool:
        """Whether there is neither soft cap nor ALiBi nor a sink."""
        return self.softcap is None and self.slopes is None and not self.sinks


@dataclass(frozen=True, slots=True)
class Reach:
    """Which keys tokens see, and from how far.

    Attributes:
        rows: [B, R] float32 positions of the tokens.
        keys: [C] float32 positions.
        sees: [R, C] bool, whether a token's path leads through the key; None: a token sees the keys
            up to its own position.
    """

    rows: torch.Tensor
    keys: torch.Tensor
    sees: torch.Tensor | None = None


class ScoredAttention:
    """Attends with one scoring on one device.

    Args:
        scores_at_once: maximum number of float32 scores in memory.
    """

    def __init__(
        self, scoring: Scoring, device: torch.device, *, scores_at_once: int = _SCORES_AT_ONCE
    ) -> None:
        self._scoring = scoring
        self._scores_at_once = scores_at_once
        self._slopes = None
        if scoring.slopes is not None:
            self._slopes = torch.tensor(scoring.slopes, dtype=torch.float32, device=device)

    def __call__(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        reach: Reach,
        window: int | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attends for some tokens at a time, so that scores take little memory.

        Args:
            q: [B, R, H, D]; either B or R is 1.
            keys, values: [B, N, C, D]; if R > 1, the last R are the tokens' own.
            window: a token sees the last `window` positions only.
            sinks: [H]; None exactly where the scoring has none.

        Returns:
            [B, R, H, D] in q's dtype.
        """
        batch, count, heads, _ = q.shape
        at_once = max(1, self._scores_at_once // (heads * keys.shape[2]))
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if count == 1:
            for low in range(0, batch, at_once):
                part = slice(low, low + at_once)
                some = Reach(reach.rows[part], reach.keys, reach.sees)
                out[part] = self.attend(q[part], keys[part], values[part], some, window, sinks)
            return out
        assert batch == 1
        keys, values = keys.float(), values.float()
        start = keys.shape[2] - count
        for low in range(0, count, at_once):
            part = slice(low, min(low + at_once, count))
            seen, sees = slice(None), None
            if reach.sees is not None:
                sees = reach.sees[part]
            else:  # positions are consecutive: keys behind the last token of the part stay out
                first = 0 if window is None else max(0, start + low + 1 - window)
                seen = slice(first, start + part.stop)
            some = Reach(reach.rows[:, part], reach.keys[seen], sees)
            out[:, part] = self.attend(
                q[:, part], keys[:, :, seen], values[:, :, seen], some, window, sinks
            )
        return out

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        reach: Reach,
        window: int | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The same in one call, whose shapes depend on those of the arguments only."""
        batch, count, heads, dim = q.shape
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        query = q.view(batch, count, kv_heads, group, dim).permute(0, 2, 3, 1, 4).float()
        query = (query * self._scoring.scale).reshape(batch, kv_heads, group * count, dim)
        scores = query @ keys.float().transpose(2, 3)
        scores = scores.view(batch, kv_heads, group, count, -1)
        if self._scoring.softcap is not None:
            scores.div_(self._scoring.softcap).tanh_().mul_(self._scoring.softcap)
        distance = reach.keys - reach.rows.unsqueeze(-1)  # [B, R, C]
        if self._slopes is not None:
            slopes = self._slopes.view(kv_heads, group, 1, 1)
            scores.addcmul_(slopes, distance[:, None, None])
        hidden = distance > 0 if reach.sees is None else ~reach.sees.expand_as(distance)
        if window is not None:
            hidden |= distance <= -window
        scores.masked_fill_(hidden[:, None, None], float("-inf"))
        assert (sinks is not None) == self._scoring.sinks
        weights = scores.softmax(-1) if sinks is None else _softmax_with_sinks(scores, sinks)
        out = (weights.flatten(2, 3) @ values.float()).view(batch, kv_heads, group, count, dim)
        return out.permute(0, 3, 1, 2, 4).reshape(batch, count, heads, dim).to(q.dtype)


def _softmax_with_sinks(scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """[B, N, G, R, C] -> the same of weights, which add up to less than 1; sinks: [N * G]."""
    own = sinks.float().view(scores.shape[1], scores.shape[2], 1, 1)
    highest = torch.maximum(scores.amax(-1, keepdim=True), own)
    weights = (scores - highest).exp_()
    return weights.div_(weights.sum(-1, keepdim=True) + (own - highest).exp_())
