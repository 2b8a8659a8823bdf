"""Tests a transformers class before it serves: an error is better than wrong answers.

Two short sequences run as one step with our attention in its simplest form. Every layer must call
the attention function once, with the shapes, the scale, the window and the soft cap of the
`ModelConfig`, and ask for nothing else (a mask, sinks, a bias). The logits must equal those of the
class with its own attention and one sequence at a time: this finds classes that mix tokens or count
positions in their own way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hetero_llm.core.errors import ConfigError, ModelLoadError, shown
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.configs.transformers import TransformersConfig
from hetero_llm.models.transformers_modules import ATTENTION, AttentionCall, AttentionFunction

_LENGTHS = (7, 4)
_SPREAD = 7919  # a prime: token ids far apart
_TOKENS_CHECKED = 19
# Of the logits, relative to the range of a token's; wrong attention is off by tenths.
_TOLERANCE = {torch.float32: 2e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
# Keyword arguments of attention functions: those that change no result, and those that
# `_check_request` compares with the config.
_HARMLESS = frozenset(
    {
        "dropout", "position_ids", "cache_position", "position_embeddings", "use_cache",
        "is_causal", "output_attentions", "output_hidden_states", "output_router_logits",
        "return_dict", "past_key_values", "past_key_value", "deterministic", "layer_idx",
    }
)  # fmt: skip
_CHECKED = frozenset({"scaling", "sliding_window", "softcap"})


class TriedModel(Protocol):
    """The part of `transformers_backend.TransformersForCausalLM` that a trial needs."""

    config: ModelConfig
    causal: Any

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def run(self, attention: AttentionFunction, **inputs: Any) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


def try_model(model: TriedModel) -> list[nn.Module]:
    """Runs the trial and returns the attention modules in the order of layers.

    Raises:
        ModelLoadError: The model would not compute what its class does; says why.
    """
    config = model.config
    assert isinstance(config, TransformersConfig)
    try:
        return _try(model, config)
    except (ModelLoadError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of any kind: it is the class's own code
        reason = " ".join(str(error).split())[:200]
        raise _refusal(config, f"it failed with {type(error).__name__}: {reason}") from error


@torch.inference_mode()
def _try(model: TriedModel, config: TransformersConfig) -> list[nn.Module]:
    lengths = [n for n in _LENGTHS if n <= config.max_model_len]
    device = next(model.parameters()).device
    sequences = [
        torch.arange(1, n + 1, device=device) * _SPREAD * (i + 1) % config.vocab_size
        for i, n in enumerate(lengths)
    ]
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])
    trial = _Trial(config, lengths)
    hidden = model.run(trial, input_ids=torch.cat(sequences)[None], position_ids=positions[None])
    _check_order(config, trial.modules)
    logits = model.logits(hidden)
    if logits.shape != (len(positions), config.vocab_size):
        raise _refusal(config, f"logits are {tuple(logits.shape)}, not of {config.vocab_size} ids")
    _compare(config, logits, _left_alone(model, sequences))
    return trial.modules


def _check_order(config: TransformersConfig, modules: list[nn.Module]) -> None:
    if len(modules) != config.num_layers or len({id(m) for m in modules}) != len(modules):
        raise _refusal(
            config,
            f"it attends {len(modules)} times in {len({id(m) for m in modules})} modules, where "
            f"num_hidden_layers is {config.num_layers}",
        )
    numbers = [getattr(module, "layer_idx", i) for i, module in enumerate(modules)]
    if numbers != list(range(config.num_layers)):
        raise _refusal(config, f"its layers attend in the order {shown(numbers)}")


def _left_alone(model: TriedModel, sequences: list[Tensor]) -> Tensor:
    """[T, vocab] logits of the class with its own attention, one sequence a call."""
    causal = model.causal
    causal.set_attn_implementation("eager")
    try:
        parts = [causal(input_ids=ids[None], use_cache=False).logits[0] for ids in sequences]
    finally:
        causal.set_attn_implementation(ATTENTION)
    return torch.cat(parts)


def _compare(config: TransformersConfig, ours: Tensor, theirs: Tensor) -> None:
    tolerance = _TOLERANCE[ours.dtype]
    ours, theirs = ours.float(), theirs.float()
    if not bool(ours.isfinite().all()) and bool(theirs.isfinite().all()):
        raise _refusal(config, "with our attention it gives numbers that are not finite")
    spread = (theirs - theirs.mean(-1, keepdim=True)).abs().amax(-1)
    errors = (ours - theirs).abs().amax(-1) / spread.clamp(min=1e-6)
    # The median: a router with two nearly equal experts may choose the other one for single tokens.
    error = float(errors.nanmedian())
    if error > tolerance:
        raise _refusal(
            config, f"with our attention its logits are off by {error:.2g} of their range"
        )


class _Trial:
    """Attention according to the config, each sequence by itself; checks every call.

    Attributes:
        modules: The attention modules that called, in order.
    """

    def __init__(self, config: TransformersConfig, lengths: list[int]) -> None:
        self._config = config
        self._lengths = lengths
        self.modules: list[nn.Module] = []

    def __call__(self, call: AttentionCall) -> Tensor:
        layer = len(self.modules)
        self.modules.append(call.module)
        heads = (call.query, call.key, call.value)
        if layer < self._config.num_layers:
            self._check_shapes(layer, heads)
            self._check_request(layer, call)
        parts = [
            self._attend(layer, *of_sequence)
            for of_sequence in zip(*(t[0].split(self._lengths, 1) for t in heads), strict=True)
        ]
        return torch.cat(parts, dim=1).transpose(0, 1).unsqueeze(0).contiguous()

    def _attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[heads, n, dim] of one sequence -> the same shape."""
        config = self._config
        group = config.num_heads // config.num_kv_heads
        key, value = (t.repeat_interleave(group, dim=0).float() for t in (key, value))
        scores = query.float() @ key.transpose(1, 2) * config.attn_scale
        if config.attn_softcap is not None:
            scores = config.attn_softcap * (scores / config.attn_softcap).tanh()
        rows = torch.arange(scores.shape[1], device=scores.device)
        hidden = rows > rows[:, None]
        window = config.sliding_windows[layer] if layer < config.num_layers else None
        if window is not None:
            hidden |= rows <= rows[:, None] - window
        return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value).to(query.dtype)

    def _check_shapes(self, layer: int, heads: tuple[Tensor, Tensor, Tensor]) -> None:
        config, rows = self._config, sum(self._lengths)
        for name, tensor, count in zip(
            ("queries", "keys", "values"),
            heads,
            (config.num_heads, config.num_kv_heads, config.num_kv_heads),
            strict=True,
        ):
            found, expected = tuple(tensor.shape), (1, count, rows, config.head_dim)
            if found != expected:
                raise _refusal(
                    config, f"{name} of layer {layer} are {found}, config.json says {expected}"
                )

    def _check_request(self, layer: int, call: AttentionCall) -> None:
        config, more = self._config, call.more
        if call.mask is not None:
            raise _refusal(config, f"layer {layer} attends with a mask of its own")
        if more.get("is_causal", getattr(call.module, "is_causal", True)) is False:
            raise _refusal(config, f"layer {layer} attends to what follows (is_causal is False)")
        if more.get("dropout"):
            raise _refusal(config, f"layer {layer} drops attention at random")
        for name, value in more.items():
            if name in _CHECKED or name in _HARMLESS or value is None or value is False:
                continue
            raise _refusal(config, f"layer {layer} asks its attention for {name}")
        scale = more.get("scaling")
        scale = config.head_dim**-0.5 if scale is None else float(scale)
        if abs(scale - config.attn_scale) > 1e-6 * config.attn_scale:
            raise _refusal(
                config, f"layer {layer} scales by {scale:g}, its config says {config.attn_scale:g}"
            )
        if more.get("softcap") != config.attn_softcap:
            raise _refusal(
                config,
                f"layer {layer} has a soft cap of {more.get('softcap')}, its config says "
                f"{config.attn_softcap}",
            )
        self._check_window(layer, more.get("sliding_window"))

    def _check_window(self, layer: int, window: int | None) -> None:
        promised, longest = self._config.sliding_windows[layer], self._config.max_model_len
        if min(window or longest, longest) != min(promised or longest, longest):
            raise _refusal(
                self._config,
                f"layer {layer} attends within a window of {window}, its config says {promised}",
            )


@torch.inference_mode()
def check_batch_invariance(model: TriedModel) -> None:
    """Raises ConfigError unless the model, apart from attention, computes a token alike in every
    batch."""
    config = model.config
    assert isinstance(config, TransformersConfig)
    count = min(_TOKENS_CHECKED, config.max_model_len)
    ids, positions = _some_tokens(model, count)
    together = model.logits(_run_alone(model, ids, positions))
    for row in (0, 1, count // 2, count - 1):
        part = slice(row, row + 1)
        alone = model.logits(_run_alone(model, ids[part], positions[part]))
        if not torch.equal(alone[0], together[row]):
            raise ConfigError(
                "batch_invariant",
                True,
                f"{config.class_name} of transformers computes a row differently in other batches",
            )


def trial_step(model: TriedModel, count: int) -> Callable[[], None]:
    """A function that computes the logits of `count` tokens, each of which attends only to itself.
    The caller tests whether a CUDA graph can capture it."""
    ids, positions = _some_tokens(model, count)

    def run() -> None:
        model.logits(_run_alone(model, ids, positions))

    return run


def _some_tokens(model: TriedModel, count: int) -> tuple[Tensor, Tensor]:
    """Token ids and positions, both [count]."""
    config, device = model.config, next(model.parameters()).device
    ids = torch.arange(1, count + 1, device=device) * _SPREAD % config.vocab_size
    return ids, torch.arange(count, device=device) % config.max_model_len


def _run_alone(model: TriedModel, ids: Tensor, positions: Tensor) -> Tensor:
    """Hidden states [count, hidden] of tokens that attend only to themselves."""
    group = model.config.num_heads // model.config.num_kv_heads

    def attend(call: AttentionCall) -> Tensor:
        return call.value.repeat_interleave(group, dim=1).transpose(1, 2).contiguous()

    return model.run(attend, input_ids=ids[None], position_ids=positions[None])


def _refusal(config: TransformersConfig, reason: str) -> ModelLoadError:
    return ModelLoadError(f"{config.class_name} of transformers cannot be served: {reason}")
