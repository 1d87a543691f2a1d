"""One call to a posterior: derived, located, learned where need be, and checked."""

from pyro_nami.fit.fitting import Interrupted, fit
from pyro_nami.fit.posterior import Posterior
from pyro_nami.fit.verdict import Verdict

__all__ = ["Interrupted", "Posterior", "Verdict", "fit"]
