"""``python -m pyro_nami``: the command line of `pyro_nami.show`."""

import sys

from pyro_nami.show.commands import main

if __name__ == "__main__":
    sys.exit(main())
