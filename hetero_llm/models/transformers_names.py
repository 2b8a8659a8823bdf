"""Names of a checkpoint's tensors -> parameters of a transformers class.

Since version 5 some classes differ from their checkpoints: parts are renamed, experts joined into
one tensor. transformers describes both as transformations (`get_model_conversion_mapping`). Their
patterns give the names here; our loader copies the tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hetero_llm.models.layers import RearrangedView
from hetero_llm.models.transformers_modules import FlatGatedMLP


class CheckpointNames:
    """See `CausalLM.checkpoint_tensors` and `checkpoint_name`.

    Args:
        causal: The model, with its final parameters.
    """

    def __init__(self, causal: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        self._prefix = f"{causal.base_model_prefix}."
        self._own = _own_tensors(causal)
        names = {name for name, _ in causal.named_parameters()}
        every = {name for name, _ in causal.named_parameters(remove_duplicate=False)}
        self._tied = every - names
        ignored = getattr(causal, "_keys_to_ignore_on_load_unexpected", None) or ()
        self._ignored = [re.compile(pattern) for pattern in ignored]
        transforms = get_model_conversion_mapping(causal)
        self._renamings = [t for t in transforms if not isinstance(t, WeightConverter)]
        self._merged: dict[str, Tensor] = {}  # parts of joined tensors, by their stored names
        self._joined: set[str] = set()
        for transform in transforms:
            if isinstance(transform, WeightConverter):
                self._add_parts(transform)

    def tensors(self) -> Mapping[str, Tensor | RearrangedView]:
        """Stored name -> where it goes."""
        whole = {name: t for name, t in self._own.items() if name not in self._joined}
        return {**whole, **self._merged}

    def ours(self, name: str) -> str | None:
        """The name in `tensors` of a stored tensor, None if it is not needed."""
        original = name
        for renaming in self._renamings:
            name = renaming.rename_source_key(name)[0]
        for candidate in (name, self._prefix + name, name.removeprefix(self._prefix)):
            if candidate in self._tied:
                return None
            if candidate in self._own or candidate in self._merged:
                return candidate
        if any(pattern.search(name) or pattern.search(original) for pattern in self._ignored):
            return None
        if name.endswith("rotary_emb.inv_freq"):  # stored by old versions, computed anew
            return None
        return name

    def _add_parts(self, converter: Any) -> None:
        """Adds a view of the joined tensor for each expert that is stored by itself. Other
        conversions are skipped: the loader then reports what is missing."""
        kinds = [type(operation).__name__ for operation in converter.operations]
        if kinds not in (["MergeModulelist"], ["MergeModulelist", "Concatenate"]):
            return
        if any(
            getattr(operation, "dim", 0) != dim
            for dim, operation in enumerate(converter.operations)
        ):
            return
        target = _plain(converter.target_patterns[0])
        sources = [_plain(source) for source in converter.source_patterns]
        for name, joined in self._own.items():
            if not name.endswith(target) or joined.dim() != 3:
                continue
            self._joined.add(name)
            stem = name.removesuffix(target)
            for expert, part in enumerate(joined):
                pieces = part.chunk(len(sources), dim=0)
                for source, piece in zip(sources, pieces, strict=True):
                    self._merged[stem + source.replace("*", str(expert), 1)] = piece


def _own_tensors(causal: Any) -> dict[str, Tensor]:
    """Parameters and stored buffers by the class's names; tied parameters once."""
    parameters: dict[str, Tensor] = dict(causal.named_parameters())
    stored = causal.state_dict(keep_vars=True)
    parameters.update((n, b) for n, b in causal.named_buffers() if n in stored)
    for path, module in causal.named_modules():
        if isinstance(module, FlatGatedMLP):
            for name, _ in module.named_parameters():
                del parameters[f"{path}.{name}"]
            parameters.update((f"{path}.{n}", t) for n, t in module.stored_tensors().items())
    return parameters


def _plain(pattern: str) -> str:
    return pattern.replace("\\.", ".")
