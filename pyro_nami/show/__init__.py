"""Pictures of networks (`render`), and the command line, ``python -m pyro_nami``."""

from pyro_nami.show.commands import main
from pyro_nami.show.render import render

__all__ = ["main", "render"]
