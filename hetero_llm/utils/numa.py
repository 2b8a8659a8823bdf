"""Where a GPU sits: its PCI address, and the NUMA node whose memory is nearest to it."""

from __future__ import annotations

import ctypes
from pathlib import Path

_DRIVER = "libcuda.so.1"
_ROOT = Path("/")
_ADDRESS_BYTES = 32  # "0000:9c:00.0" and its end


def numa_node(ordinal: int) -> int | None:
    """The NUMA node of the GPU that torch calls `cuda:ordinal`; None if it is unknown or the
    machine has only one."""
    address = pci_address(ordinal)
    return None if address is None else numa_node_at(address)


def pci_address(ordinal: int) -> str | None:
    """The PCI address of a GPU, such as "0000:9c:00.0"; None without a driver or such a GPU.
    Creates no CUDA context."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return None
    device = ctypes.c_int()
    address = ctypes.create_string_buffer(_ADDRESS_BYTES)
    failed = (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), ordinal)
        or driver.cuDeviceGetPCIBusId(address, _ADDRESS_BYTES, device)
    )
    return None if failed else address.value.decode("ascii").lower()


def numa_node_at(address: str, root: Path = _ROOT) -> int | None:
    """The NUMA node of a PCI address, read from sysfs under `root`; None if unknown."""
    try:
        node = int((root / "sys/bus/pci/devices" / address / "numa_node").read_text("ascii"))
    except (OSError, ValueError):
        return None
    return None if node < 0 else node
