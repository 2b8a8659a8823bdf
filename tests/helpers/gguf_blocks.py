"""Blocks of GGUF files: random ones, and their numbers, written from the text of ggml-common.h and
ggml-quants.c one element of a block at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

# Bytes of a block, its elements, and where its float16 numbers are.
LAYOUTS = {
    "Q4_0": (18, 32, (0,)),
    "Q4_1": (20, 32, (0, 2)),
    "Q5_0": (22, 32, (0,)),
    "Q5_1": (24, 32, (0, 2)),
    "Q8_0": (34, 32, (0,)),
    "Q4_K": (144, 256, (0, 2)),
    "Q5_K": (176, 256, (0, 2)),
    "Q6_K": (210, 256, (208,)),
}
_PLAIN = {"F32": 4, "F16": 2, "BF16": 2}
NUMBERS = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12,
    "Q5_K": 13, "Q6_K": 14, "BF16": 30,
}  # fmt: skip
"""`enum ggml_type`."""
# What brings the numbers of random blocks to a standard deviation near 0.1.
_SCALES = {
    "Q4_0": 0.02, "Q4_1": 0.02, "Q5_0": 0.01, "Q5_1": 0.01, "Q8_0": 0.0013, "Q4_K": 0.0005,
    "Q5_K": 0.0002, "Q6_K": 0.00007,
}  # fmt: skip


def random_tensor(name: str, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """[rows, bytes of a row] uint8."""
    if name in _PLAIN:
        values = (0.1 * rng.standard_normal((rows, columns))).astype(np.float32)
        return stored(name, values)
    nbytes, elements, halves = LAYOUTS[name]
    blocks = rng.integers(0, 256, (rows, columns // elements, nbytes), dtype=np.uint8)
    for place in halves:
        scale = _SCALES[name] * rng.uniform(0.5, 1.5, blocks.shape[:2])
        if place == 2:  # an offset: the mean of the codes becomes 0
            scale = _offsets(name, blocks)
        blocks[..., place : place + 2] = scale.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def stored(name: str, values: np.ndarray) -> np.ndarray:
    """[N, K] float32 in a plain type: [N, bytes] uint8."""
    if name == "F32":
        return _bytes(values)
    if name == "F16":
        return _bytes(values.astype(np.float16))
    assert name == "BF16"
    return _bytes((values.view(np.uint32) >> 16).astype(np.uint16))


def numbers(name: str, raw: np.ndarray) -> np.ndarray:
    """[N, bytes of a row] -> [N, K] float32."""
    if name == "F32":
        return raw.view(np.float32)
    if name == "F16":
        return raw.view(np.float16).astype(np.float32)
    if name == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    nbytes, elements, _ = LAYOUTS[name]
    blocks = raw.reshape(-1, nbytes)
    found = np.empty((len(blocks), elements), np.float32)
    _READERS[name](blocks, found)
    return found.reshape(raw.shape[0], -1)


def _bytes(values: np.ndarray) -> np.ndarray:
    """[N, K] -> [N, bytes] uint8."""
    return np.ascontiguousarray(values).view(np.uint8)


def _offsets(name: str, blocks: np.ndarray) -> np.ndarray:
    scale = blocks[..., 0:2].copy().view(np.float16)[..., 0].astype(np.float32)
    return scale * {"Q4_1": -7.5, "Q5_1": -15.5, "Q4_K": 7.5, "Q5_K": 15.5}[name]


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    return blocks[:, at : at + 2].copy().view(np.float16)[:, 0].astype(np.float32)


def _q4_0(b: np.ndarray, y: np.ndarray) -> None:
    for j in range(16):
        y[:, j] = ((b[:, 2 + j] & 0x0F).astype(np.int32) - 8) * _half(b, 0)
        y[:, j + 16] = ((b[:, 2 + j] >> 4).astype(np.int32) - 8) * _half(b, 0)


def _q4_1(b: np.ndarray, y: np.ndarray) -> None:
    for j in range(16):
        y[:, j] = (b[:, 4 + j] & 0x0F) * _half(b, 0) + _half(b, 2)
        y[:, j + 16] = (b[:, 4 + j] >> 4) * _half(b, 0) + _half(b, 2)


def _fifth(b: np.ndarray, at: int, j: int) -> np.ndarray:
    """Bit j of the 32-bit integer at byte `at`, as 16 or 0."""
    high = b[:, at : at + 4].copy().view(np.uint32)[:, 0]
    return (((high >> np.uint32(j)) & 1) << 4).astype(np.int32)


def _q5_0(b: np.ndarray, y: np.ndarray) -> None:
    for j in range(16):
        low, high = (b[:, 6 + j] & 0x0F).astype(np.int32), (b[:, 6 + j] >> 4).astype(np.int32)
        y[:, j] = ((low | _fifth(b, 2, j)) - 16) * _half(b, 0)
        y[:, j + 16] = ((high | _fifth(b, 2, j + 16)) - 16) * _half(b, 0)


def _q5_1(b: np.ndarray, y: np.ndarray) -> None:
    for j in range(16):
        low, high = (b[:, 8 + j] & 0x0F).astype(np.int32), (b[:, 8 + j] >> 4).astype(np.int32)
        y[:, j] = (low | _fifth(b, 4, j)).astype(np.float32) * _half(b, 0) + _half(b, 2)
        y[:, j + 16] = (high | _fifth(b, 4, j + 16)).astype(np.float32) * _half(b, 0) + _half(b, 2)


def _q8_0(b: np.ndarray, y: np.ndarray) -> None:
    for j in range(32):
        y[:, j] = b[:, 2 + j].view(np.int8) * _half(b, 0)


def _scale_min(b: np.ndarray, j: int) -> tuple[np.ndarray, np.ndarray]:
    """`get_scale_min_k4`, times the block's two numbers."""
    q = b[:, 4:16]
    if j < 4:
        scale, least = q[:, j] & 63, q[:, j + 4] & 63
    else:
        scale = (q[:, j + 4] & 0xF) | ((q[:, j - 4] >> 6) << 4)
        least = (q[:, j + 4] >> 4) | ((q[:, j] >> 6) << 4)
    return _half(b, 0) * scale, _half(b, 2) * least


def _q4_k(b: np.ndarray, y: np.ndarray) -> None:
    for j in range(4):  # chunks of 64
        for half in range(2):
            scale, least = _scale_min(b, 2 * j + half)
            for i in range(32):
                q = b[:, 16 + 32 * j + i]
                q = q >> 4 if half else q & 0xF
                y[:, 64 * j + 32 * half + i] = scale * q - least


def _q5_k(b: np.ndarray, y: np.ndarray) -> None:
    for j in range(4):
        for half in range(2):
            scale, least = _scale_min(b, 2 * j + half)
            for i in range(32):
                q = b[:, 48 + 32 * j + i]
                q = q >> 4 if half else q & 0xF
                fifth = (b[:, 16 + i] >> (2 * j + half)) & 1
                y[:, 64 * j + 32 * half + i] = scale * (q + 16 * fifth) - least


def _q6_k(b: np.ndarray, y: np.ndarray) -> None:
    scales = b[:, 192:208].copy().view(np.int8)
    for n in range(2):  # halves of 128
        for i in range(32):
            low, low32 = b[:, 64 * n + i], b[:, 64 * n + i + 32]
            high = b[:, 128 + 32 * n + i]
            codes = (
                (low & 0xF) | (((high >> 0) & 3) << 4),
                (low32 & 0xF) | (((high >> 2) & 3) << 4),
                (low >> 4) | (((high >> 4) & 3) << 4),
                (low32 >> 4) | (((high >> 6) & 3) << 4),
            )
            for part, code in enumerate(codes):
                scale = _half(b, 208) * scales[:, 8 * n + i // 16 + 2 * part]
                y[:, 128 * n + 32 * part + i] = scale * (code.astype(np.int32) - 32)


_READERS: dict[str, Callable[[np.ndarray, np.ndarray], None]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
