"""Methods of null objects, which stand in for an optional partner where there is none."""

from __future__ import annotations

from typing import Any


def do_nothing(*_: object, **__: object) -> None:
    pass


def never(*_: object) -> bool:
    return False


def no_items(*_: object) -> list[Any]:
    return []
