"""Mixtures of experts on a CUDA device: fused routers and grouped products."""

from __future__ import annotations

from functools import partial

from hetero_llm.gpu.kernels.experts import experts, serves
from hetero_llm.gpu.kernels.routing import route_sparse_mixer, route_top_k
from hetero_llm.models.experts import Experts, SparseMixerRouter, TopKRouter
from hetero_llm.models.layers import CausalLM


def speed_up_experts(model: CausalLM) -> None:
    """Replaces routers and experts by kernels, in place; part of `fused.speed_up`."""
    for module in model.modules():
        if isinstance(module, Experts) and serves(module.activation.name):
            module.function = partial(experts, activation=module.activation.name)
        elif isinstance(module, TopKRouter):
            module.function = partial(
                route_top_k,
                k=module.k,
                renormalize=module.renormalize,
                rounded=module.rounded,
            )
        elif isinstance(module, SparseMixerRouter):
            module.function = partial(route_sparse_mixer, jitter=module.jitter)
