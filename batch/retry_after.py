"""What a server asks for by Retry-After."""

_MOST_DIGITS = 9


def retry_after_s(told: str) -> float:
    """Return the seconds it says; its other form, a date, counts as none, as does one of ten digits."""
    return float(told) if told.isascii() and told.isdigit() and len(told) <= _MOST_DIGITS else 0.0
