"""`python -m conquiet` is the command `conquiet`."""

import sys

from conquiet.cli import main

if __name__ == "__main__":
    sys.exit(main())
