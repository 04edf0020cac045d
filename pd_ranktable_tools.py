"""The guide's ranktable tool as a module: `python -m pd_ranktable_tools --mode gen|merge|merge-local`."""

from ranktable_tools.guide import main

if __name__ == "__main__":
    raise SystemExit(main())
