"""Steps of the draft model are measured at start."""

from __future__ import annotations

import numpy as np
import pytest

from hetero_llm.cpu.draft_worker.step_profile import MOST_TOKENS, measure
from hetero_llm.demo_models import demo_folder
from tests.spec_decode.draft_model.local_worker import Setting, load_model


@pytest.mark.parametrize(("slots", "longest"), [(1, 64), (3, 40), (64, 64), (2, 5), (1, 1)])
def test_a_model_is_measured_and_left_without_texts(slots: int, longest: int) -> None:
    setting = Setting(slots=slots, max_model_len=longest, window=32)
    model = load_model(demo_folder("demo-draft"), setting)
    times = measure(model, slots, 20)
    found = times.predict_range(0, MOST_TOKENS)
    assert (found > 0).all() and (np.diff(found) >= 0).all()
    assert not len(model.kv_layout.plan_prefix(512).slots)
    assert all(model.kv_layout.room(slot) == longest for slot in range(slots))
