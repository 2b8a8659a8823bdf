"""What sentence-transformers writes into a model folder: modules.json and the files it names.

The files say how hidden states become an embedding, how long a text may be, and which prompts go
before it. Formats: https://sbert.net/docs/package_reference, versions 1 to 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from hetero_llm.core.errors import ModelLoadError, shown
from hetero_llm.models.config_reader import Reader, read_json
from hetero_llm.utils.files import read_text

MODULES = "modules.json"
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""Flags of older versions, and the names of newer ones."""
_TYPES = {"cls": "CLS", "mean": "MEAN", "lasttoken": "LAST"}
_LONGEST_JSON = 1 << 20


@dataclass(frozen=True, slots=True)
class DenseModule:
    """A layer behind the pooling: `folder` holds its weights, `activation` is "tanh" or ""."""

    folder: Path
    in_features: int
    out_features: int
    activation: str


@dataclass(frozen=True, slots=True)
class SentenceModules:
    """What the files say.

    Attributes:
        pooling: "CLS", "MEAN" or "LAST".
        normalize: the embedding is scaled to length 1.
        dense: layers between pooling and scaling.
        max_seq_length: in tokens; None if no file says it.
        lower_case: texts are lowered before they are tokenized.
        prompts: by name.
        default_prompt: the name of the prompt that every text gets; None without one.
    """

    pooling: str
    normalize: bool
    dense: tuple[DenseModule, ...] = ()
    max_seq_length: int | None = None
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None


def read_modules(folder: Path) -> SentenceModules | None:
    """Reads the files; None if the folder has no modules.json, or one without a pooling module.

    Raises:
        ModelLoadError: a file cannot be read, or asks for what is not computed.
    """
    path = folder / MODULES
    if not path.is_file():
        return None
    pooling, normalize, dense, transformer = "", False, [], folder
    kinds = [(str(entry.get("type", "")).rpartition(".")[2], entry) for entry in _entries(path)]
    if "Pooling" not in dict(kinds):
        return None
    for kind, entry in kinds:
        own = _inside(folder, path, entry.get("path", ""))
        if kind == "Transformer":
            transformer = own
        elif kind == "Pooling":
            pooling = _pooling_type(own / "config.json")
        elif kind == "Normalize":
            normalize = True
        elif kind == "Dense" and pooling and not normalize:
            dense.append(_dense(own))
        else:
            raise ModelLoadError(f"{path}: the module {shown(entry.get('type'))} is not supported")
    if transformer != folder:
        raise ModelLoadError(f"{path}: the model is in {transformer}; name that folder's own files")
    length, lower = _text_settings(folder)
    prompts, default = _prompts(folder)
    return SentenceModules(pooling, normalize, tuple(dense), length, lower, prompts, default)


def _entries(path: Path) -> list[Mapping[str, Any]]:
    import json

    try:
        entries = json.loads(read_text(path, most=_LONGEST_JSON))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: cannot be read: {error}") from error
    if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
        raise ModelLoadError(f"{path}: a list of modules is needed")
    return entries


def _inside(folder: Path, where: Path, part: Any) -> Path:
    """A module's folder, which has to be inside the model's."""
    steps = PurePosixPath(str(part))
    if steps.is_absolute() or ".." in steps.parts:
        raise ModelLoadError(f"{where}: path={shown(part)}: must be inside the model's folder")
    return folder / steps


def _pooling_type(path: Path) -> str:
    raw = read_json(path)
    modes = [name for flag, name in _MODES.items() if raw.get(flag) is True]
    if "pooling_mode" in raw:
        given = raw["pooling_mode"]
        modes = [given] if isinstance(given, str) else list(given)
    if len(modes) != 1 or modes[0] not in _TYPES:
        names = " and ".join(map(str, modes)) or "none"
        raise ModelLoadError(
            f"{path}: the pooling mode is {names}; supported is one of {', '.join(_TYPES)}"
        )
    if raw.get("include_prompt", True) is not True:
        raise ModelLoadError(f"{path}: include_prompt=false is not supported")
    return _TYPES[modes[0]]


def _dense(folder: Path) -> DenseModule:
    path = folder / "config.json"
    reader = Reader(read_json(path), str(path))
    function = str(reader.raw.get("activation_function", "")).rpartition(".")[2].lower()
    if function not in ("", "identity", "tanh"):
        raise reader.bad("activation_function", "supported are Identity and Tanh")
    sizes = reader.integer("in_features"), reader.integer("out_features")
    return DenseModule(folder, *sizes, activation="tanh" if function == "tanh" else "")


def _text_settings(folder: Path) -> tuple[int | None, bool]:
    """`max_seq_length` and `do_lower_case` of sentence_bert_config.json."""
    path = folder / "sentence_bert_config.json"
    if not path.is_file():
        return None, False
    reader = Reader(read_json(path), str(path))
    length = reader.integer("max_seq_length") if reader.raw.get("max_seq_length") else None
    return length, reader.flag("do_lower_case", False)


def _prompts(folder: Path) -> tuple[Mapping[str, str], str | None]:
    """`prompts` and `default_prompt_name` of config_sentence_transformers.json."""
    path = folder / "config_sentence_transformers.json"
    if not path.is_file():
        return {}, None
    reader = Reader(read_json(path), str(path))
    prompts = reader.raw.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(one, str) for one in prompts.values()):
        raise reader.bad("prompts", "texts by name are needed")
    default = reader.raw.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise reader.bad("default_prompt_name", "is not among the prompts")
    return prompts, default
