"""Says where the weight of each `Linear` of a model that is being built is to live."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from hetero_llm.models.layers import Linear


@contextmanager
def on_linear_weight(
    act: Callable[[Linear, nn.Parameter], nn.Parameter | None],
) -> Iterator[None]:
    """Calls `act(layer, weight)` once for each `Linear` that is created. If it returns a parameter,
    that becomes the weight. A weight that is tied later is no second creation."""

    def hook(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if not isinstance(module, Linear) or name != "weight" or "weight" in module._parameters:
            return None
        return act(module, parameter)

    # torch's annotation forgets that a hook may return the parameter to register instead.
    handle = register_module_parameter_registration_hook(cast(Callable[..., None], hook))
    try:
        yield
    finally:
        handle.remove()
