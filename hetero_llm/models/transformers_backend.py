"""Decoder-only classes of transformers as `CausalLM`: the class computes, our attention attends.

The class runs on all rows of a step as one sequence, [1, T], without a cache of its own. Its
attention modules look their function up in transformers' attention interface by the name in the
config; there is ours, which hands the rows to the step's `Attend`. That one comes with the call
itself, as a keyword that the classes pass down, as in vLLM's back end for transformers
(https://docs.vllm.ai, "Transformers modeling backend"). For the name no mask function is
registered, so no mask is built.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hetero_llm.core.errors import ModelLoadError
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.configs.transformers import TransformersConfig
from hetero_llm.models.layers import Attend, CausalLM, Place
from hetero_llm.models.transformers_check import check_rows, try_model
from hetero_llm.models.transformers_modules import (
    ATTENTION,
    AttentionCall,
    Conversion,
    parameters_without_memory,
)
from hetero_llm.models.transformers_names import CheckpointNames

_KEYWORD = "hetero_llm_attend"


class TransformersForCausalLM(CausalLM):
    """See `CausalLM`.

    Attributes:
        causal: The class of transformers, with parts of it replaced (`transformers_modules`).
        auto_class: The class of transformers that finds it.
        conversion: What replaces them.
    """

    auto_class = "AutoModelForCausalLM"
    conversion: type[Conversion] = Conversion

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert isinstance(config, TransformersConfig)
        self.config = config
        self.causal = build_class(config, self.auto_class)
        names = _float32_names(self.causal)
        self.conversion(config.max_model_len, names).convert(self.causal)
        self.causal.requires_grad_(False)
        base_of(self.causal)
        self._head = _head_of(self.causal)
        self._names = CheckpointNames(self.causal)
        self._layers: dict[int, int] = {}  # by identity of the attention module

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        return self.run(
            self._calls(attend), input_ids=input_ids[None], position_ids=positions[None]
        )

    @property
    def lm_head(self) -> nn.Module:
        """Of the class."""
        return self.causal.get_output_embeddings()

    def run(self, attention: AttentionCall, **inputs: Any) -> Tensor:
        """Hidden states [T, hidden] of the class below the head.

        Args:
            attention: Called by every attention module.
            inputs: Tensors [1, T, ...] under the names that the class gives them.
        """
        made = base_of(self.causal)(**inputs, use_cache=False, **{_KEYWORD: attention})
        return made.last_hidden_state[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]

    def number_layers(self, modules: list[nn.Module]) -> None:
        """Tells which attention modules there are, in order; before that, `layer_idx` counts."""
        self._layers = {id(module): layer for layer, module in enumerate(modules)}

    def _calls(self, attend: Attend) -> AttentionCall:
        layers = self._layers

        def call(
            module: nn.Module,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            mask: Tensor | None,
            more: Mapping[str, Any],
        ) -> Tensor:
            layer = layers[id(module)] if layers else int(module.layer_idx)  # type: ignore[arg-type]
            q, k, v = (_by_rows(heads) for heads in (query, key, value))
            return attend(layer, q, k, v).unsqueeze(0)

        return call

    def finish_loading(self, *, batch_invariant: bool) -> None:
        self.number_layers(try_model(self))
        if batch_invariant:
            check_rows(self)

    def checkpoint_tensors(self) -> Mapping[str, Tensor | Place]:
        return self._names.tensors()

    def checkpoint_name(self, name: str) -> str | None:
        return self._names.ours(name)


def _by_rows(heads: Tensor) -> Tensor:
    """[1, heads, T, dim] -> [T, heads, dim], a row's heads behind one another as kernels want."""
    rows = heads[0].transpose(0, 1)
    dim = rows.shape[2]
    return rows if rows.stride()[1:] == (dim, 1) else rows.contiguous()


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **more: Any,
) -> tuple[Tensor, None]:
    """What transformers' attention modules call; shapes of `AttentionCall`."""
    attention: AttentionCall | None = more.pop(_KEYWORD, None)
    if attention is None:
        raise ModelLoadError(
            f"{type(module).__name__} of transformers does not hand a call's arguments to its "
            "attention function, so it cannot run with ours"
        )
    return attention(module, query, key, value, attention_mask, more), None


def build_class(config: TransformersConfig, auto_class: str) -> Any:
    """The class of transformers, its parameters on the meta device.

    Raises:
        ModelLoadError: It cannot be built, or its attention cannot be replaced.
    """
    import transformers
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attention_function)
    on_meta = torch.get_default_device().type == "meta"
    try:
        # Buffers are computed on the CPU first: what a constructor allocates for parameters there
        # costs nothing until it is written.
        with parameters_without_memory(), torch.device("meta" if on_meta else "cpu"):
            causal = getattr(transformers, auto_class).from_config(
                copy.deepcopy(config.source),
                dtype=torch.get_default_dtype(),
                attn_implementation=ATTENTION,
                trust_remote_code=config.trust_remote_code,
            )
    except Exception as error:  # of any kind: classes check their configs in their own ways
        if isinstance(error, KeyError) and error.args == (ATTENTION,):
            raise _own_attention(config) from error
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ModelLoadError(
            f"{config.class_name}: transformers cannot build it: {reason}"
        ) from error
    if not type(causal)._supports_attention_backend:
        raise _own_attention(config)
    return causal.eval().requires_grad_(False)


def _own_attention(config: TransformersConfig) -> ModelLoadError:
    return ModelLoadError(
        f"{config.class_name} of transformers computes attention by itself instead of through "
        "the attention interface, so it cannot run with ours"
    )


def base_of(causal: Any) -> nn.Module:
    """The part of a class below its head."""
    base = getattr(causal, causal.base_model_prefix, None)
    if not isinstance(base, nn.Module) or base is causal:
        raise ModelLoadError(f"{type(causal).__name__} of transformers has no model below its head")
    return base


class _Given(nn.Module):
    """In the place of a class's base: its result is what it is called with."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _GivenOutput:
        return _GivenOutput((inputs_embeds,))


class _GivenOutput(tuple[Tensor]):
    """A model's output, of whatever kind, with the hidden states and nothing else in it."""

    __slots__ = ()

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def _head_of(causal: Any) -> Callable[..., Any]:
    """The class's own forward from the hidden states on, whatever it does with them: all modules
    and attributes are shared, but for the base."""
    head = copy.copy(causal)
    head.__dict__["_modules"] = {**causal._modules, causal.base_model_prefix: _Given()}
    return lambda **inputs: type(causal).forward(head, **inputs)


def _float32_names(causal: Any) -> str | None:
    """Pattern of the parameters that the class keeps in float32."""
    names = set(getattr(causal, "_keep_in_fp32_modules_strict", None) or ())
    if torch.get_default_dtype() == torch.float16:
        names |= set(getattr(causal, "_keep_in_fp32_modules", None) or ())
    return "|".join(rf"((^|\.){re.escape(name)}($|\.))" for name in sorted(names)) or None
