"""The bench of adapters runs all arms on a model small enough for any machine."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from bench.engine import lora


def test_all_arms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "lora.json"
    words = (
        "lora --shape tiny --device cpu --dtype float32 --prompt 32 --steps 2 --requests 6 "
        f"--streams 3 --zipf-slots 2 --adapters 12 --batches 1,3 --rounds 2 --out {out}"
    )
    monkeypatch.setattr(sys, "argv", words.split())
    lora.main()
    results = json.loads(out.read_text())
    assert [row["batch"] for row in results["decode"]] == [1, 3]
    for row in results["decode"]:
        assert row["base_ms"] and row["no_adapter/base"] and row["adapters/base"]
    (prefill,), (cold,), (zipf,) = results["prefill"], results["cold"], results["zipf"]
    assert (prefill["prompt"], cold["prompt"]) == (32, 512)
    assert min(cold["base_ms"], cold["on_device_ms"], cold["cold_ms"]) > 0
    assert zipf["adapters_tok_per_s"] > 0 and zipf["loads_per_request"] > 0
    assert set(results["ready_s"]) == {"base", "8 slots", "2 slots"}
    assert "cold_adds_ms" in capsys.readouterr().out


def test_adapters_by_zipfs_law() -> None:
    drawn = Counter(lora.zipf(1000, 20000))
    assert drawn.keys() <= set(range(1000)) and len(drawn) > 500
    assert drawn[0] / drawn[1] == pytest.approx(2**1.1, rel=0.1)
    assert drawn[0] / drawn[9] == pytest.approx(10**1.1, rel=0.2)
