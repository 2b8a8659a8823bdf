import numpy as np

from hetero_llm.core.promotion import Promotion, promotions_from_rows, promotions_to_rows


def test_promotions_as_rows() -> None:
    chosen = (Promotion(1, 2, 3, None), Promotion(0, 5, 7, (0, 0)), Promotion(4, 0, 0, (2, 9)))
    rows = promotions_to_rows(chosen)
    assert rows.shape == (3, 5) and rows.dtype == np.int32
    assert promotions_from_rows(rows) == chosen
    assert promotions_from_rows(promotions_to_rows(())) == ()
