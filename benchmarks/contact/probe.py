"""Print as one line of JSON whether a kind of device is usable here, and how many are visible.

A broken driver may make this process hang.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from engine.torch_start import name_backends


def main(kind: str) -> None:
    """Probe one kind."""
    name_backends()
    from devices.table import find_kind

    found = find_kind(kind)
    lacking = found.lacking()
    if lacking is None:
        import torch

        device = found.open()
        count = 1 if found.traits.pools_on_host else torch.get_device_module(device.torch_device).device_count()
        print(json.dumps({"count": count, "described": device.describe()}))
    else:
        node = "a device node of this kind is" if found.sees_card() else "no device node of this kind is"
        print(json.dumps({"lacking": f"{node} in /dev; {lacking}"}))


if __name__ == "__main__":
    main(sys.argv[1])
