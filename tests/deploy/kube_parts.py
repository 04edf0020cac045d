"""The partial tables that pods write, as `ranktable gen` makes them."""

from ranktable_tools.dialects import modelarts
from ranktable_tools.generate import GenRequest, build
from ranktable_tools.tables import Role


def part(role: Role, ip: str, devices: str = "0", port: int = 8088) -> str:
    """Return the text of the part of one pod."""
    ids = (tuple(devices.split(",")),)
    request = GenRequest(
        ids if role == "prefill" else (), ids if role == "decode" else (), role == "scheduler", ip,
        () if role == "scheduler" else (port,),
    )  # fmt: skip
    return modelarts.global_text(build(request, dict.fromkeys(ids[0], ip)).part)
