"""Parse Retry-After headers."""

_MAX_DIGITS = 9


def retry_after_s(value: str) -> float:
    """Return the header's seconds; a date, its other form, counts as 0, as do ten digits and more."""
    return float(value) if value.isascii() and value.isdigit() and len(value) <= _MAX_DIGITS else 0.0
