"""A rank process on the fake device: the kind is added to the process's table before the product's rank starts.

python -P -m tests.devices.fake_rank CHANNEL_FD PARENT_PID     (PYTHONPATH: the repository)
"""

import sys

from devices import table
from instance.rank_process import main
from tests.devices.fake_device import CardKind

if __name__ == "__main__":
    table.KINDS["fake"] = CardKind()
    sys.exit(main(sys.argv[1:]))
