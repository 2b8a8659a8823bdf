"""Reads adapter_config.json as PEFT 0.4 to 0.18 write it (https://github.com/huggingface/peft).

An option that would change the result and is not served is an error with its name and value. So is
an unknown option that is set: ignoring it might give other tokens than PEFT does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero_llm.core.errors import AdapterError, ModelLoadError
from hetero_llm.models.config_reader import read_json

FILE = "adapter_config.json"
_MOST_BYTES = 16 << 20
_ALL_LINEAR = "all-linear"

_WITHOUT_EFFECT = frozenset({
    "arrow_config", "auto_mapping", "base_model_name_or_path", "corda_config",
    "ensure_weight_tying", "eva_config", "fan_in_fan_out", "inference_mode", "layers_pattern",
    "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core",
    "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
})  # fmt: skip
"""Options of training, of files, or read together with another one."""
_READ = frozenset({
    "alpha_pattern", "bias", "exclude_modules", "init_lora_weights", "lora_alpha", "peft_type", "r",
    "rank_pattern", "target_modules", "target_parameters", "use_rslora",
})  # fmt: skip
_NOT_YET = {
    "alora_invocation_tokens": "an adapter that a token switches on",
    "layer_replication": "a model with repeated layers",
    "lora_bias": "an adapter with biases",
    "megatron_config": "a layer of Megatron",
    "modules_to_save": "a module that was trained as a whole",
    "trainable_token_indices": "embeddings of single tokens",
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
}
_END, _LAYER = r"(.*\.)?({})", r".*\.{}\.(\d+)\."
"""Regular expressions around those of the options."""
_CHANGES_BASE = ("corda", "loftq", "olora", "pissa")
"""Beginnings of `init_lora_weights` under which PEFT takes the adapter off the base's weights."""


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """How an adapter was made.

    Attributes:
        rank: `r`, of the modules that `rank_pattern` does not name.
        alpha: `lora_alpha`, likewise.
        rank_pattern, alpha_pattern: by regular expression for the end of a module's name.
        rank_stabilized: the scale is alpha / sqrt(rank) ("A Rank Stabilization Scaling Factor for
            Fine-Tuning with LoRA", Kalajdzievski 2023), else alpha / rank.
        target_modules: ends of names, a regular expression for the whole name, or "all-linear".
        exclude_modules: ends of names or a regular expression; empty: none.
        layers: numbers of the layers that have the adapter; None: all.
        layers_pattern: names of the list of layers; empty: any.
        target_parameters: ends of names of parameters, those that hold all experts' matrices.
    """

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    rank_stabilized: bool
    target_modules: str | tuple[str, ...]
    exclude_modules: str | tuple[str, ...]
    layers: frozenset[int] | None
    layers_pattern: tuple[str, ...]
    target_parameters: tuple[str, ...] = ()

    def rank_of(self, module: str) -> int:
        return _of_pattern(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """What multiplies B A of a module."""
        rank = self.rank_of(module)
        alpha = _of_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)

    def names_all(self) -> bool:
        """Whether the targets are all linear layers, which PEFT finds in the model's class."""
        return self.target_modules == _ALL_LINEAR

    def names_parameter(self, parameter: str) -> bool:
        """Whether PEFT gives an adapter to a parameter of this name."""
        return _matches(self.target_parameters, parameter)

    def targets(self, module: str) -> bool:
        """Whether PEFT gives an adapter to a linear layer of this name."""
        if _matches(self.exclude_modules, module):
            return False
        if self.names_all():
            return True
        if not _matches(self.target_modules, module):
            return False
        if self.layers is None or isinstance(self.target_modules, str):
            return True
        patterns = self.layers_pattern or (r"[^.]*",)
        for pattern in patterns:
            found = re.match(_LAYER.format(pattern), module)
            if found:
                return int(found.groups()[-1]) in self.layers
        return False


def _of_pattern(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first key that matches the end of a name, as `get_pattern_key` of PEFT."""
    for key, value in pattern.items():
        if re.fullmatch(_END.format(key), module):
            return value
    return default


def _matches(wanted: str | tuple[str, ...], module: str) -> bool:
    if isinstance(wanted, str):
        return bool(wanted) and re.fullmatch(wanted, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in wanted)


def read_peft_config(folder: Path) -> PeftConfig:
    """Reads adapter_config.json of a folder.

    Raises:
        AdapterError: the file is missing or damaged, or an option is not served; names it.
    """
    return _Options(folder / FILE, read_options(folder, field="lora_path")).config()


def read_options(folder: Path, *, field: str) -> Mapping[str, Any]:
    """What adapter_config.json of a folder says.

    Args:
        field: of the request that has the folder, for errors.

    Raises:
        AdapterError: the file is missing or damaged.
    """
    try:
        return read_json(folder / FILE, most=_MOST_BYTES)
    except ModelLoadError as error:
        raise AdapterError(field, str(folder), str(error)) from error


def check_known(path: Path, raw: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises AdapterError: an option of this file is set and is not among the known ones."""
    for name, value in raw.items():
        if value and name not in known:
            reason = f"is unknown here and might change the result ({path})"
            raise AdapterError(name, value, reason)


class _Options:
    """The options of one file, checked one by one."""

    def __init__(self, path: Path, raw: Mapping[str, Any]) -> None:
        self._path = path
        self._raw = raw

    def config(self) -> PeftConfig:
        if self._raw.get("peft_type") != "LORA":
            self._refuse("peft_type", "only LORA is served")
        for name, feature in _NOT_YET.items():
            if self._raw.get(name):
                self._refuse(name, f"{feature} is not available yet")
        if self._raw.get("bias", "none") != "none":
            self._refuse("bias", "an adapter with biases is not available yet")
        check_known(self._path, self._raw, _READ | _WITHOUT_EFFECT)
        start = self._raw.get("init_lora_weights", True)
        if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
            reason = (
                "changes the weights of the base; save the adapter with "
                "path_initial_model_for_weight_conversion"
            )
            self._refuse("init_lora_weights", reason)
        parameters = self._parameters()
        return PeftConfig(
            rank=self._rank("r", self._raw.get("r", 8)),
            alpha=self._alpha("lora_alpha", self._raw.get("lora_alpha", 8)),
            rank_pattern={k: self._rank(f"rank_pattern.{k}", v) for k, v in self._pattern("rank")},
            alpha_pattern={
                k: self._alpha(f"alpha_pattern.{k}", v) for k, v in self._pattern("alpha")
            },
            rank_stabilized=self._flag("use_rslora"),
            target_modules=self._modules("target_modules", required=not parameters),
            exclude_modules=self._modules("exclude_modules", required=False),
            layers=self._layers(),
            layers_pattern=self._layers_pattern(),
            target_parameters=parameters,
        )

    def _refuse(self, name: str, reason: str, value: Any = None) -> None:
        value = self._raw.get(name) if value is None else value
        raise AdapterError(name, value, f"{reason} ({self._path})")

    def _rank(self, name: str, value: Any) -> int:
        if type(value) is not int or value < 1:
            self._refuse(name, "must be an integer of at least 1", value)
        return int(value)

    def _alpha(self, name: str, value: Any) -> float:
        if type(value) not in (int, float) or not math.isfinite(value):
            self._refuse(name, "must be a number", value)
        return float(value)

    def _flag(self, name: str) -> bool:
        value = self._raw.get(name, False)
        if value is not None and not isinstance(value, bool):
            self._refuse(name, "must be true or false")
        return bool(value)

    def _pattern(self, kind: str) -> Iterable[tuple[str, Any]]:
        name = f"{kind}_pattern"
        value = self._raw.get(name) or {}
        if not isinstance(value, dict):
            self._refuse(name, "must be an object")
        for key in value:
            self._compiles(name, key, _END)
        return list(value.items())

    def _compiles(self, name: str, pattern: str, around: str = "{}") -> None:
        try:
            re.compile(around.format(pattern))
        except re.error as error:
            self._refuse(name, f"is no regular expression: {error}", pattern)

    def _modules(self, name: str, *, required: bool) -> str | tuple[str, ...]:
        value = self._raw.get(name)
        if not value and not required:
            return ()
        if isinstance(value, str) and value:
            if value.lower() == _ALL_LINEAR:
                return _ALL_LINEAR
            self._compiles(name, value)
            return value
        if not _is_list_of(value, str) or not value:
            self._refuse(name, "must be a list of names, a regular expression or all-linear")
        return tuple(value or ())

    def _parameters(self) -> tuple[str, ...]:
        value = self._raw.get("target_parameters") or ()
        if not _is_list_of(value, str):
            self._refuse("target_parameters", "must be a list of names")
        return tuple(value)

    def _layers(self) -> frozenset[int] | None:
        value = self._raw.get("layers_to_transform")
        if value is None:
            return None
        if type(value) is int:
            value = [value]
        if not _is_list_of(value, int):
            self._refuse("layers_to_transform", "must be the numbers of layers")
        return frozenset(value)

    def _layers_pattern(self) -> tuple[str, ...]:
        value = self._raw.get("layers_pattern") or ()
        if isinstance(value, str):
            value = (value,)
        if not _is_list_of(value, str):
            self._refuse("layers_pattern", "must be a name or a list of names")
        for pattern in value:
            self._compiles("layers_pattern", pattern, _LAYER)
        return tuple(value)


def _is_list_of(value: Any, kind: type) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return is_list and all(type(item) is kind for item in value)
