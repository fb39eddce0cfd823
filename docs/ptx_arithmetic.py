"""The opcodes of PTX that compute a register of each thread from its other registers.

Each names its section of NVIDIA's PTX ISA: https://docs.nvidia.com/cuda/parallel-thread-execution/#<section>.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Lanes = NDArray[Any]  # one element per thread


def pack(low: Lanes, high: Lanes) -> Lanes:
    """Return two registers of 16 or 32 bits in one."""
    packed: Lanes = np.stack([low, high], 1).view(f"u{2 * low.itemsize}")
    return packed[:, 0]


def to_half(x: Lanes, kind: str) -> Lanes:
    """Round float32 to the nearest float16 or bfloat16, ties to even. Return the bits."""
    if kind == "f16":
        return x.astype(np.float16).view(np.uint16)
    bits = x.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> 16 & 1) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def from_half(bits: Lanes, kind: str) -> Lanes:
    """Return the bits of float16 or bfloat16 as float32."""
    if kind == "f16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def high(a: Lanes) -> Lanes:
    """Return the upper half of the bits."""
    return (a >> 4 * a.itemsize).astype(f"{a.dtype.kind}{a.itemsize // 2}")


def divide(a: Lanes, b: Lanes) -> Lanes:
    """Divide integers and truncate. Float64 is exact enough for 32 bits. PTX does not say what x / 0 is."""
    return np.trunc(a / np.where(b == 0, 1, b).astype(np.float64)).astype(a.dtype)


def extract(a: Lanes, start: Lanes, length: Lanes) -> Lanes:
    """Return `length` bits from `start`. Of a signed number, the highest of them is the sign."""
    start, length = start.astype(np.int64), length.astype(np.int64)
    field = a.astype(np.int64) >> start & (1 << length) - 1
    is_negative = (a.dtype.kind == "i") & (field >> np.maximum(length - 1, 0) & 1 == 1)
    return np.where(is_negative, field - (1 << length), field).astype(a.dtype)


def permute(a: Lanes, b: Lanes, selector: Lanes) -> Lanes:
    """Pick four of the eight bytes of a, the lower ones, and b. A digit above 7 picks a sign."""
    held = np.stack([a, b], 1).view(np.uint8).astype(np.int8)
    digits = selector[:, None].astype(np.int64) >> 4 * np.arange(4) & 15
    chosen = np.take_along_axis(held, digits & 7, 1)
    picked = np.where(digits & 8, chosen >> 7, chosen).astype(np.uint8)
    return np.ascontiguousarray(picked).view(np.uint32)[:, 0]


def shift(shift: Any) -> Any:
    """Return a shift by at most the width, after which only the sign is left, as in NumPy."""
    return lambda a, by: shift(a, np.minimum(by, 64).astype(a.dtype))


def in_halves(compute: Any, kind: str) -> Any:
    """Return an operation on registers of 16 bits, or on both halves of registers of 32."""

    def execute(*registers: Lanes) -> Lanes:
        halves = (from_half(np.ascontiguousarray(x).view(np.uint16), kind) for x in registers)
        exact = compute(*(x.astype(np.float64) for x in halves))
        return to_half(exact.astype(np.float32), kind).view(registers[0].dtype)

    return execute


INTEGER, FLOAT = "integer-arithmetic-instructions-", "floating-point-instructions-"
HALF = "half-precision-floating-point-instructions-"
LOGIC, SELECT = "logic-and-shift-instructions-", "comparison-and-selection-instructions-"
MOVE = "data-movement-and-conversion-instructions-"
INT, BIT, ANY = "([su](?:16|32|64))", "(pred|b16|b32|b64)", "([bsuf](?:16|32|64))"
INT32 = -(2**31), 2**31 - 1
WIDER = np.longdouble  # in which products of float64 are nearly exact, as before the sum of a real fma
TINY = np.finfo(np.float32).tiny  # .ftz flushes smaller numbers to zero
# Opcode, the types of its inputs (t is the opcode's, w is widened, W is wide), section, meaning.
TABLE: list[tuple[str, str, str, Any]] = [
    ("add." + INT, "tt", INTEGER + "add", np.add),
    ("sub." + INT, "tt", INTEGER + "sub", np.subtract),
    ("mul.lo." + INT, "tt", INTEGER + "mul", np.multiply),
    ("mul.wide.([su](?:16|32))", "ww", INTEGER + "mul", np.multiply),
    ("mul.hi.([su](?:16|32))", "ww", INTEGER + "mul", lambda a, b: high(a * b)),
    ("mad.lo." + INT, "ttt", INTEGER + "mad", lambda a, b, c: a * b + c),
    ("mad.wide.([su](?:16|32))", "wwW", INTEGER + "mad", lambda a, b, c: a * b + c),
    ("div.([su]32)", "tt", INTEGER + "div", divide),
    ("rem.([su]32)", "tt", INTEGER + "rem", lambda a, b: a - divide(a, b) * b),
    ("min." + INT, "tt", INTEGER + "min", np.minimum),
    ("max." + INT, "tt", INTEGER + "max", np.maximum),
    ("neg.(s32|s64)", "t", INTEGER + "neg", np.negative),
    ("bfe.([su]32)", "tuu", INTEGER + "bfe", extract),
    *(
        (f"{name}(?:.rn)?.{kind}{width}()", letters[bool(width)] * num, HALF + name, in_halves(compute, kind))
        for name, num, compute in (
            ("add", 2, np.add),
            ("sub", 2, np.subtract),
            ("mul", 2, np.multiply),
            ("fma", 3, lambda a, b, c: a * b + c),
        )
        for letters in ("hu",)
        for kind in ("f16", "bf16")
        for width in ("", "x2")
    ),
    ("add(?:.rn)?.(f32|f64)", "tt", FLOAT + "add", np.add),
    ("sub(?:.rn)?.(f32|f64)", "tt", FLOAT + "sub", np.subtract),
    ("mul(?:.rn)?.(f32|f64)", "tt", FLOAT + "mul", np.multiply),
    ("fma.rn.(f32|f64)", "ttt", FLOAT + "fma", lambda a, b, c: (a.astype(WIDER) * b + c).astype(a.dtype)),
    ("div.rn.(f32)", "tt", FLOAT + "div", np.divide),
    ("div.full.(f32)", "tt", FLOAT + "div", lambda a, b: a * (np.float32(1) / b)),  # not rounded correctly
    ("min.(f32)", "tt", FLOAT + "min", np.fmin),  # the other one, if one is NaN
    ("max.(f32)", "tt", FLOAT + "max", np.fmax),
    ("neg.(f32|f64)", "t", FLOAT + "neg", np.negative),
    ("ex2.approx.ftz.(f32)", "t", FLOAT + "ex2", lambda a: np.exp2(a) * (np.exp2(a) >= TINY)),
    ("rsqrt.approx.ftz.(f32)", "t", FLOAT + "rsqrt", lambda a: np.float32(1) / np.sqrt(a)),
    ("and." + BIT, "tt", LOGIC + "and", np.bitwise_and),
    ("or." + BIT, "tt", LOGIC + "or", np.bitwise_or),
    ("xor." + BIT, "tt", LOGIC + "xor", np.bitwise_xor),
    ("popc.b32()", "u", INTEGER + "popc", lambda a: np.bitwise_count(a).astype(np.uint32)),
    ("not." + BIT, "t", LOGIC + "not", np.invert),
    ("shl." + BIT, "tu", LOGIC + "shl", shift(np.left_shift)),
    ("shr." + ANY, "tu", LOGIC + "shr", shift(np.right_shift)),
    ("selp." + ANY, "ttp", SELECT + "selp", lambda a, b, p: np.where(p, a, b)),
    ("setp.eq." + ANY, "tt", SELECT + "setp", np.equal),  # of floats, false for NaN
    ("setp.(?:ne.([bsu](?:16|32|64))|neu.(f32))", "tt", SELECT + "setp", np.not_equal),  # neu: true for NaN
    ("setp.ne.(f32)", "tt", SELECT + "setp", lambda a, b: (a < b) | (a > b)),  # false for NaN
    ("setp.lt." + ANY, "tt", SELECT + "setp", np.less),
    ("setp.le." + ANY, "tt", SELECT + "setp", np.less_equal),
    ("setp.gt." + ANY, "tt", SELECT + "setp", np.greater),
    ("setp.ge." + ANY, "tt", SELECT + "setp", np.greater_equal),
    ("prmt.b32()", "uuu", MOVE + "prmt", permute),
    ("cvt.s8.s32()", "u", MOVE + "cvt", lambda a: a.astype(np.int8).astype(np.int16)),
    ("cvt.s16.s8()", "h", MOVE + "cvt", lambda a: a.astype(np.int8).astype(np.int16)),
    ("cvt.f64.(f32)", "t", MOVE + "cvt", lambda a: a.astype(np.float64)),
    ("cvt.f32.f16()", "h", MOVE + "cvt", lambda a: from_half(a, "f16")),
    ("cvt.f32.bf16()", "h", MOVE + "cvt", lambda a: from_half(a, "bf16")),
    ("cvt.rn.f16.(f32)", "t", MOVE + "cvt", lambda a: to_half(a, "f16")),
    ("cvt.rn.bf16.(f32)", "t", MOVE + "cvt", lambda a: to_half(a, "bf16")),
    ("cvt.rn.f16x2.(f32)", "tt", MOVE + "cvt", lambda a, b: pack(to_half(b, "f16"), to_half(a, "f16"))),
    ("cvt.rn.bf16x2.(f32)", "tt", MOVE + "cvt", lambda a, b: pack(to_half(b, "bf16"), to_half(a, "bf16"))),
    ("cvt.rn.f32." + INT, "t", MOVE + "cvt", lambda a: a.astype(np.float32)),
    (
        "cvt.rzi.s32.(f32)",
        "t",
        MOVE + "cvt",
        lambda a: np.nan_to_num(a.astype(float)).clip(*INT32).astype("i4"),
    ),
    *(
        (f"cvt.{to}{8 * size}." + INT, "t", MOVE + "cvt", lambda a, dtype=f"{kind}{size}": a.astype(dtype))
        for to, kind in ("ui", "si")
        for size in (2, 4, 8)
    ),
]
