import sys

from pagedjax.cli import main

sys.exit(main())
