"""nf4 matrices as bitsandbytes stores them: what `hetero-llm quantize --format ifq_nf4` writes, and
transformers, vLLM and `formats.bitsandbytes` read. The layout is described there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hetero_llm.quantization.matrix import NF4_VALUES, QuantizedMatrix


def stored_tensors(matrix: QuantizedMatrix) -> dict[str, Tensor]:
    """The tensors of a matrix that `online` made, by their suffix behind the module's name."""
    assert matrix.kind == "nf4" and matrix.row_scale is None and matrix.order is None
    state = {
        "quant_type": "nf4",
        "blocksize": matrix.group,
        "dtype": "bfloat16",
        "shape": list(matrix.shape),
    }
    return {
        "weight": ((matrix.data >> 4) | (matrix.data << 4)).view(-1, 1),
        "weight.absmax": matrix.scale.float().flatten(),
        "weight.quant_map": torch.tensor(NF4_VALUES),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }


def quantization_config(plain: list[str]) -> Mapping[str, Any]:
    """The value of `quantization_config` in config.json; `plain`: linear layers that stay so."""
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": plain,
    }
