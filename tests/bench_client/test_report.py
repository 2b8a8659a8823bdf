from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from hetero_llm.bench_client.load import ClientHealth
from hetero_llm.bench_client.report import (
    CSV_COLUMNS,
    as_json,
    confidence_table,
    csv_row,
    remarks,
    result_block,
    write_csv,
    write_json,
)
from tests.bench_client.points import FAILED, OK, SLOW, point, run

GOLDEN = Path(__file__).parent / "golden"

# The labels of the block in TACO-LLM's manual, in its order.
MANUAL = """\
===== Serving Benchmark Result =====
Backend:
Traffic request rate:
Successful requests:
Benchmark duration (s):
Total input tokens:
Total generated tokens:
Total generated tokens (retokenized):
Request throughput (req/s):
Input token throughput (tok/s):
Output token throughput (tok/s):
-----End-to-End Latency-----
Mean E2E Latency (ms):
Median E2E Latency (ms):
-----Time to First Token-----
Mean TTFT (ms):
Median TTFT (ms):
P99 TTFT (ms):
-----Time per Output Token (excl. 1st token)-----
Mean TPOT (ms):
Median TPOT (ms):
P99 TPOT (ms):
-----Inter-token Latency-----
Mean ITL (ms):
Median ITL (ms):
P99 ITL (ms):
=====
"""

# What readers of vLLM's files look for.
VLLM_KEYS = {
    "date", "backend", "model_id", "num_prompts", "request_rate", "max_concurrency", "duration",
    "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
    "output_throughput", "total_token_throughput",
    *(f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99")
      for name in ("ttft", "tpot", "itl", "e2el")),
}  # fmt: skip
VLLM_LISTS = {"input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts",
              "errors"}  # fmt: skip
ABOUT = {"date": "20260101-000000", "backend": "openai", "model_id": "m", "num_prompts": 2}


def block(percentile_metrics: tuple[str, ...] = ("ttft", "tpot", "itl")) -> str:
    one = run([OK, SLOW], 10.0, 12)
    return result_block(
        "taco_llm",
        float("inf"),
        one.metrics,
        percentile_metrics=percentile_metrics,
        percentiles=(99.0,),
    )


def test_the_block_is_the_golden_one() -> None:
    assert block() == (GOLDEN / "block.txt").read_text(encoding="utf-8")


def test_the_labels_are_the_manuals() -> None:
    labels = [line.partition(":")[0] + ":" if ":" in line else line for line in block().split("\n")]
    assert "\n".join(labels) == MANUAL


def test_percentiles_are_shown_where_they_are_asked_for() -> None:
    assert "P99 E2E Latency (ms):" in block(("e2el",))
    assert "P99 TTFT" not in block(("e2el",))


def test_the_block_of_a_failure() -> None:
    one = run([FAILED], 2.0, None)
    text = result_block("b", 2.5, one.metrics, percentile_metrics=("itl",), percentiles=(99.0,))
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    assert lines["Traffic request rate"].strip() == "2.5"
    assert lines["Successful requests"].strip() == "0"
    assert lines["Total generated tokens (retokenized)"].strip() == "n/a"
    assert lines["Mean TTFT (ms)"].strip() == "n/a"
    assert lines["P99 ITL (ms)"].strip() == "n/a"


def test_remarks_show_every_error() -> None:
    one = run([OK, FAILED, FAILED], 1.0, None)
    text = remarks(one.metrics, ClientHealth(0.001, 0.002, 0.5), max_concurrency=8)
    assert text.splitlines() == [
        "Failed requests:                         2",
        "  2 x HTTP 503: full",
        "Maximum request concurrency:             8",
        "Total token throughput (tok/s):          105.00",
        "Token counts from:                       usage 1",
        "Client delay p99 (ms):                   1.00",
    ]


def test_remarks_on_answers_without_counts() -> None:
    from dataclasses import replace

    one = run([replace(OK, usage=None)], 1.0, None)
    text = remarks(one.metrics, ClientHealth(0, 0, 0), max_concurrency=None)
    assert "1 answers came without usage and are missing from the token totals" in text
    assert "unknown 1" in text


def test_confidence_over_runs() -> None:
    runs = [run([OK] * n, 1.0, None).metrics for n in (1, 2, 3)]
    lines = confidence_table(runs, (99.0,)).splitlines()
    assert lines[0] == "----- Over 3 runs: mean and 95% confidence -----"
    # 1, 2, 3 requests/s: deviation 1, t = 4.303, so 4.303 / sqrt(3).
    assert lines[1] == "Request throughput (req/s):              2.00 +- 2.48"
    assert "Mean TTFT (ms):                          500.00 +- 0.00" in lines
    broken = [*runs[:2], run([FAILED], 1.0, None).metrics]
    assert "Mean TTFT (ms):                          n/a" in confidence_table(broken, (99.0,))


def test_json_has_vllms_keys() -> None:
    found = as_json(point(run([OK, SLOW], 10.0, 12)), about=ABOUT, detailed=True)
    assert set(found) >= VLLM_KEYS | VLLM_LISTS
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["request_rate"] == "inf"
    assert found["completed"] == 2
    assert found["mean_ttft_ms"] == 750.0
    assert found["total_token_throughput"] == 21.0
    assert found["ttfts"] == [0.5, 1.0]
    assert found["itls"] == [[0.5, 1.5], [1.0, 2.0]]
    assert found["queue_times"] == [0.25, 0.0]
    assert found["errors"] == ["", ""]
    assert "runs" not in found


def test_json_without_details() -> None:
    found = as_json(point(run([OK], 1.0, None), rate=2.0), about=ABOUT, detailed=False)
    assert not VLLM_LISTS & set(found)
    assert found["request_rate"] == 2.0
    assert found["total_output_tokens_retokenized"] is None


def test_json_of_several_runs() -> None:
    several = point(run([OK], 1.0, 4), run([OK, SLOW], 2.0, 8), run([OK, FAILED], 1.0, 4))
    found = as_json(several, about=ABOUT, detailed=True)
    assert (found["num_runs"], found["completed"], found["failed"]) == (3, 4, 1)
    assert found["duration"] == 4.0
    assert found["total_output_tokens_retokenized"] == 16
    assert found["request_throughput"] == 1.0
    assert [one["completed"] for one in found["runs"]] == [1, 2, 1]
    assert found["ci95"]["request_throughput"] == 0.0
    assert found["ci95"]["completed"] == pytest.approx(4.303 / 3, rel=1e-3)
    assert len(found["ttfts"]) == 5
    assert found["ttfts"][4] is None
    assert found["error_counts"] == {"HTTP 503: full": 1}


def test_json_files(tmp_path: Path) -> None:
    write_json(tmp_path / "one.json", [{"a": "é"}])
    write_json(tmp_path / "two.json", [{"a": 1}, {"a": 2}])
    assert json.loads((tmp_path / "one.json").read_text(encoding="utf-8")) == {"a": "é"}
    assert json.loads((tmp_path / "two.json").read_text(encoding="utf-8")) == [{"a": 1}, {"a": 2}]


def test_csv(tmp_path: Path) -> None:
    one = point(run([OK, SLOW, FAILED], 10.0, 12), rate=4.0, max_concurrency=16)
    row = csv_row("20260101_x", one, {"enable_lookahead": "true", "note": "not a column"})
    write_csv(tmp_path / "a.csv", [row, row])
    with (tmp_path / "a.csv").open(newline="", encoding="utf-8") as file:
        heading, *rows = csv.reader(file)
    assert heading == list(CSV_COLUMNS)
    assert rows == [row, row]
    cells = dict(zip(heading, row, strict=True))
    assert cells["Name"] == "20260101_x"
    assert cells["Backend"] == "taco_llm"
    assert cells["enable_prefix_cache"] == ""
    assert cells["enable_lookahead"] == "true"
    assert cells["Total generated tokens"] == "10"
    assert cells["Mean E2E Latency (ms)"] == "3250"
    assert cells["P99 TTFT (ms)"] == "995"
    assert cells["Traffic request rate"] == "4"
    assert cells["Max concurrency"] == "16"
    assert cells["Failed requests"] == "1"


def test_csv_begins_with_the_manuals_columns() -> None:
    """Its table has 22: name, backend, four switches, five totals, eleven latencies."""
    values = [column for column in CSV_COLUMNS[6:22]]
    assert CSV_COLUMNS[:2] == ("Name", "Backend")
    assert all(column.startswith("enable_") for column in CSV_COLUMNS[2:6])
    labels = [line.rstrip(":") for line in MANUAL.splitlines() if line.endswith(":")]
    assert [label for label in labels if label in values] == values
