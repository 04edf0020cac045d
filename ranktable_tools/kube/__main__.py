"""`python -P -m ranktable_tools.kube`: what the containers of a pod run."""

import sys

from ranktable_tools.kube.command_line import main

if __name__ == "__main__":
    sys.exit(main())
