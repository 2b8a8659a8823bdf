"""Matrix products of a CPU model through Intel's extension for torch (IPEX).

Each weight is packed once: in 64 x 64 blocks for `tpp_linear`, whose brgemm kernels were as fast as
IPEX's oneDNN product or faster at every number of rows tried (1 to 512), in bfloat16 and float32;
sizes that give no such blocks are packed for oneDNN. Norms and activations are our own kernels:
IPEX's norm gained under 1% of a step. Reference: `F.linear`. Bench: `bench/engine/ipex_decode.py`.
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from hetero_llm.core.errors import ConfigError
from hetero_llm.cpu.fused import fuse_elementwise, replace_products
from hetero_llm.cpu.ipex_version import INSTALL, MODULE, PACKAGE, installed_version, mismatch
from hetero_llm.models.layers import CausalLM, Linear, Product
from hetero_llm.utils.topology import read_topology

_NEEDS_ISA = {torch.float32: "avx2", torch.bfloat16: "avx512f"}
_BLOCK_INPUTS = 64
_BLOCK_OUTPUTS = (64, 32, 16)
"""Outputs per block, best first: the first that divides the weight's outputs is taken."""


def require_ipex(dtype: torch.dtype) -> str:
    """Loads IPEX into this process, where it stays and replaces some of torch's kernels.

    Returns:
        Its version.

    Raises:
        ConfigError: IPEX is not installed, does not fit torch, this CPU or `dtype`, or fails to
            load.
    """
    version = installed_version()
    if version is None:
        raise _refusal(f"needs {PACKAGE}, which is not installed: {INSTALL}")
    problem = mismatch(version, torch.__version__)
    if problem is not None:
        raise _refusal(f"{problem}: {INSTALL}")
    needed = _NEEDS_ISA.get(dtype)
    name = str(dtype).removeprefix("torch.")
    if needed is None:
        raise _refusal(f"{name} is not one of its types; use dtype='bfloat16' or 'float32'")
    if needed not in read_topology().isa:  # IPEX would exit, or crash in a kernel
        raise _refusal(f"{name} needs a CPU with {needed}; use 'native' or 'torch'")
    try:
        _load()
    except Exception as error:  # a broken installation fails in many ways
        first = str(error).partition("\n")[0]
        raise _refusal(f"{MODULE} cannot be imported: {type(error).__name__}: {first}") from error
    return version


def _load() -> None:
    """Imports IPEX and with it torch's compiler, kept from starting its worker processes: they take
    0.6 GB and some seconds each, and nothing here compiles."""
    from torch._inductor import config

    workers, config.compile_threads = config.compile_threads, 1
    try:
        importlib.import_module(MODULE)
    finally:
        config.compile_threads = workers


def speed_up(model: CausalLM) -> None:
    """Replaces every product by IPEX's and, in bfloat16, norms and gated activations by our own
    kernels, in place.

    To be called after `require_ipex` with the model's dtype.
    """
    replace_products(model, packed_product)
    fuse_elementwise(model)


def packed_product(linear: Linear) -> Product:
    """IPEX's product with a packed copy of the weight; the weight itself is not used any more."""
    outputs, inputs = linear.weight.shape
    block = next((size for size in _BLOCK_OUTPUTS if outputs % size == 0), None)
    if block is None or inputs % _BLOCK_INPUTS:
        return _onednn_product(linear)
    return _block_product(linear.weight.detach(), block)


def _block_product(weight: Tensor, block: int) -> Product:
    outputs, inputs = weight.shape
    sizes = [outputs // block, block, inputs // _BLOCK_INPUTS]
    if weight.dtype == torch.bfloat16:  # pairs of inputs are adjacent
        blocks = weight.view(*sizes, _BLOCK_INPUTS // 2, 2).permute(0, 2, 3, 1, 4).contiguous()
    else:
        blocks = weight.view(*sizes, _BLOCK_INPUTS).permute(0, 2, 3, 1).contiguous()
    plain, with_bias = torch.ops.torch_ipex.tpp_linear, torch.ops.torch_ipex.tpp_linear_bias

    def product(x: Tensor, _: Tensor, bias: Tensor | None) -> Tensor:
        x = x.contiguous()
        if bias is None:
            return plain(x, blocks, outputs)
        return with_bias(x, blocks, bias, outputs)

    return product


def _onednn_product(linear: Linear) -> Product:
    weight, bias = linear.weight.detach(), linear.bias
    # The context owns weight and bias; a handle is only a pointer to it.
    context = torch.ops.ipex_prepack.linear_prepack(
        weight, None if bias is None else bias.detach(), None
    )
    outputs, empty = len(weight), weight.new_empty(0)
    empty_bias = None if bias is None else empty

    def product(x: Tensor, _: Tensor, __: Tensor | None) -> Tensor:
        return torch.ops.torch_ipex.ipex_linear(
            x.contiguous(), empty, empty_bias, context.get_data_handle(), outputs
        )

    return product


def _refusal(reason: str) -> ConfigError:
    return ConfigError("cpu_backend", "ipex", reason)
