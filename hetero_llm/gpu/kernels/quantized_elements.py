"""What the codes of quantized elements stand for, computed in registers inside of kernels.

Codes come in *lanes* of 16 bits, which hold two codes of 8 bits or four of 4: lane l of a chunk of
columns holds its columns l, l + L and so on, lowest bits first, where L is the number of lanes in a
chunk. The first codes of all lanes are the chunk's first *part*, L neighbours. So two lanes in one
32-bit register give a pair of neighbours of each part, and a part is a tile of the same shape as
its lanes: nothing moves between threads.

On a GPU a conversion is a few lines of PTX on one such register; in Triton's interpreter the same
functions are plain arithmetic (`tests.gpu.kernels.test_quantized_elements` executes the PTX on the
host and compares all codes). Instructions for an element, counted in the PTX; a multiprocessor of
an H200 at 1.75 GHz that reads 4.2 TB/s with all others has 7 for each byte:

| kind | to bfloat16 | how |
|---|---|---|
| fp8 | 2.0 | `cvt` to float16 (exact), and by way of float32 |
| int8 | 2.0 | byte b under the high byte of 128.0: (128 + b % 128) - (128 + 128 * (b >= 128)) |
| int4 | 0.9, and 0.5 for the zero point | code c in the mantissa of 128.0 is 128 + c (Marlin) |
| fp4 | 2.4 | its bits moved to those of bfloat16, times the difference of the exponents' biases |
| nf4 | 3.3 | its two bytes from tables in registers, four elements at a time (`prmt`) |
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from hetero_llm.gpu.kernels.launch import IN_INTERPRETER
from hetero_llm.quantization.matrix import FP4_VALUES, NF4_VALUES, Kind

KIND_CODES: dict[Kind, int] = {"fp8": 0, "int8": 1, "int4": 2, "fp4": 3, "nf4": 4}
"""Kinds as kernels have them; those of 4 bits come last."""

FP8, INT8, INT4, FP4, NF4 = (tl.constexpr(code) for code in range(5))


def parts_asm(kind: Kind, bits: str) -> str:
    """PTX from two lanes, in the last register, to one register for each part.

    Codes of int4 come out plus 128 (bf16) or 1024 (f16): what their bits are in the mantissa of.

    Args:
        bits: of the values, "bf16" or "f16".
    """
    lines = {
        "fp8": _fp8_lines, "int8": _int8_lines, "int4": _int4_lines, "fp4": _fp4_lines,
        "nf4": _nf4_lines,
    }[kind](bits)  # fmt: skip
    return "{\n" + "\n".join(lines) + "\n}"


def words_asm(kind: Kind) -> str:
    """PTX from four bytes ($4) of fp8 or int8 to four float32 ($0 to $3)."""
    if kind == "fp8":
        lines = [
            ".reg .b16 l, h, a, b, c, d;",
            ".reg .b32 p, q;",
            "mov.b32 {l, h}, $4;",
            *("cvt.rn.f16x2.e4m3x2 p, l;", "cvt.rn.f16x2.e4m3x2 q, h;"),
            *("mov.b32 {a, b}, p;", "mov.b32 {c, d}, q;"),
            *("cvt.f32.f16 $0, a;", "cvt.f32.f16 $1, b;"),
            *("cvt.f32.f16 $2, c;", "cvt.f32.f16 $3, d;"),
        ]
    else:
        # Byte b, as b + 128, under 2^23; then less 2^23 + 128.
        lines = [
            ".reg .b32 u, t, k;",
            *("mov.b32 k, 0x4b000000;", "xor.b32 u, $4, 0x80808080;"),
        ]
        for byte in range(4):
            lines += [f"prmt.b32 t, u, k, 0x744{byte};", f"sub.f32 ${byte}, t, 0f4B000080;"]
    return "{\n" + "\n".join(lines) + "\n}"


def _fp8_lines(bits: str) -> list[str]:
    lines = [
        *(".reg .b16 l, h, a, b, c, d;", ".reg .b32 p, q;", ".reg .f32 x, y;"),
        "mov.b32 {l, h}, $2;",
        *("cvt.rn.f16x2.e4m3x2 p, l;", "cvt.rn.f16x2.e4m3x2 q, h;"),
    ]
    if bits == "f16":
        return [*lines, "prmt.b32 $0, p, q, 0x5410;", "prmt.b32 $1, p, q, 0x7632;"]
    return [
        *lines,
        *("mov.b32 {a, b}, p;", "mov.b32 {c, d}, q;"),
        *("cvt.f32.f16 x, a;", "cvt.f32.f16 y, c;", "cvt.rn.bf16x2.f32 $0, y, x;"),
        *("cvt.f32.f16 x, b;", "cvt.f32.f16 y, d;", "cvt.rn.bf16x2.f32 $1, y, x;"),
    ]


def _int8_lines(bits: str) -> list[str]:
    if bits == "f16":  # b + 128 in the mantissa of 1024
        return [
            ".reg .b32 u, t, k, z;",
            *("mov.b32 k, 0x64646464;", "mov.b32 z, 0x64806480;", "xor.b32 u, $2, 0x80808080;"),
            *("prmt.b32 t, u, k, 0x4240;", "sub.f16x2 $0, t, z;"),
            *("prmt.b32 t, u, k, 0x4341;", "sub.f16x2 $1, t, z;"),
        ]
    lines = [".reg .b32 t, a, b, k;", "mov.b32 k, 0x43434343;"]
    for part, bytes_of_lanes in enumerate(("0x4240", "0x4341")):
        lines += [
            f"prmt.b32 t, $2, k, {bytes_of_lanes};",
            *("and.b32 a, t, 0xff7fff7f;", "and.b32 b, t, 0xff80ff80;"),
            f"sub.bf16x2 ${part}, a, b;",
        ]
    return lines


def _int4_lines(bits: str) -> list[str]:
    base = "0x43004300" if bits == "bf16" else "0x64006400"
    lines = [".reg .b32 t;", f"lop3.b32 $0, $4, 0x000f000f, {base}, 0xea;"]
    for part in (1, 2, 3):
        lines += [
            f"shr.b32 t, $4, {4 * part};",
            f"lop3.b32 ${part}, t, 0x000f000f, {base}, 0xea;",
        ]
    return lines


def _fp4_lines(bits: str) -> list[str]:
    """e2m1's exponent becomes the low bits of a wider one, which has another bias; the product with
    a power of two makes up for it and is exact, also for the one subnormal."""
    # The place of e2m1's lowest bit, those of its three bits, the power of two.
    place, mask, factor = (
        (6, "0x01c001c0", "0x7e807e80") if bits == "bf16" else (9, "0x0e000e00", "0x74007400")
    )
    lines = [".reg .b32 s, t, f;", f"mov.b32 f, {factor};"]
    for part in range(4):
        left = place - 4 * part
        shift = f"shl.b32 t, $4, {left};" if left > 0 else f"shr.b32 t, $4, {-left};"
        sign = f"shl.b32 s, $4, {12 - 4 * part};" if part < 3 else "mov.b32 s, $4;"
        lines += [
            *(shift, f"and.b32 t, t, {mask};", sign),
            "lop3.b32 t, s, 0x80008000, t, 0xea;",
            f"mul.{bits}x2 ${part}, t, f;",
        ]
    return lines


def _nf4_lines(bits: str) -> list[str]:
    low, high = _split_bytes(NF4_VALUES, bits)
    tables = {
        "a": low[:4], "b": low[4:8], "c": low[8:12], "d": low[12:],
        "e": high[:4], "f": high[4:8], "g": high[8:12], "h": high[12:],
    }  # fmt: skip
    lines = [
        ".reg .b32 s, i, m, k, u, v, w, x, a, b, c, d, e, f, g, h;",
        *(
            f"mov.b32 {name}, 0x{int.from_bytes(bytes(entries), 'little'):08x};"
            for name, entries in tables.items()
        ),
        "mov.b32 k, 0x0000ff00;",
    ]
    for first, bytes_of_lanes in ((0, "0x0020"), (2, "0x0031")):
        lines += [
            # Four codes in the low half; bit 3 of a selector means something else to prmt.
            f"prmt.b32 s, $4, 0, {bytes_of_lanes};",
            "and.b32 i, s, 0x7777;",
            *("prmt.b32 u, a, b, i;", "prmt.b32 v, c, d, i;"),
            *("prmt.b32 w, e, f, i;", "prmt.b32 x, g, h, i;"),
            *("shr.b32 m, s, 3;", "and.b32 m, m, 0x1111;", "prmt.b32 m, k, k, m;"),
            *("lop3.b32 u, m, v, u, 0xca;", "lop3.b32 w, m, x, w, 0xca;"),
            f"prmt.b32 ${first}, u, w, 0x6240;",
            f"prmt.b32 ${first + 1}, u, w, 0x7351;",
        ]
    return lines


def _split_bytes(values: Sequence[float], bits: str) -> tuple[list[int], list[int]]:
    """Low and high bytes of the values as 16-bit floats."""
    rounded = [_round(value, bits) for value in values]
    if bits == "bf16":
        codes = [struct.unpack("<I", struct.pack("<f", value))[0] >> 16 for value in rounded]
    else:
        codes = [struct.unpack("<H", struct.pack("<e", value))[0] for value in rounded]
    return [code & 255 for code in codes], [code >> 8 for code in codes]


def _round(value: float, bits: str) -> float:
    return torch.tensor(value, dtype=torch.bfloat16 if bits == "bf16" else torch.float16).item()


# Kernels may use constants alone. By kind:
_BF16_ASM, _F16_ASM = (
    tl.constexpr(tuple(parts_asm(kind, bits) for kind in KIND_CODES)) for bits in ("bf16", "f16")
)
_WORDS_ASM = tl.constexpr((words_asm("fp8"), words_asm("int8")))
_FP4_VALUES = tl.constexpr(FP4_VALUES)
_NF4_VALUES = tl.constexpr(NF4_VALUES)
_NF4_VALUES_BF16, _NF4_VALUES_F16 = (
    tl.constexpr(tuple(_round(value, bits) for value in NF4_VALUES)) for bits in ("bf16", "f16")
)


@triton.jit
def _float_of_fp8(code):
    """Codes from 0 to 255 of e4m3fn -> float32."""
    exponent = (code >> 3) & 15
    mantissa = (code & 7).to(tl.float32)
    mantissa = tl.where(exponent == 0, mantissa, mantissa + 8.0)
    size = mantissa * tl.exp2(tl.maximum(exponent, 1).to(tl.float32) - 10.0)
    size = tl.where((code & 127) == 127, float("nan"), size)
    return tl.where(code >= 128, -size, size)


@triton.jit
def plain_part(lanes, J: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Part J of lanes (of any integer type, higher bits unused) in float32, by arithmetic; values
    of nf4 rounded to DTYPE, codes of int4 as in `parts_asm` (plus 128 for float32)."""
    if KIND == FP8:
        return _float_of_fp8((lanes.to(tl.int32) >> (8 * J)) & 255)
    elif KIND == INT8:
        return (lanes.to(tl.int32) >> (8 * J)).to(tl.int8).to(tl.float32)
    elif KIND == INT4:
        code = (lanes.to(tl.int32) >> (4 * J)) & 15
        return code.to(tl.float32) + (1024.0 if tl.float16 == DTYPE else 128.0)
    else:
        if KIND == FP4:
            table: tl.constexpr = _FP4_VALUES
        elif tl.bfloat16 == DTYPE:
            table: tl.constexpr = _NF4_VALUES_BF16
        elif tl.float16 == DTYPE:
            table: tl.constexpr = _NF4_VALUES_F16
        else:
            table: tl.constexpr = _NF4_VALUES
        code = (lanes.to(tl.int32) >> (4 * J)) & 15
        value = tl.zeros(code.shape, tl.float32)
        for entry in tl.static_range(16):
            value = tl.where(code == entry, table[entry], value)
        return value


@triton.jit
def _four_registers(asm: tl.constexpr, words, TYPE: tl.constexpr, PACK: tl.constexpr):
    """The four results of `asm` for a register of PACK numbers each."""
    return tl.inline_asm_elementwise(
        asm,
        "=r,=r,=r,=r,r",
        [words],
        dtype=(TYPE.value, TYPE.value, TYPE.value, TYPE.value),
        is_pure=True,
        pack=PACK,
    )


@triton.jit
def parts(lanes, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """int16 lanes -> a tile of DTYPE (float32 in the interpreter) for each part; of int4 the code
    plus 128 (bfloat16) or 1024 (float16)."""
    asm: tl.constexpr = _BF16_ASM[KIND] if tl.bfloat16 == DTYPE else _F16_ASM[KIND]
    if IN_INTERPRETER:
        values = ()
        for part in tl.static_range(2 if KIND < INT4 else 4):
            values = values + (plain_part(lanes, part, KIND, DTYPE),)
        return values
    elif KIND < INT4:
        return tl.inline_asm_elementwise(
            asm, "=r,=r,r", [lanes], dtype=(DTYPE.value, DTYPE.value), is_pure=True, pack=2
        )
    else:
        return _four_registers(asm, lanes, DTYPE, 2)


@triton.jit
def _two_by_two(NAME: tl.constexpr, left, right, DTYPE: tl.constexpr):
    """An instruction for two numbers of 16 bits in a register each."""
    TYPE: tl.constexpr = "bf16x2" if tl.bfloat16 == DTYPE else "f16x2"
    return tl.inline_asm_elementwise(
        NAME + "." + TYPE + " $0, $1, $2;",
        "=r,r,r",
        [left, right],
        dtype=left.dtype,
        is_pure=True,
        pack=2,
    )


@triton.jit
def subtract(values, zero, DTYPE: tl.constexpr):
    """values - zero, two by two: exact for codes of int4 and their zero points."""
    if IN_INTERPRETER:
        return values - zero.to(tl.float32)
    else:
        return _two_by_two("sub", values, zero, DTYPE)


@triton.jit
def multiply(values, factor, DTYPE: tl.constexpr):
    """values * factor, two by two, rounded to DTYPE (not in the interpreter)."""
    if IN_INTERPRETER:
        return values * factor.to(tl.float32)
    else:
        return _two_by_two("mul", values, factor, DTYPE)


@triton.jit
def unpack_words(words, KIND: tl.constexpr):
    """int32 words of two lanes -> what `pairs_of_part` takes: 8 bits: float32 values of the four
    bytes; 4 bits: a word of two bfloat16 for each part; in the interpreter the words themselves."""
    if IN_INTERPRETER:
        return words, words, words, words
    else:
        asm: tl.constexpr = _WORDS_ASM[KIND] if KIND < INT4 else _BF16_ASM[KIND]
        TYPE: tl.constexpr = tl.float32 if KIND < INT4 else tl.int32
        return _four_registers(asm, words, TYPE, 1)


@triton.jit
def pairs_of_part(unpacked, J: tl.constexpr, KIND: tl.constexpr):
    """Float32 values in part J of the first and of the second lane of each word; of int4 128 plus
    the code, of nf4 rounded to bfloat16.

    Args:
        unpacked: Of `unpack_words`.
    """
    if IN_INTERPRETER:
        low = plain_part(unpacked[J] & 65535, J, KIND, tl.bfloat16)
        high = plain_part((unpacked[J] >> 16) & 65535, J, KIND, tl.bfloat16)
    elif KIND < INT4:
        low = unpacked[J]
        high = unpacked[J + 2]
    else:
        low = (unpacked[J] << 16).to(tl.float32, bitcast=True)
        high = (unpacked[J] & -65536).to(tl.float32, bitcast=True)
    return low, high
