"""What a part of a stored matrix may be."""

from __future__ import annotations

import pytest

from hetero_llm.quantization.formats.scheme import ANY_LENGTH, StoredPart


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((4, 8), True),
        ((8, 4), False),
        ((4,), False),
        ((4, 8, 1), False),
        ((3, 2, 9), True),
        ((), False),
    ],
)
def test_shapes(shape: tuple[int, ...], expected: bool) -> None:
    part = StoredPart("scales", ("F32",), ((4, 8), (3, ANY_LENGTH, 9)))
    assert part.admits(shape) is expected
