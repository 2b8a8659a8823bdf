"""Any model of transformers, as `models.transformers_backend` runs it: sizes from its own config.

Nothing here imports torch; transformers is imported when a folder is read. Whether a class computes
what its config says is tested after loading (`models.transformers_check`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero_llm.core.errors import ModelLoadError, shown
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.config_reader import (
    LARGEST_SIZE,
    MOST_LAYERS,
    Reader,
    eos_and_bos,
    read_config,
    read_json,
    short_reason,
    torch_dtype,
    values_of,
)
from hetero_llm.models.registry import TRANSFORMERS

OLDEST = 5
"""Oldest major version of transformers that the back end runs with."""

_FULL, _SLIDING = "full_attention", "sliding_attention"
# Keys of configs that ask for what paged attention does not compute, and what that is.
_OTHER_ATTENTION = {
    "kv_lora_rank": "multi-head latent attention (keys and values of different sizes)",
    "cross_attention_layers": "cross attention",
    "attention_chunk_size": "attention in chunks",
    "state_size": "a state-space model",
    "ssm_state_size": "state-space layers",
    "mamba_d_state": "state-space layers",
    "conv_L_cache": "convolutions over the sequence",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig(ModelConfig):
    """See `ModelConfig`; fields that only native families use (rope, norms, biases) hold values
    without meaning.

    Attributes:
        source: The config object of transformers, never changed: each class gets a copy.
        class_name: The model's class, from `architectures`.
        trust_remote_code: The class may come from the model's folder.
    """

    source: Any
    class_name: str
    trust_remote_code: bool


def load_transformers_config(
    folder: Path,
    *,
    trust_remote_code: bool = False,
    disable_sliding_window: bool = False,
    hf_overrides: Mapping[str, Any] | None = None,
) -> TransformersConfig:
    """Reads the configuration of a model folder.

    Args:
        folder: Holds config.json and maybe generation_config.json.
        trust_remote_code: Code in the folder, or where its `auto_map` points, may run.
        disable_sliding_window, hf_overrides: See `load_model_config`.

    Raises:
        ModelLoadError: A file cannot be read, transformers has no such class, or its attention is
            of another kind than ours.
    """
    reader = read_config(folder, hf_overrides)
    name = _class_name(reader)
    if reader.raw.get("quantization_config"):
        raise reader.bad("quantization_config", f"not supported with {name}")
    source = _source(Path(folder), reader, name, trust_remote_code)
    with values_of(Path(reader.where)):
        fields = model_fields(reader, name, source, disable_sliding_window=disable_sliding_window)
    return TransformersConfig(**fields, trust_remote_code=trust_remote_code)


def model_fields(
    reader: Reader, name: str, source: Any, *, disable_sliding_window: bool
) -> dict[str, Any]:
    """The fields of `TransformersConfig` but the last; arguments as above, `source` is the config
    object of the class `name`."""
    path = Path(reader.where)
    text = source.get_text_config()
    _refuse_other_kinds(reader, name, source, text)
    heads, hidden = _size(text, "num_attention_heads", name), _size(text, "hidden_size", name)
    layers = _size(text, "num_hidden_layers", name, most=MOST_LAYERS)
    head_dim = _value(text, "head_dim", name) or hidden // heads
    kv_heads = _value(text, "num_key_value_heads", name)
    if kv_heads is None:
        kv_heads = 1 if getattr(text, "multi_query", False) else heads
    for key, value in (("head_dim", head_dim), ("num_key_value_heads", kv_heads)):
        if not isinstance(value, int):
            raise ModelLoadError(f"{path}: {key}={shown(value)}: other sizes in other layers")
    longest = _context(text, name)
    if not 1 <= longest <= LARGEST_SIZE:
        raise ModelLoadError(f"{path}: a context of {longest} tokens with rope scaling")
    windows = _windows(text, layers, name)
    if disable_sliding_window:
        longest = min([longest, *(w for w in windows if w is not None)])
        windows = (None,) * layers
    vocab_size = _size(text, "vocab_size", name)
    eos, bos = _token_ids(path.parent, source, text, vocab_size)
    return dict(
        architecture=TRANSFORMERS,
        model_type=str(getattr(source, "model_type", "")),
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=_intermediate_size(text, hidden),
        max_model_len=longest,
        max_position_embeddings=longest,
        torch_dtype=_dtype(reader),
        norm_eps=0.0,
        tie_word_embeddings=bool(getattr(text, "tie_word_embeddings", False)),
        rope=None,
        hidden_act="",
        sliding_windows=windows,
        attn_scale=_scale(text, head_dim),
        eos_token_ids=eos,
        bos_token_id=bos,
        word_embed_size=hidden,
        attn_softcap=getattr(text, "attn_logit_softcapping", None),
        source=source,
        class_name=name,
    )


def _class_name(reader: Reader) -> str:
    names = reader.class_names()
    if names:
        return names[0]
    raise reader.bad("architectures", "the name of the model's class is needed")


def _source(folder: Path, reader: Reader, name: str, trust_remote_code: bool) -> Any:
    """The config object; raises ModelLoadError unless transformers may build the class."""
    check_version(folder, name)
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    auto_map = reader.raw.get("auto_map") or {}
    model_type = reader.raw.get("model_type")
    known = model_type in CONFIG_MAPPING
    remote = "AutoModelForCausalLM" in auto_map
    named = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(model_type), ())
    classes = (named,) if isinstance(named, str) else tuple(named)
    if not trust_remote_code and auto_map and name not in classes:
        raise reader.bad(
            "auto_map",
            f"{name} is code that comes with the model; it runs only with trust_remote_code=True "
            "(--trust-remote-code)",
        )
    if not known and not auto_map:
        raise reader.bad("model_type", f"transformers {transformers.__version__} knows no such one")
    if name not in classes and not (trust_remote_code and remote):
        has = f"; its causal language model is {', '.join(classes)}" if classes else ""
        raise reader.bad("architectures", f"no decoder-only model of transformers{has}")
    return load_source(reader, trust_remote_code=trust_remote_code)


def check_version(where: Path | str, name: str) -> None:
    """Raises ModelLoadError if the installed transformers is older than `OLDEST`."""
    import transformers

    if int(transformers.__version__.partition(".")[0]) < OLDEST:
        raise ModelLoadError(
            f"{where}: {name} runs through transformers, version {OLDEST} or later; installed is "
            f"{transformers.__version__}"
        )


def load_source(reader: Reader, *, trust_remote_code: bool = False) -> Any:
    """transformers' config object of the folder whose config.json `reader` has read."""
    import transformers

    try:
        if reader.changed:
            return _changed_source(reader)
        return transformers.AutoConfig.from_pretrained(
            Path(reader.where).parent, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # of any kind: classes check their keys in their own ways
        reason = short_reason(error)
        raise ModelLoadError(f"{reader.where}: transformers cannot read it: {reason}") from error


def _changed_source(reader: Reader) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = str(reader.raw.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise ValueError(f"hf_overrides needs a class of transformers' own, not {shown(kind)}")
    return CONFIG_MAPPING[kind].from_dict(dict(reader.raw))


def _refuse_other_kinds(reader: Reader, name: str, source: Any, text: Any) -> None:
    if getattr(source, "is_encoder_decoder", False):
        raise reader.bad("architectures", f"{name} is an encoder with a decoder, not supported")
    if getattr(text, "add_cross_attention", False):
        raise reader.bad("add_cross_attention", f"{name} has cross attention, not supported")
    for key, what in _OTHER_ATTENTION.items():
        if getattr(text, key, None):
            raise ModelLoadError(f"{reader.where}: {key}: {name} has {what}, not supported")


def _value(text: Any, key: str, name: str) -> Any:
    """None where the config has no such key."""
    try:
        return getattr(text, key, None)
    except RuntimeError as error:  # some configs hold sizes by layer, and refuse to name one
        raise ModelLoadError(f"{name}: {key}: other sizes in other layers") from error


def _size(text: Any, key: str, name: str, *, most: int = LARGEST_SIZE) -> int:
    value = _value(text, key, name)
    if not isinstance(value, int) or not 1 <= value <= most:
        raise ModelLoadError(f"{name}: {key}={shown(value)}: an integer from 1 to {most} is needed")
    return value


def _intermediate_size(text: Any, hidden: int) -> int:
    """Used to estimate step times only; four times the hidden size if a config has no such key."""
    for key in ("intermediate_size", "ffn_dim", "n_inner"):
        value = _value(text, key, "")
        if isinstance(value, int):
            return value
    return 4 * hidden


def _windows(text: Any, layers: int, name: str) -> tuple[int | None, ...]:
    window = getattr(text, "sliding_window", None)
    if getattr(text, "use_sliding_window", True) is False:
        window = None
    types = getattr(text, "layer_types", None)
    if types is None:
        return (window,) * layers
    for entry in types:
        if entry not in (_FULL, _SLIDING):
            raise ModelLoadError(f"{name}: layer_types: {shown(entry)} is not supported")
        if entry == _SLIDING and window is None:
            raise ModelLoadError(f"{name}: layer_types: {_SLIDING} needs a sliding_window")
    return tuple(window if entry == _SLIDING else None for entry in types[:layers])


def _scale(text: Any, head_dim: int) -> float:
    multiplier = getattr(text, "attention_multiplier", None)  # Granite
    if multiplier is not None:
        return float(multiplier)
    return float((getattr(text, "query_pre_attn_scalar", None) or head_dim) ** -0.5)  # Gemma


def _context(text: Any, name: str) -> int:
    """Context length in tokens, scaled like `rope_config.scaled_max_position`."""
    longest = _size(text, "max_position_embeddings", name)
    rope = getattr(text, "rope_parameters", None) or {}
    kind, factor = rope.get("rope_type"), rope.get("factor")
    if kind in ("linear", "dynamic") and factor:
        return int(longest * factor)
    original = rope.get("original_max_position_embeddings")
    if kind == "yarn" and factor and original:
        return int(original * factor)
    return longest


def _dtype(reader: Reader) -> str:
    text = reader.raw.get("text_config")
    stated = any(reader.raw.get(key) is not None for key in ("dtype", "torch_dtype"))
    return torch_dtype(
        Reader(text, reader.where) if isinstance(text, dict) and not stated else reader
    )


def _token_ids(
    folder: Path, source: Any, text: Any, vocab_size: int
) -> tuple[tuple[int, ...], int | None]:
    own = {
        key: value
        for key in ("eos_token_id", "bos_token_id")
        if (value := getattr(source, key, None) or getattr(text, key, None)) is not None
    }
    path = folder / "generation_config.json"
    generation = read_json(path) if path.exists() else {}
    config = Reader(own, str(folder / "config.json"))
    return eos_and_bos(config, Reader(generation, str(path)), vocab_size)
