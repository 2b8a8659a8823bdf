"""Requests made of our own OpenAPI document, good and bad ones: no answer is a 5xx."""

from __future__ import annotations

import json
from pathlib import Path

from tests.clients.environments import IN_TIME, needs, run
from tests.clients.matrix import Table
from tests.clients.servers import KEY, samples

pytestmark = IN_TIME

SEED = 20261122
CASES = 2000
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
PER_ROUTE = 100  # at most, and besides those that cover each field


@needs("schemathesis")
def test_fuzzed_requests(drafting_url: str, tmp_path: Path, table: Table) -> None:
    counted = "hetero_llm:http_requests_total"
    before = samples(drafting_url, counted)
    report = tmp_path / "report.json"
    run(
        "schemathesis",
        [
            "st", "run", f"{drafting_url}/openapi.json", "-H", f"Authorization: Bearer {KEY}",
            "--phases", "examples,coverage,fuzzing", "--mode", "all",
            "--max-examples", str(PER_ROUTE), "--seed", str(SEED),
            "--generation-allow-x00", "true", "--generation-database", "none",
            "--checks", "not_a_server_error", "--request-timeout", "60",
            "--report", "json", "--report-json-path", str(report),
            "--warnings", "off", "--no-color",
        ],
        tmp_path,
    )  # fmt: skip
    result = json.loads(report.read_text())
    cases = result["test_cases"]
    assert result["complete"] and result["operations"]["tested"] == result["operations"]["total"]
    assert cases["generated"] >= CASES and cases["with_failures"] == cases["errored"] == 0
    # What the server counted itself.
    after = samples(drafting_url, counted)
    answers = {labels: value - before.get(labels, 0) for labels, value in after.items()}
    assert sum(answers.values()) >= CASES
    assert [labels for labels, value in answers.items() if 'status="5' in labels and value] == []
    served = {
        route: answers[f'route="{route}",status="200"']
        for route in (*GENERATING, "/tokenize", "/detokenize")
    }
    assert min(served.values()) >= 20, served  # or the document allows too much or too little
    table.sums[f"schemathesis ({result['schemathesis_version']})"] = {
        "cases": cases["generated"],
        "answers of 200 by generating routes": int(sum(served[route] for route in GENERATING)),
        "answers of 5xx": 0,
    }
