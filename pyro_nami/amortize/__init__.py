"""From a model to the posteriors of all its data sets, in one call."""

from pyro_nami.amortize.amortizing import amortize
from pyro_nami.amortize.posterior import AmortizedPosterior
from pyro_nami.amortize.soap import SOAP

__all__ = ["SOAP", "AmortizedPosterior", "amortize"]
