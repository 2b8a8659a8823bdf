"""Words that all ranks of a model share, in which a rank's GPU writes that its numbers are garbage.

A rank adds its part of a layer to those of the others, so what one of them lacks is missing on all.
A rank whose CPU threads have not answered writes its word before its part goes out; rank 0 reads
the words of all ranks when a step has finished, and so reports no token of a step that lacks one.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from hetero_llm.bridge.ipc.shared_memory import map_shared

if TYPE_CHECKING:
    import torch

_WORDS = 16  # of a rank, a cache line
_PAGE = 4096
_PORTABLE, _MAPPED = 1, 2  # cudaHostRegister


def fault_bytes(ranks: int) -> int:
    """Bytes of the shared memory: whole pages."""
    return -(-ranks * _WORDS * 4 // _PAGE) * _PAGE


def open_faults(fd: int, ranks: int, *, pin: bool) -> torch.Tensor:
    """Maps the words.

    Args:
        fd: descriptor of `fault_bytes(ranks)` bytes; may be closed afterwards.
        pin: page-locks them for the current CUDA device.

    Returns:
        [ranks] int32 in host memory, not contiguous: 0 until a rank has written 1.

    Raises:
        CudaError: the driver does not lock them.
    """
    import torch

    memory = map_shared(fd, fault_bytes(ranks))
    flat = torch.frombuffer(memory, dtype=torch.int32)
    if pin:
        runtime, address = torch.cuda.cudart(), flat.data_ptr()
        torch.cuda.check_error(runtime.cudaHostRegister(address, flat.nbytes, _PORTABLE | _MAPPED))
        weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return flat[: ranks * _WORDS].view(ranks, _WORDS)[:, 0]
