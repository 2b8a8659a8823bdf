"""A whole server and 200 hostile requests of a seed; more by hand, see the helper."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.served import ROOT, server
from tests.helpers.hostile_requests import attack

pytestmark = pytest.mark.faults


def test_hostile_requests_harm_nobody(tmp_path: Path) -> None:
    flags = ("--tool-call-parser", "hermes", "--max-stored-responses", "10")
    template = str(ROOT / "tests" / "clients" / "chat.jinja")
    with server(tmp_path, "--chat-template", template, *flags) as one:
        counts, faults = attack(one.url, seed=7, count=200)
        assert not faults, "\n".join(faults)
        assert counts["400"] > 80 and counts["200"] > 30 and counts["rounds beside"] > 5
        one.wait_until_idle()
        one.probe()
        assert " ERROR " not in one.log() and "Traceback" not in one.log()
