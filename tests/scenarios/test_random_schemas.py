"""Some seeds of the schema fuzzer; `tests.helpers.schema_fuzz` runs more by hand."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.schema_fuzz import open_model, run


def test_finished_outputs_follow_their_schemas(tmp_path: Path) -> None:
    with open_model(tmp_path) as llm:
        counts = run(range(96), llm)
        assert counts["stop"] > 80 and counts["stop"] + counts["length"] + counts["refused"] == 96
        assert llm.metrics()["spec_decode_num_accepted_tokens"] > 100  # forced tokens
