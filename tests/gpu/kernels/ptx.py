"""Runs straight-line PTX on the host, on arrays of registers: what inline assembly computes can be
tested without a device. Knows the instructions that `quantized_elements` uses."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import torch

_OPERAND = re.compile(r"\{[^}]*\}|[^,\s]+")


def run_ptx(asm: str, inputs: Sequence[np.ndarray], num_outputs: int) -> list[np.ndarray]:
    """The output registers, as uint32.

    Args:
        asm: `$0` and so on are its outputs, then its inputs.
        inputs: uint32, all of one length.

    Raises:
        NotImplementedError: it has another instruction.
    """
    size = len(inputs[0])
    registers = {f"${num_outputs + i}": values for i, values in enumerate(inputs)}

    def read(name: str) -> np.ndarray:
        if name.startswith("0f"):
            return np.full(size, int(name[2:], 16), np.uint32)
        if name[0].isdigit():
            return np.full(size, int(name, 0), np.uint32)
        return registers[name]

    for statement in asm.strip().strip("{}").split(";"):
        words = statement.split(None, 1)
        if not words or words[0] == ".reg":
            continue
        names = _OPERAND.findall(words[1])
        if names[0].startswith("{"):
            low, high = names[0].strip("{}").replace(",", " ").split()
            value = read(names[1])
            registers[low], registers[high] = value & 0xFFFF, value >> 16
            continue
        registers[names[0]] = _result(words[0], [read(name) for name in names[1:]])
    return [registers[f"${i}"] for i in range(num_outputs)]


def _result(name: str, args: list[np.ndarray]) -> np.ndarray:
    if name == "mov.b32":
        return args[0]
    if name == "and.b32":
        return args[0] & args[1]
    if name == "xor.b32":
        return args[0] ^ args[1]
    if name == "shl.b32":
        return args[0] << args[1]
    if name == "shr.b32":
        return args[0] >> args[1]
    if name == "lop3.b32":
        return _lop3(*args)
    if name == "prmt.b32":
        return _prmt(*args)
    if name == "sub.f32":
        return (args[0].view(np.float32) - args[1].view(np.float32)).view(np.uint32)
    if name == "cvt.f32.f16":
        return _floats(args[0], torch.float16).astype(np.float32).view(np.uint32)
    if name == "cvt.rn.bf16x2.f32":
        return _join(*(a.view(np.float32) for a in (args[1], args[0])), torch.bfloat16)
    if name == "cvt.rn.f16x2.e4m3x2":
        low, high = (_floats(a, torch.float8_e4m3fn) for a in (args[0] & 255, args[0] >> 8))
        return _join(low, high, torch.float16)
    match = re.fullmatch(r"(sub|mul)\.(bf16|f16)x2", name)
    if match is None:
        raise NotImplementedError(name)
    dtype = torch.bfloat16 if match[2] == "bf16" else torch.float16
    apply = np.subtract if match[1] == "sub" else np.multiply
    halves = [(_floats(a & 0xFFFF, dtype), _floats(a >> 16, dtype)) for a in args]
    return _join(*(apply(a, b) for a, b in zip(*halves, strict=True)), dtype)


def _lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Bit i of the table is the result where the bits of a, b and c are those of i."""
    result = np.zeros_like(a)
    for index in range(8):
        if int(table[0]) >> index & 1:
            here = [v if index >> bit & 1 else ~v for v, bit in ((a, 2), (b, 1), (c, 0))]
            result |= here[0] & here[1] & here[2]
    return result


def _prmt(a: np.ndarray, b: np.ndarray, selectors: np.ndarray) -> np.ndarray:
    """Each selector of 4 bits names one of eight bytes; bit 3 replicates that byte's sign."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros_like(a)
    for place in range(4):
        selector = (selectors >> np.uint32(4 * place)) & 15
        byte = (both >> (8 * (selector & 7)).astype(np.uint64)).astype(np.uint32) & 255
        byte = np.where(selector & 8, np.where(byte & 128, 255, 0), byte).astype(np.uint32)
        result |= byte << np.uint32(8 * place)
    return result


_BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}


def _floats(codes: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """float64 values of codes in the low bits."""
    wide = torch.from_numpy(codes.astype(np.int64))
    return wide.to(_BITS[dtype]).view(dtype).double().numpy()


def _join(low: np.ndarray, high: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Two values rounded to `dtype`, the first one in the low half."""
    halves = [
        torch.from_numpy(v.astype(np.float64)).to(dtype).view(torch.int16).numpy().view(np.uint16)
        for v in (low, high)
    ]
    return halves[0].astype(np.uint32) | halves[1].astype(np.uint32) << np.uint32(16)
