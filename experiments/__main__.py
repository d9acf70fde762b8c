"""`python -m experiments`."""

import sys

from experiments.frame.cli import main

if __name__ == "__main__":  # processes that are spawned import this module too
    sys.exit(main())
