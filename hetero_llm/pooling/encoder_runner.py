"""Encoders through transformers' classes: batches of like lengths, padded on the right."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetero_llm.config.engine_config import LoadConfig
from hetero_llm.core.errors import ModelLoadError
from hetero_llm.models.config_reader import short_reason
from hetero_llm.models.loader import default_dtype
from hetero_llm.models.weight_files import find_weight_files
from hetero_llm.pooling.input_queue import InputQueue
from hetero_llm.pooling.pooler import DenseLayers, pool_padded
from hetero_llm.pooling.pooling_model import PoolingModel
from hetero_llm.pooling.runner import PooledStep

_UNUSED = "pooler."
"""Prefix of the parameters of BERT's own pooling, which embedding models do not use."""
_NAMES_SHOWN = 5


class EncoderRunner:
    """See `PoolingRunner`. An input is computed whole, in one step.

    Args:
        network: transformers' model; a classifier returns logits.
        max_num_seqs: most inputs of a batch.
        max_num_batched_tokens: most tokens of a batch, padding included; a longer input is a batch
            of its own.
    """

    def __init__(
        self,
        network: Any,
        model: PoolingModel,
        *,
        device: torch.device,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self._network = network
        self._model = model
        self._device = device
        self._most = max_num_seqs
        self._tokens = max_num_batched_tokens
        self._dense = DenseLayers(model.dense, device)
        takes = inspect.signature(network.forward).parameters
        self._takes_types = "token_type_ids" in takes
        self._options = {"use_cache": False} if "use_cache" in takes else {}
        self._padding = getattr(model.source, "pad_token_id", None) or 0

    @property
    def num_running(self) -> int:
        return 0

    def drop(self, key: str) -> None:
        pass

    @torch.inference_mode()
    def step(self, queue: InputQueue) -> PooledStep:
        taken = queue.take_alike(self._tokens, self._most)
        lengths = np.array([len(one) for one in taken], np.int64)
        shape = len(taken), int(lengths.max())
        ids, types = np.full(shape, self._padding, np.int64), np.zeros(shape, np.int64)
        for row, one in enumerate(taken):
            ids[row, : len(one)] = one.input.token_ids
            if one.input.types is not None:
                types[row, : len(one)] = one.input.types
        mask = (np.arange(shape[1]) < lengths[:, None]).astype(np.int64)
        inputs = {"input_ids": ids, "attention_mask": mask}
        if self._takes_types:
            inputs["token_type_ids"] = types
        tensors = {name: torch.from_numpy(one).to(self._device) for name, one in inputs.items()}
        made = self._network(**tensors, **self._options)
        if self._model.is_classifier:
            pooled = made.logits.float()
        else:
            on_device = torch.from_numpy(lengths).to(self._device)
            pooled = pool_padded(made.last_hidden_state, on_device, self._model.pooling)
            pooled = self._dense(pooled)
        values = pooled.cpu().numpy()
        return PooledStep(list(zip(taken, values, strict=True)), int(lengths.sum()))


def load_encoder(
    folder: Path,
    model: PoolingModel,
    load: LoadConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    show_progress: bool,
) -> Any:
    """Loads the network with transformers.

    Raises:
        ModelLoadError: files are missing or damaged, or do not hold this class's weights.
    """
    import transformers

    name = "AutoModelForSequenceClassification" if model.is_classifier else "AutoModel"
    auto = getattr(transformers, name)
    config = copy.deepcopy(model.source)
    if model.is_classifier:
        config.num_labels = len(model.labels)
    try:
        if load.load_format == "dummy":
            torch.manual_seed(load.seed)
            with default_dtype(dtype), torch.device(device):
                network = auto.from_config(config, trust_remote_code=model.trust_remote_code)
            return network.eval().requires_grad_(False)
        files = find_weight_files(folder, load.load_format, allow_pickle=load.allow_pickle_weights)
        with _progress(show_progress):
            network, info = auto.from_pretrained(
                str(folder),
                config=config,
                dtype=dtype,
                use_safetensors=files[0].path.suffix == ".safetensors",
                trust_remote_code=model.trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
            )
    except ModelLoadError:
        raise
    except Exception as error:  # of any kind: classes check their files in their own ways
        reason = short_reason(error, 300)
        raise ModelLoadError(f"{folder}: {model.class_name}: {reason}") from error
    missing = sorted(key for key in info["missing_keys"] if _UNUSED not in key)
    if model.is_classifier:
        missing = sorted(info["missing_keys"])
    if missing or info["mismatched_keys"]:
        names = [*missing, *(str(key) for key in info["mismatched_keys"])]
        more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        shown = ", ".join(names[:_NAMES_SHOWN]) + more
        raise ModelLoadError(f"{folder}: tensors missing or of wrong shape: {shown}")
    return network.to(device).eval().requires_grad_(False)


@contextmanager
def _progress(shown: bool) -> Iterator[None]:
    """Shows transformers' progress bars inside the context, or none."""
    from transformers.utils import logging as of_transformers

    before = of_transformers.is_progress_bar_enabled()
    (of_transformers.enable_progress_bar if shown else of_transformers.disable_progress_bar)()
    try:
        yield
    finally:
        (of_transformers.enable_progress_bar if before else of_transformers.disable_progress_bar)()
