"""Decide whether the cards of a container are still free. Pure."""

from collections.abc import Sequence

from ranktable_tools.containers.docker import Holder
from ranktable_tools.devices.kinds import DeviceKind
from ranktable_tools.errors import RanktableError


def require_free(kind: DeviceKind, device_ids: Sequence[str], holders: Sequence[Holder], *, share: bool) -> list[str]:
    """Return notes on what cannot be checked. Raises RanktableError naming the card and the container that has it.

    `share` allows two containers to have the same GPU; an NPU can be used by only one container.
    """
    for holder in holders:
        given = holder.npus if kind == "npu" else holder.gpus
        taken = [device_id for device_id in device_ids if device_id in given]
        if taken and (kind == "npu" or not share):
            cards = f"card{'s' if len(taken) > 1 else ''} {','.join(taken)}"
            remedy = "" if kind == "npu" else ", or pass --share-devices"
            raise RanktableError(
                f"{cards} of the table: the container {holder.name} has {'them' if len(taken) > 1 else 'it'} "
                f"already; stop that container (docker rm -f {holder.name}), or choose other cards{remedy}"
            )
    return [] if kind != "cuda" or share else [*_notes_of_unknown_use(holders)]


def _notes_of_unknown_use(holders: Sequence[Holder]) -> list[str]:
    notes = [f"the container {holder.name} sees every GPU: check that it uses none of the table's cards"
             for holder in holders if holder.all_gpus]  # fmt: skip
    for holder in holders:
        names = sorted(gpu for gpu in holder.gpus if not gpu.isdigit())
        if names:
            notes.append(f"the container {holder.name} has {', '.join(names)}: check that the table has none of these")
    return notes
