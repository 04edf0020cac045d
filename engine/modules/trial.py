"""How a module is tried that runs by a device's ops: on so many random rows, with so much difference allowed."""

import torch

ROWS = 19
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Of the difference's norm over that of what the module makes of its rows."""
