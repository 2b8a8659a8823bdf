"""Each client with each feature it has."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.clients.environments import IN_TIME, needs
from tests.clients.matrix import CELLS, CLIENTS

pytestmark = IN_TIME


@pytest.mark.parametrize(
    ("client", "feature"),
    [pytest.param(*cell, marks=needs(CLIENTS[cell[0]].environment)) for cell in CELLS],
)
def test_cell(client: str, feature: str, outcome: Callable[[str], dict[str, str | None]]) -> None:
    cells = outcome(client)
    assert cells.keys() == CLIENTS[client].features
    assert cells[feature] is None, f"\n{cells[feature]}"
