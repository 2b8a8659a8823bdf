"""A whole server and hostile requests of two seeds; more by hand, see the helpers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.faults.served import ROOT, server
from tests.helpers.hostile_bytes import odd
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


def test_odd_bytes_harm_nobody(tmp_path: Path) -> None:
    """With adapters, whose folders have to lie below a root."""
    root = tmp_path / "root"
    (root / "adapter").mkdir(parents=True)
    (root / "link").symlink_to("/etc")
    os.mkfifo(root / "fifo")
    flags = ("--enable-lora", "--lora-root", str(root), "--tool-call-parser", "hermes")
    with server(tmp_path, *flags) as one:
        counts, faults = attack(one.url, seed=3, count=200, make=odd)
        assert not faults, "\n".join(faults)
        assert counts["400"] > 80 and counts["200"] > 10 and counts["rounds beside"] > 0
        one.wait_until_idle()
        one.probe()
        assert " ERROR " not in one.log() and "Traceback" not in one.log()
        assert "root:" not in one.log()  # of /etc/passwd
