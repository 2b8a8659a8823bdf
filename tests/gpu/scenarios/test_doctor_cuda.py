"""What the doctor says of offload where there is a GPU."""

from __future__ import annotations

import re

from hetero_llm.commands import doctor
from hetero_llm.utils.numa import numa_node, pci_address


def test_offload() -> None:
    report = doctor.examine(["Prefix cache offload"])
    facts = report.sections["Prefix cache offload"]
    assert not report.missing
    assert facts["pinned memory"].startswith("works, "), facts
    assert "GB/s" in facts["copies"] and "batch" in facts["copies"], facts
    assert facts["host memory"].startswith("cpu_prefill_memory_utilization=0.3 of ")


def test_where_it_sits() -> None:
    address = pci_address(0)
    assert address is not None and re.fullmatch(
        r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.\d", address
    )
    assert pci_address(10_000) is None
    node = numa_node(0)
    assert node is None or 0 <= node < 1024
