"""Data types as traces write them."""

from __future__ import annotations

_DTYPES = {
    1: "char signedchar int8 s8 u8 byte uint8 unsignedchar bool pred",
    2: "half float16 f16 bfloat16 bf16 short shortint int16 s16 u16 uint16",
    4: "float float32 f32 int int32 s32 u32 uint32",
    8: "double float64 f64 long longint longlongint int64 s64 u64 uint64 complexfloat c64",
    16: "c128 complexdouble",
}
"""Bytes of an element -> its data types."""
DTYPE_BYTES = {name: size for size, names in _DTYPES.items() for name in names.split()}


def bytes_per_element(dtype: str | None) -> int | None:
    """Return the bytes of one element; None for an unknown data type (never a guess)."""
    if not dtype:
        return None
    name = dtype.rsplit("::", 1)[-1].replace(" ", "").replace("_", "").lower()
    if name.startswith("float8") or name.startswith("f8e"):
        return 1
    return DTYPE_BYTES.get(name)
