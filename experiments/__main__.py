"""`python -m experiments`."""

import sys

if __name__ == "__main__":  # processes that are spawned import this module too
    try:
        from experiments.frame.cli import main

        sys.exit(main())
    except ModuleNotFoundError as error:
        if error.name not in ("pandas", "matplotlib"):
            raise
        print(f"error: there is no {error.name}: pip install '.[experiments]'", file=sys.stderr)
        sys.exit(1)
