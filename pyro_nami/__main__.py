"""``python -m pyro_nami``: the command line of `pyro_nami.cli`."""

import sys

from pyro_nami.cli import main

if __name__ == "__main__":
    sys.exit(main())
