"""The child of kernel checks on a fake device: the kind is added to its process's table first.

python -P -m tests.engine.fake_kernel_device     (PYTHONPATH: the repository)
"""

import sys
from dataclasses import replace

from devices import table
from engine.kernel_child import main
from tests.devices.fake_device import TRAITS, FakeKind

if __name__ == "__main__":
    table.KINDS["fake"] = FakeKind(replace(TRAITS, attention="cuda"))
    sys.exit(main())
