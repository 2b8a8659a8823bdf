"""Set before anything imports Triton: without a CUDA device its kernels run in the interpreter."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
