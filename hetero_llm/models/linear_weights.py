"""Says where each weight matrix of a model that is being built is to live."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import cast

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from hetero_llm.models.experts import Experts
from hetero_llm.models.layers import Linear

_NAMES = ((Linear, ("weight",)), (Experts, ("gate_up", "down")))


@contextmanager
def on_weight(
    act: Callable[[Linear | Experts, str, nn.Parameter], nn.Parameter | None],
) -> Iterator[None]:
    """Calls `act(layer, name, weight)` once for the weight of each `Linear` and both of each
    `Experts` that are created. If it returns a parameter, that becomes the weight. A weight that is
    tied later is no second creation."""

    def hook(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        for kind, names in _NAMES:
            if isinstance(module, kind) and name in names and name not in module._parameters:
                return act(module, name, parameter)
        return None

    with registration_hook(hook):
        yield


@contextmanager
def registration_hook(
    hook: Callable[[nn.Module, str, nn.Parameter], nn.Parameter | None],
) -> Iterator[None]:
    """Calls `hook` for each parameter that a module is given; it may return another one for it."""
    # torch's annotation forgets that a hook may return the parameter to register instead.
    handle = register_module_parameter_registration_hook(cast(Callable[..., None], hook))
    try:
        yield
    finally:
        handle.remove()


def on_linear_weight(
    act: Callable[[Linear, nn.Parameter], nn.Parameter | None],
) -> AbstractContextManager[None]:
    """`on_weight` for each `Linear` alone: `act(layer, weight)`."""
    return on_weight(
        lambda layer, _, weight: act(layer, weight) if isinstance(layer, Linear) else None
    )
