"""Posteriors of Pyro programs: `fit` for one data set, `amortize` for any, and a guide for SVI.

Glossary, one word per concept:

* site: a ``pyro.sample`` statement; latent or observed. An instance is a site at one index of each of its plates.
* network: `BayesNet`, which sites depend on which, as read off a run of the model (`extract_bayesnet`).
* inverse: `Inverse`, the network of a guide: for every latent, the parents that it is sampled given.
* faithful: asserts no independence that the model lacks. Minimal: no parent can be left out.
* elimination order: the reverse of the sampling order. Fill-in: a dependence that elimination adds.
* predictive: a latent without observed descendants, which is drawn from the model's own conditional.
* joint: plates whose instances depend on each other given the data; pooled: read as a set of instances.
* factor: the guide's conditional of one latent. Family: what kind of distribution that is (`register_family`).
* anchor: the model's own conditional, to which a factor's location and scale are relative.
* covariate: what differs between the instances of a plate without being a site.
* compilation: training a guide on the model's own simulations (`InferenceCompilation`), for all data sets at once.
* weight: p(latents, data) / q(latents | data) of a draw, by which `importance_sample` corrects the guide.
"""

from pyro_nami.amortize import AmortizedPosterior, amortize
from pyro_nami.annealing import annealed_importance_sampling
from pyro_nami.checking import calibrate, misspecification
from pyro_nami.factors import (
    Bound,
    Family,
    flow,
    mixture,
    register_bound,
    register_family,
    relaxed,
)
from pyro_nami.fit import Interrupted, Posterior, Verdict, fit
from pyro_nami.graph import (
    BayesNet,
    Inverse,
    Site,
    Verification,
    fully_connected,
    mean_field,
    nami,
    nami_steps,
    stuhlmueller,
    verify_inverse,
)
from pyro_nami.guide.nami import AutoNaMIGuide
from pyro_nami.inference import (
    InferenceCompilation,
    WeightedSamples,
    from_simulator,
    importance_sample,
)
from pyro_nami.reading.extraction import extract_bayesnet
from pyro_nami.show.render import render

__version__ = "0.2.0"  # the one place: pyproject.toml reads it from here

__all__ = [
    "AmortizedPosterior",
    "AutoNaMIGuide",
    "BayesNet",
    "Bound",
    "Family",
    "InferenceCompilation",
    "Interrupted",
    "Inverse",
    "Posterior",
    "Site",
    "Verdict",
    "Verification",
    "WeightedSamples",
    "__version__",
    "amortize",
    "annealed_importance_sampling",
    "calibrate",
    "extract_bayesnet",
    "fit",
    "flow",
    "from_simulator",
    "fully_connected",
    "importance_sample",
    "mean_field",
    "misspecification",
    "mixture",
    "nami",
    "nami_steps",
    "register_bound",
    "register_family",
    "relaxed",
    "render",
    "stuhlmueller",
    "verify_inverse",
]
