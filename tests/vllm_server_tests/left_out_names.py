"""Which tests a name on record leaves out. Pure."""


def leaves_out(key: str, name: str) -> bool:
    """Return whether it is this test, or one with parameters: all of them, or those that begin like the key's."""
    return name == key or name.startswith(key if "[" in key else f"{key}[")
