"""Every name of `--quantization` in TACO-LLM's manual and in vLLM has one meaning or a named
error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetero_llm.core.errors import ConfigError
from hetero_llm.models.quantization_config import has_fp8_weights
from hetero_llm.models.read_config import load_model_config
from hetero_llm.quantization.names import ONLINE_BYTES, ONLINE_NAMES
from tests.models.tiny import make_tiny_checkpoint, rewrite_config

MANUAL = (
    *("aqlm", "awq", "deepspeedfp", "tpu_int8", "fp8", "fbgemm_fp8", "modelopt", "modeleopt"),
    *("marlin", "gguf", "gptq_marlin_24", "gptq_marlin", "awq_marlin", "gptq"),
    *("compressed-tensors", "bitsandbytes", "experts_int8", "qqq", "neuron_quant"),
    *("squeezellm", "ifq", "ifq_nf4"),
)
VLLM = (
    *("hqq", "quark", "torchao", "auto-round", "inc", "moe_wna16", "rtn", "mxfp4", "ptpc_fp8"),
    *("modelopt_fp4", "bitblas"),
)
ONLINE = {
    **{name: name for name in ONLINE_NAMES},
    "bitsandbytes": "ifq_nf4",
    "ptpc_fp8": "fp8",
    "fp8_per_block": "fp8_block",
}
STORED = {
    "fp8": ["fp8"],
    "fbgemm_fp8": ["fbgemm_fp8"],
    "gptq": ["gptq", "gptq_marlin", "marlin"],
    "awq": ["awq", "awq_marlin"],
    "compressed-tensors": ["compressed-tensors"],
    "bitsandbytes": ["bitsandbytes"],
    "modelopt": ["modelopt", "modeleopt"],
    "modelopt_fp4": ["modelopt", "modelopt_fp4"],
    "mxfp4": ["mxfp4"],
    "auto-round": ["auto-round", "inc"],
    "intel/auto-round": ["auto-round", "inc"],
    "gguf": ["gguf"],
}
"""`quant_method` of files -> what users may call it."""
REFUSED = {
    "aqlm": "this format is not built$",
    "squeezellm": "this format is not built$",
    "gptq_marlin_24": "this format is not built$",
    "qqq": "this format is not built$",
    "deepspeedfp": "not built; 'fp8' is",
    "tpu_int8": "not built; 'ifq' is",
    "experts_int8": "not built; 'ifq' is",
    "neuron_quant": "not built; 'ifq' is",
    **dict.fromkeys(("hqq", "quark", "torchao", "moe_wna16", "rtn", "bitblas"), "not built"),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("plain"), "llama", layers=1)


def test_every_name_has_a_meaning() -> None:
    known = {name for names in STORED.values() for name in names} | ONLINE.keys() | REFUSED.keys()
    assert known >= {*MANUAL, *VLLM}
    assert ONLINE_BYTES.keys() == set(ONLINE_NAMES)


@pytest.mark.parametrize("name", [*MANUAL, *VLLM, *ONLINE])
def test_of_plain_weights(name: str, plain: Path) -> None:
    if name in ONLINE:
        found = load_model_config(plain, quantization=name)
        assert found.online_quantization == ONLINE[name]
        return
    reason = REFUSED.get(name, "the checkpoint's weights are plain; of these are made: fp8, ")
    with pytest.raises(ConfigError, match=f"^quantization='{name}': .*{reason}"):
        load_model_config(plain, quantization=name)


@pytest.mark.parametrize("method", STORED)
def test_of_quantized_weights(method: str, tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "llama", layers=1)
    rewrite_config(folder, quantization_config={"quant_method": method})
    for name in STORED[method]:
        found = load_model_config(folder, quantization=name)
        assert found.quantization is not None and found.online_quantization is None
    for other in {"ifq", "aqlm", "gptq", "fp8"} - set(STORED[method]):
        reason = f"the checkpoint's weights are quantized already, by '{method}'; leave it out"
        with pytest.raises(ConfigError, match=f"^quantization='{other}': {reason}"):
            load_model_config(folder, quantization=other)


def test_a_name_that_nobody_knows(plain: Path) -> None:
    with pytest.raises(ConfigError, match="^quantization='fp7': one of fp8, fp8_block, ifq, "):
        load_model_config(plain, quantization="fp7")


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ({"quant_method": "fp8"}, True),
        ({"quant_method": "fbgemm_fp8"}, True),
        ({"quant_method": "gptq", "bits": 4}, False),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}, True),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, True),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
             "quantized_layers": {"a": {"quant_algo": "W4A8_AWQ"}, "b": {"quant_algo": "FP8"}}},
            True,
        ),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, True),  # transformers' default
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
         False),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, False),
        ({"format": "nvfp4-pack-quantized",
          "config_groups": {"a": {"weights": {"type": "float", "num_bits": 4}}}}, True),
        ({"config_groups": {"a": {"format": "mxfp4-pack-quantized",
          "weights": {"type": "float", "num_bits": 4}}}}, False),
        ({"config_groups": {"a": {"weights": {"type": "float", "num_bits": 8}}}}, True),
        ({"config_groups": {"a": {"weights": {"type": "float", "num_bits": 4}}}}, False),
        ({"config_groups": {"a": {"weights": {"type": "int", "num_bits": 8}}, "b": 3}}, False),
    ],
)  # fmt: skip
def test_fp8_weights(stored: dict[str, Any], expected: bool, tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "llama", layers=1)
    rewrite_config(folder, quantization_config={"quant_method": "compressed-tensors"} | stored)
    assert has_fp8_weights(load_model_config(folder)) is expected


def test_fp8_weights_of_plain_checkpoints(plain: Path) -> None:
    for name in (None, *ONLINE_NAMES):
        found = load_model_config(plain, quantization=name)
        assert has_fp8_weights(found) == (name in ("fp8", "fp8_block"))
