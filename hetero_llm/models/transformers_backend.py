"""Decoder-only classes of transformers as `CausalLM`: the class computes everything but attention.

The class gets all tokens of a step as one sequence, [1, T], and has no cache of its own. Its
attention modules look up their function by name in transformers' attention interface, where
`attention_function` is registered; it calls the step's `Attend`, which the classes pass down as a
keyword, as in vLLM's back end for transformers (https://docs.vllm.ai, "Transformers modeling
backend"). No mask function is registered for the name, so transformers builds no mask.
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
from hetero_llm.models.config_reader import short_reason
from hetero_llm.models.configs.transformers import TransformersConfig
from hetero_llm.models.layers import Attend, CausalLM, RearrangedView
from hetero_llm.models.transformers_check import check_batch_invariance, try_model
from hetero_llm.models.transformers_modules import (
    ATTENTION,
    AttentionCall,
    AttentionFunction,
    Conversion,
    parameters_without_memory,
)
from hetero_llm.models.transformers_names import CheckpointNames

_KEYWORD = "hetero_llm_attend"


class TransformersForCausalLM(CausalLM):
    """See `CausalLM`.

    Attributes:
        causal: The model of transformers, with parts replaced (`transformers_modules`).
        auto_class: The auto class of transformers that builds it.
        conversion: Replaces the parts.
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
            self._attention(attend), input_ids=input_ids[None], position_ids=positions[None]
        )

    @property
    def lm_head(self) -> nn.Module:
        """Of the class."""
        return self.causal.get_output_embeddings()

    def head_modules(self) -> tuple[nn.Module, ...]:
        below = {id(module) for module in base_of(self.causal).modules()}
        return tuple(
            module
            for module in self.causal.modules()
            if id(module) not in below and module is not self.causal
        )

    def input_embedding(self) -> nn.Module:
        found: nn.Module = self.causal.get_input_embeddings()
        return found

    def run(self, attention: AttentionFunction, **inputs: Any) -> Tensor:
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
        """Sets the order of the attention modules; until then their `layer_idx` is used."""
        self._layers = {id(module): layer for layer, module in enumerate(modules)}

    def _attention(self, attend: Attend) -> AttentionFunction:
        layers = self._layers

        def attention(call: AttentionCall) -> Tensor:
            layer = layers[id(call.module)] if layers else int(call.module.layer_idx)  # type: ignore[arg-type]
            q, k, v = (_by_tokens(heads) for heads in (call.query, call.key, call.value))
            return attend(layer, q, k, v).unsqueeze(0)

        return attention

    def finish_loading(self, *, batch_invariant: bool) -> None:
        self.number_layers(try_model(self))
        if batch_invariant:
            check_batch_invariance(self)

    def checkpoint_tensors(self) -> Mapping[str, Tensor | RearrangedView]:
        return self._names.tensors()

    def checkpoint_name(self, name: str) -> str | None:
        return self._names.ours(name)


def _by_tokens(heads: Tensor) -> Tensor:
    """[1, heads, T, dim] -> [T, heads, dim], a token's heads contiguous as kernels need them."""
    tokens = heads[0].transpose(0, 1)
    dim = tokens.shape[2]
    return tokens if tokens.stride()[1:] == (dim, 1) else tokens.contiguous()


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **more: Any,
) -> tuple[Tensor, None]:
    """What transformers' attention modules call; shapes of `AttentionCall`."""
    attention: AttentionFunction | None = more.pop(_KEYWORD, None)
    if attention is None:
        raise ModelLoadError(
            f"{type(module).__name__} of transformers does not hand a call's arguments to its "
            "attention function, so it cannot run with ours"
        )
    call = AttentionCall(module, query, key, value, attention_mask, more)
    return attention(call), None


def build_class(config: TransformersConfig, auto_class: str) -> Any:
    """Builds the model of transformers with its parameters on the meta device.

    Raises:
        ModelLoadError: transformers cannot build it, or its attention cannot be replaced.
    """
    import transformers
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attention_function)
    on_meta = torch.get_default_device().type == "meta"
    try:
        # Buffers are computed on the CPU first. Parameters that a constructor allocates there cost
        # no memory until they are written.
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
        reason = short_reason(error, 300)
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
    """The part of a model below its head."""
    base = getattr(causal, causal.base_model_prefix, None)
    if not isinstance(base, nn.Module) or base is causal:
        raise ModelLoadError(f"{type(causal).__name__} of transformers has no model below its head")
    return base


class _Given(nn.Module):
    """In the place of a model's base: returns its input."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _GivenOutput:
        return _GivenOutput((inputs_embeds,))


class _GivenOutput(tuple[Tensor]):
    """Any kind of model output: has the hidden states, and None for every other attribute."""

    __slots__ = ()

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def _head_of(causal: Any) -> Callable[..., Any]:
    """The class's own forward from the hidden states on. All modules and attributes except the base
    are shared with `causal`."""
    head = copy.copy(causal)
    head.__dict__["_modules"] = {**causal._modules, causal.base_model_prefix: _Given()}
    return lambda **inputs: type(causal).forward(head, **inputs)


def _float32_names(causal: Any) -> str | None:
    """Pattern for the names of parameters that the class keeps in float32."""
    names = set(getattr(causal, "_keep_in_fp32_modules_strict", None) or ())
    if torch.get_default_dtype() == torch.float16:
        names |= set(getattr(causal, "_keep_in_fp32_modules", None) or ())
    return "|".join(rf"((^|\.){re.escape(name)}($|\.))" for name in sorted(names)) or None
