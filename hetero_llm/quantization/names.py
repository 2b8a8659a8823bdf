"""What users call the ways to quantize. No torch: arguments are checked before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

OnlineName = Literal["fp8", "fp8_block", "ifq", "ifq_nf4", "int4"]
ONLINE_NAMES: tuple[OnlineName, ...] = get_args(OnlineName)
"""Of plain weights, while they are loaded: fp8 by row or by blocks of 128 x 128, int8 by row
(TACO-LLM's W8A16), nf4 by 64 columns, int4 by 128 columns."""

ONLINE_BYTES: dict[OnlineName, float] = {
    "fp8": 1, "fp8_block": 1, "ifq": 1, "ifq_nf4": 1 / 2 + 2 / 64, "int4": 1 / 2 + 3 / 128,
}  # fmt: skip
"""Bytes of a weight with its share of the scales, those of whole rows and blocks left out."""

ONLINE_ALIASES: dict[str, OnlineName] = {
    "bitsandbytes": "ifq_nf4",
    "ptpc_fp8": "fp8",
    "fp8_per_block": "fp8_block",
}
"""What vLLM calls them, for plain weights."""

CHECKPOINT_NAMES: dict[str, str] = {
    "fp8": "fp8",
    "fbgemm_fp8": "fbgemm_fp8",
    "compressed-tensors": "compressed-tensors",
    "gptq": "gptq",
    "gptq_marlin": "gptq",
    "gptq_bitblas": "gptq",
    "awq": "awq",
    "awq_marlin": "awq",
    "marlin": "gptq",
    "auto-round": "auto-round",
    "auto_round": "auto-round",
    "intel/auto-round": "auto-round",
    "inc": "auto-round",
    "modelopt": "modelopt",
    "modeleopt": "modelopt",
    "modelopt_fp4": "modelopt",
    "modelopt_mixed": "modelopt",
    "mxfp4": "mxfp4",
    "gpt_oss_mxfp4": "mxfp4",
    "bitsandbytes": "bitsandbytes",
    "gguf": "gguf",
}
"""What vLLM, TACO-LLM (its manual writes "modeleopt", too) and files call the formats of
checkpoints -> the format. Names of kernels stand for the format: which kernel serves is measured
here, not chosen."""

NOT_BUILT: dict[str, str] = {
    **dict.fromkeys(("aqlm", "squeezellm", "quip", "hqq", "torchao", "quark", "qqq"), ""),
    **dict.fromkeys(("gptq_marlin_24", "bitblas", "moe_wna16", "petit_nvfp4", "fp_quant"), ""),
    "deepspeedfp": "fp8",
    "tpu_int8": "ifq",
    "neuron_quant": "ifq",
    "experts_int8": "ifq",
    "rtn": "int4",
}
"""Named by vLLM or TACO-LLM, refused here -> what serves the purpose, if anything does."""

OLDER_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Files beside config.json in which older tools said what `quantization_config` says: AutoGPTQ,
AWQ's, ModelOpt."""
_KEYS_OF_AWQ = ("w_bit", "q_group_size")


def older_method(file: str, content: Mapping[str, Any]) -> Any:
    """What `quant_method` would say in one of `OLDER_FILES`, which need not have it."""
    said = content.get("quant_method", content.get("method"))
    if said is not None:
        return said
    if file == "hf_quant_config.json":
        return "modelopt"
    return "awq" if any(key in content for key in _KEYS_OF_AWQ) else "gptq"
