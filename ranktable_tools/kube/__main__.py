"""`python -P -m ranktable_tools.kube`: the commands of a pod's containers."""

import sys

from ranktable_tools.kube.command_line import main

if __name__ == "__main__":
    sys.exit(main())
