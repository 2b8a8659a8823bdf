"""Reads the prompt adapters of PEFT: prompt tuning, and p-tuning, whose encoder has run when they
are saved. Both store one tensor, the embeddings of the virtual tokens."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from hetero_llm.core.errors import AdapterError, ModelLoadError
from hetero_llm.core.images import MOST_PROMPT_BYTES
from hetero_llm.core.prompt_adapter import VirtualPrompt
from hetero_llm.lora.files import adapter_folder, open_weights, read_tensors
from hetero_llm.lora.peft_config import FILE, check_known, read_options

_FIELD = "prompt_adapter_local_path"
_KINDS = ("PROMPT_TUNING", "P_TUNING")
_TENSOR = "prompt_embeddings"
_FLOAT = 4  # bytes of a number on its way to the model
_WITHOUT_EFFECT = frozenset({
    "auto_mapping", "base_model_name_or_path", "encoder_dropout", "encoder_hidden_size",
    "encoder_num_layers", "encoder_reparameterization_type", "inference_mode",
    "num_attention_heads", "num_layers", "peft_type", "peft_version", "prompt_tuning_init",
    "prompt_tuning_init_state_dict_path", "prompt_tuning_init_text", "revision", "task_type",
    "token_dim", "tokenizer_kwargs", "tokenizer_name_or_path",
})  # fmt: skip
"""Options of training, or checked by the shape of the tensor."""


def num_virtual_tokens(path: str, *, download_dir: str | None = None) -> int:
    """What adapter_config.json of a folder, or of a hub id, says.

    Raises:
        AdapterError: there is no such folder, or it holds no prompt adapter.
    """
    folder = adapter_folder(path, field=_FIELD, download_dir=download_dir)
    return _num_tokens(folder, _config(folder))


def read_virtual_prompt(
    path: str, *, size: int, max_tokens: int, download_dir: str | None = None
) -> VirtualPrompt:
    """Reads a prompt adapter; its configuration and shape are checked before its numbers are read.

    Args:
        path: a folder, or a hub id.
        size: of the model's embeddings.
        max_tokens: most accepted virtual tokens.

    Raises:
        AdapterError: the folder, an option or a tensor is not what the model needs; names it.
    """
    folder = adapter_folder(path, field=_FIELD, download_dir=download_dir)
    count = _num_tokens(folder, _config(folder))
    if count > max_tokens:
        reason = f"exceeds max_prompt_adapter_token ({max_tokens}) ({folder / FILE})"
        raise AdapterError("num_virtual_tokens", count, reason)
    try:
        file = open_weights(folder, field=_FIELD)
        by_name = {tensor.name: tensor for tensor in file.tensors}
        if set(by_name) != {_TENSOR}:
            wrong = next((name for name in sorted(by_name) if name != _TENSOR), _TENSOR)
            reason = "is missing" if wrong == _TENSOR else "is no part of a prompt adapter"
            raise AdapterError("tensor", wrong, f"{reason} ({file.path})")
        stored = by_name[_TENSOR]
        if not stored.is_plain:
            reason = f"has type {stored.type_name}, which is no plain float ({file.path})"
            raise AdapterError("tensor", _TENSOR, reason)
        if stored.shape != (count, size):
            reason = f"is {list(stored.shape)}, the base model and num_virtual_tokens need"
            raise AdapterError("tensor", _TENSOR, f"{reason} {[count, size]} ({file.path})")
        num_bytes = count * size * _FLOAT
        if num_bytes > MOST_PROMPT_BYTES:
            reason = f"takes {num_bytes} bytes, at most {MOST_PROMPT_BYTES} are accepted"
            raise AdapterError("num_virtual_tokens", count, f"{reason} ({file.path})")
        tensor = read_tensors(file, [stored])[_TENSOR]
    except ModelLoadError as error:
        raise AdapterError(_FIELD, path, str(error)) from error
    embeddings = np.ascontiguousarray(tensor.float().numpy())
    if not np.isfinite(embeddings).all():
        raise AdapterError("tensor", _TENSOR, f"holds a number that is not finite ({file.path})")
    about = f"{embeddings.shape};".encode()
    return VirtualPrompt(embeddings, sha256(about + embeddings.tobytes()).hexdigest())


def _config(folder: Path) -> Mapping[str, Any]:
    path, raw = folder / FILE, read_options(folder, field=_FIELD)
    if raw.get("peft_type") not in _KINDS:
        reason = f"only {' and '.join(_KINDS)} are served as prompt adapters ({path})"
        raise AdapterError("peft_type", raw.get("peft_type"), reason)
    if raw.get("num_transformer_submodules") not in (None, 1):
        reason = f"must be 1, as of a model without an encoder ({path})"
        value = raw["num_transformer_submodules"]
        raise AdapterError("num_transformer_submodules", value, reason)
    check_known(path, raw, _WITHOUT_EFFECT | {"num_virtual_tokens", "num_transformer_submodules"})
    return raw


def _num_tokens(folder: Path, raw: Mapping[str, Any]) -> int:
    count = raw.get("num_virtual_tokens")
    if type(count) is not int or count < 1:
        reason = f"must be an integer of at least 1 ({folder / FILE})"
        raise AdapterError("num_virtual_tokens", count, reason)
    return count
