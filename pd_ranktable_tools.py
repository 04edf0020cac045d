"""The guide's ranktable tool as a module: `python -m pd_ranktable_tools --mode gen|merge|merge-local`."""

from pdserve.guide_command import main

if __name__ == "__main__":
    raise SystemExit(main())
