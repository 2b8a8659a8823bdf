"""A decoder without its language model's head: hidden states, or a few classes instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from hetero_llm.models.blocks import DecoderLM
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.layers import Attend, CausalLM, Linear, RearrangedView
from hetero_llm.models.registry import model_class

_SCORE = "score.weight"


class HeadlessLM(CausalLM):
    """A decoder of `hetero_llm.models` that returns hidden states.

    Checkpoints may name their tensors as those of a causal model, of its base without the prefix
    (`Qwen3Model`), or of a classifier (`Qwen3ForSequenceClassification`).

    Args:
        config: Of the causal model.
        num_classes: Of the classifier that the checkpoint has; 0: it is not used.
        keeps_head: The head stays until `classify_by_tokens`.
    """

    def __init__(
        self, config: ModelConfig, *, num_classes: int = 0, keeps_head: bool = False
    ) -> None:
        super().__init__()
        self.config = config
        causal = model_class(config.architecture)(config)
        assert isinstance(causal, DecoderLM)
        causal.requires_grad_(False)  # views of parameters that need gradients cannot be filled
        self.decoder = causal
        self._tensors: dict[str, Tensor | RearrangedView] = dict(causal.checkpoint_tensors())
        self._head = f"{causal.names.head}."
        self._prefix = f"{causal.names.model}."
        self.score: Linear | None = None
        if num_classes:
            self.score = Linear(config.hidden_size, num_classes, bias=False).requires_grad_(False)
            self._tensors[_SCORE] = self.score.weight
        if not keeps_head:
            self._tensors = {
                name: view
                for name, view in self._tensors.items()
                if not name.startswith(self._head)
            }
            self._drop_head()
        self._keeps_head = keeps_head

    def _drop_head(self) -> None:
        del self.decoder.lm_head
        self.decoder.add_module("lm_head", _NoHead())

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        return self.decoder(input_ids, positions, attend)

    def classes(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, classes], in the parameters' dtype; the hidden states themselves
        without a classifier."""
        return hidden if self.score is None else self.score(hidden)

    def classify_by_tokens(self, token_ids: Sequence[int], *, two_way: bool) -> None:
        """Makes the classifier of the head's rows for these tokens, and drops the head.

        Args:
            two_way: One class, the second token's logit less the first one's.
        """
        head = self.decoder.lm_head
        assert isinstance(head, Linear)
        rows = head.weight.detach()[list(token_ids)].float()
        bias = None if head.bias is None else head.bias.detach()[list(token_ids)].float()
        if two_way:
            rows = rows[1:] - rows[:1]
            bias = None if bias is None else bias[1:] - bias[:1]
        with torch.device(rows.device):
            score = Linear(rows.shape[1], len(rows), bias=bias is not None)
        score.weight = nn.Parameter(rows.to(head.weight.dtype), requires_grad=False)
        if bias is not None:
            score.bias = nn.Parameter(bias.to(head.weight.dtype), requires_grad=False)
        self.score = score
        self._drop_head()

    def checkpoint_tensors(self) -> Mapping[str, Tensor | RearrangedView]:
        return self._tensors

    def checkpoint_name(self, name: str) -> str | None:
        for known in (name, self._prefix + name):
            if known in self._tensors:
                return known
        if name.startswith(self._head) or name == _SCORE:
            return None
        return self.decoder.checkpoint_name(name)

    def finish_loading(self, *, batch_invariant: bool) -> None:
        self.decoder.finish_loading(batch_invariant=batch_invariant)


class _NoHead(nn.Module):
    """In the place of a head that is not computed."""
