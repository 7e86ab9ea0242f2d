"""Sizes in bytes as people write them."""

_BYTE_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_bytes(text: str | int) -> int:
    """Bytes of "1GiB", "512MiB", "2gb" or a plain count. ValueError if it is none of these."""
    if isinstance(text, int):
        return text
    stripped = text.strip()
    number = stripped.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = stripped[len(number) :].strip().lower() or "b"
    if unit not in _BYTE_UNITS:
        raise ValueError(f"unknown unit in {text!r}: use a count of bytes or KiB, MiB, GiB, KB, MB, GB")
    try:
        return int(float(number) * _BYTE_UNITS[unit])
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{text!r} is not a size in bytes") from error
