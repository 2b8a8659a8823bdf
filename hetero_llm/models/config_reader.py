"""Typed access to config.json and generation_config.json for the readers of `models.configs`."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero_llm.core.errors import HeteroLLMError, ModelLoadError, shown
from hetero_llm.models.gguf.config import read_gguf_config
from hetero_llm.models.gguf.container import is_gguf
from hetero_llm.models.rope_config import RopeConfig, is_number, parse_rope
from hetero_llm.utils.files import MIB, read_text

logger = logging.getLogger(__name__)

_DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS = ("silu", "relu", "relu2", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")
"""Names that `layers.Activation` computes."""
LARGEST_SIZE = 2**31 - 1
"""Sizes, positions and token ids are int32 in kernels."""
MOST_HEADS = 1 << 16
MOST_LAYERS = 10_000
_MOST_TOKEN_IDS = 1000
_MOST_JSON = 16 * MIB  # some carry the names of 100,000 labels

_ROPE_BASE = ("rope_theta", "partial_rotary_factor")
"""Keys of `rope_parameters` that say nothing about scaling."""


@dataclass(frozen=True, slots=True)
class Reader:
    """Typed access to one JSON object; `where` names the file in messages, `changed` says that a
    user's overrides are in `raw`."""

    raw: Mapping[str, Any]
    where: str
    changed: bool = False

    def bad(self, key: str, reason: str) -> ModelLoadError:
        return ModelLoadError(f"{self.where}: {key}={shown(self.raw.get(key))}: {reason}")

    def integer(self, key: str, default: int | None = None, *, most: int = LARGEST_SIZE) -> int:
        """An integer from 1 to `most`; required without a default, null counts as absent."""
        value = self.raw.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelLoadError(f"{self.where}: the key {key!r} is missing")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.bad(key, "a positive integer is needed")
        if value > most:
            raise self.bad(key, f"at most {most} is possible")
        return value

    def layers(self, key: str) -> int:
        """A number of layers: readers make an entry for each."""
        return self.integer(key, most=MOST_LAYERS)

    def number(self, key: str, default: float) -> float:
        value = self.raw.get(key, default)
        if not is_number(value):
            raise self.bad(key, "a number above 0 is needed, from 1e-30 to 1e30")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.bad(key, "true or false is needed")
        return value

    def activation(self, key: str, default: str) -> str:
        value = self.raw.get(key) or default
        if value not in ACTIVATIONS:
            raise self.bad(key, "supported are " + ", ".join(ACTIVATIONS))
        return value

    def class_names(self) -> tuple[str, ...]:
        """`architectures`; empty without the key."""
        names = self.raw.get("architectures")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            return ()
        return tuple(names)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """An id, a list of ids or null."""
        value = self.raw.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
            raise self.bad(key, "a token id or a list of token ids is needed")
        if len(ids) > _MOST_TOKEN_IDS or max(ids, default=0) > LARGEST_SIZE:
            raise self.bad(key, f"at most {_MOST_TOKEN_IDS} ids up to {LARGEST_SIZE} are possible")
        return tuple(ids)


def short_reason(error: Exception, most: int = 200) -> str:
    """The error's text in one line of at most `most` characters, or else its type."""
    return " ".join(str(error).split())[:most] or type(error).__name__


@contextmanager
def values_of(path: Path) -> Iterator[None]:
    """Reports values of a configuration file that its reader does not foresee, such as those whose
    product or quotient is no number, as a `ModelLoadError` with the file's path."""
    try:
        yield
    except HeteroLLMError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {short_reason(error)}"
        raise ModelLoadError(f"{path}: holds a value that cannot be used: {reason}") from error


def read_json(path: Path, *, most: int = _MOST_JSON) -> Mapping[str, Any]:
    """The object in a JSON file of at most `most` bytes.

    Raises:
        ModelLoadError: There is no such file, or it is no regular one, too large, or not JSON.
    """
    try:
        text = read_text(path, most=most)
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path}: no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path}: cannot be read: {error}") from error
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ModelLoadError(f"{path}: not usable JSON: it is nested too deeply") from error
    except ValueError as error:  # of its form, or an integer of more than 4,300 digits
        raise ModelLoadError(f"{path}: not valid JSON: {short_reason(error)}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: a JSON object is needed, not {shown(value)}")
    return value


def read_config(folder: Path, overrides: Mapping[str, Any] | None = None) -> Reader:
    """config.json of a folder, or what that of a GGUF file would say, with the user's
    `hf_overrides`."""
    path = Path(folder)
    if is_gguf(path):
        raw: Mapping[str, Any] = read_gguf_config(path)
    else:
        path /= "config.json"
        raw = read_json(path)
    if not overrides:
        return Reader(raw, str(path))
    return Reader(_overridden(raw, overrides), str(path), True)


def _overridden(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`raw` with the overrides. One that names a key as transformers 4 or 5 does changes the file
    that spells it as the other."""
    changed = merged(raw, overrides)
    for named, other in (("dtype", "torch_dtype"), ("torch_dtype", "dtype")):
        if named in overrides and other in changed and other not in overrides:
            changed[other] = overrides[named]
    rope = changed.get("rope_parameters")
    if isinstance(rope, Mapping) and "rope_parameters" not in overrides:
        changed["rope_parameters"] = _with_old_names(rope, overrides)
    return changed


def _with_old_names(rope: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
    """`rope_parameters` with the overrides of `rope_scaling` and `rope_theta`."""
    nested = {name: value for name, value in rope.items() if isinstance(value, Mapping)}
    if nested:  # one for each type of layers
        return {**rope, **{name: _with_old_names(one, overrides) for name, one in nested.items()}}
    changed = dict(rope)
    if "rope_scaling" in overrides:
        scaling = overrides["rope_scaling"]
        if scaling is None:
            changed = {name: rope[name] for name in _ROPE_BASE if name in rope}
        elif not isinstance(scaling, Mapping):
            return scaling
        else:
            if "type" in scaling:  # the older name of rope_type
                changed.pop("rope_type", None)
            changed = merged(changed, scaling)
    if "rope_theta" in overrides:
        changed["rope_theta"] = overrides["rope_theta"]
    return changed


def merged(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `raw` with the overrides; where both have a mapping, it is merged likewise."""
    changed = dict(raw)
    for key, value in overrides.items():
        old = changed.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = merged(old, value)
        changed[key] = value
    return changed


def torch_dtype(reader: Reader) -> str:
    """transformers 5 writes `dtype`, older versions `torch_dtype`; absent means float32."""
    key = "dtype" if reader.raw.get("dtype") is not None else "torch_dtype"
    value = reader.raw.get(key)
    name = "float32" if value is None else str(value).removeprefix("torch.")
    if name not in _DTYPES:
        raise reader.bad(key, "supported are " + ", ".join(_DTYPES))
    return name


def eos_and_bos(
    reader: Reader, generation: Reader, vocab_size: int
) -> tuple[tuple[int, ...], int | None]:
    """`eos_token_ids` and `bos_token_id` of `ModelConfig`. Ids beyond the vocabulary, which no step
    can sample, are left out and logged."""

    def ids(key: str) -> tuple[int, ...]:
        found = []
        for source in (reader, generation):
            for token in source.token_ids(key):
                if token < vocab_size:
                    found.append(token)
                else:
                    logger.warning(
                        "%s: %s=%d is beyond the vocabulary of %d tokens and left out",
                        *(source.where, key, token, vocab_size),
                    )
        return tuple(dict.fromkeys(found))

    bos = ids("bos_token_id")
    return ids("eos_token_id"), bos[0] if bos else None


def heads_of(reader: Reader, heads_key: str, hidden_key: str) -> tuple[int, int, int]:
    """hidden_size, number of heads and their quotient (0 if it is none)."""
    hidden, heads = reader.integer(hidden_key), reader.integer(heads_key, most=MOST_HEADS)
    return hidden, heads, 0 if hidden % heads else hidden // heads


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """Input of a reader of `models.configs`: both files and the user's changes.

    Attributes:
        config, generation: config.json; generation_config.json, empty if there is none.
        architecture: The supported entry of `architectures`.
        rope_scaling, rope_theta, disable_sliding_window: See `load_model_config`.
    """

    config: Reader
    generation: Reader
    architecture: str
    rope_scaling: Mapping[str, Any] | None = None
    rope_theta: float | None = None
    disable_sliding_window: bool = False

    def refuse(self, *keys: str) -> None:
        """Raises ModelLoadError if a key is set: what it asks for is not computed."""
        for key in keys:
            if self.config.raw.get(key) not in (None, False, [], {}):
                raise self.config.bad(key, f"not supported with {self.architecture}")

    def rope(self, head_dim: int, max_position: int, *, rotary_factor: float = 1.0) -> RopeConfig:
        """The rotary embedding; `rotary_factor`: share of each head that the family rotates if
        neither the file nor the user states one."""
        return parse_rope(
            self.config.raw,
            where=self.config.where,
            head_dim=head_dim,
            max_position=max_position,
            rope_scaling=self.rope_scaling,
            rope_theta=self.rope_theta,
            rotary_factor=rotary_factor,
        )

    def served_windows(
        self, windows: tuple[int | None, ...], max_model_len: int
    ) -> tuple[tuple[int | None, ...], int]:
        """Windows and context length that are served: see `disable_sliding_window`."""
        if not self.disable_sliding_window:
            return windows, max_model_len
        shortest = min([max_model_len, *(w for w in windows if w is not None)])
        return (None,) * len(windows), shortest
