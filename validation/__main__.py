"""`python -m validation` is the command `decodegate`, for a source tree that is not installed."""

import sys

from validation.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
