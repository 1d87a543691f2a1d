"""The command line, ``python -m pyro_nami``: what extraction and inversion find in a model that lies in a file."""

from pyro_nami.cli.commands import main

__all__ = ["main"]
