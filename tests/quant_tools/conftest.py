"""Matrices that the real tools store, against the readers. Only when asked for by name, as
`make test-quant-tools` does: the tools are 350 MB beside the tests' environment."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    named = (Path(str(one).partition("::")[0]).absolute() for one in config.invocation_params.args)
    if any(path.is_relative_to(HERE) for path in named):
        return
    skip = pytest.mark.skip(reason="needs the tools that quantize: make test-quant-tools")
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(skip)
