"""Parse Retry-After headers."""

_MAX_DIGITS = 9


def retry_after_s(value: str) -> float:
    """Return the header's seconds; 0 for a date, its other form, and for numbers of ten or more digits."""
    return float(value) if value.isascii() and value.isdigit() and len(value) <= _MAX_DIGITS else 0.0
