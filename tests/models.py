"""A catalogue of models with known answers, for suites that run over all of them.

`CASES` maps a name to a `Case`: a model, the arguments it is called with, and what its guide must look like. Where the
posterior or the evidence is known exactly, it comes from here as well, and by other means than the package's:
`LinearGaussian` conditions a joint normal by linear algebra, the rest are textbook conjugate pairs and quadrature.
Models follow the default dtype at the time that they are called; `Case.arguments` makes the data accordingly.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import math
from collections.abc import Callable, Mapping
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.ops.indexing import Vindex
from pyro.optim import Adam
from torch import Tensor

from pyro_nami import AutoNaMIGuide
from pyro_nami.program.isolation import untouched

SCHOOLS_Y = [28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0]
SCHOOLS_SIGMA = [15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and what is known of it.

    Attributes:
        model: the model; its arguments are data.
        data: a function that makes the arguments.
        shapes: latent -> shape of its value, in model order.
        nesting: plate dims of the model.
        reparametrized: whether every latent is continuous.
    """

    model: Callable
    data: Callable[[], tuple]
    shapes: Mapping[str, tuple[int, ...]]
    nesting: int = 0
    reparametrized: bool = True

    def arguments(self) -> tuple:
        """Returns the arguments, the same at every call."""
        with torch.random.fork_rng(()):
            torch.manual_seed(20)
            return self.data()


# ---- linear-Gaussian networks


class LinearGaussian:
    """x_v = sum_u w[u, v] x_u + sd e_v over a DAG: joint, conditional and evidence by linear algebra.

    Args:
        weights: (parent, child) -> weight. Sites are ordered by first appearance, which must be topological.
        observed: the observed sites; data are passed to the model in this order.
        sd: standard deviation of every site given its parents.
    """

    def __init__(
        self, weights: Mapping[tuple[str, str], float], observed: tuple[str, ...], sd: float = 1.0
    ) -> None:
        self.weights, self.observed, self.sd = dict(weights), tuple(observed), sd
        self.sites = list(dict.fromkeys(name for edge in weights for name in edge))
        while True:  # a topological order that is stable
            late = [(u, v) for u, v in weights if self.sites.index(u) > self.sites.index(v)]
            if not late:
                break
            u, v = late[0]
            self.sites.remove(u)
            self.sites.insert(self.sites.index(v), u)
        self.latent = [name for name in self.sites if name not in observed]

    def __call__(self, *data: Tensor) -> None:
        given = dict(zip(self.observed, data))
        values: dict[str, Tensor] = {}
        for name in self.sites:
            loc = sum(
                (w * values[u] for (u, v), w in self.weights.items() if v == name), torch.zeros(())
            )
            values[name] = pyro.sample(name, dist.Normal(loc, self.sd), obs=given.get(name))

    def covariance(self) -> Tensor:
        """Returns the covariance of all sites, in the order of ``sites``: (I - W)^-1 sd^2 (I - W)^-T."""
        size = len(self.sites)
        influence = torch.eye(size, dtype=torch.float64)
        for (u, v), w in self.weights.items():
            influence[self.sites.index(v), self.sites.index(u)] -= w
        mixing = torch.linalg.inv(influence)
        return self.sd**2 * mixing @ mixing.T

    def posterior(self, *data: float) -> tuple[Tensor, Tensor]:
        """Returns mean ``(latents,)`` and covariance ``(latents, latents)`` given data in the order of ``observed``."""
        joint = self.covariance()
        z = [self.sites.index(name) for name in self.latent]
        x = [self.sites.index(name) for name in self.observed]
        gain = joint[z][:, x] @ torch.linalg.inv(joint[x][:, x])
        return gain @ torch.tensor(data, dtype=torch.float64), joint[z][:, z] - gain @ joint[x][
            :, z
        ]

    def log_evidence(self, *data: float) -> float:
        """Returns log p(data) in nats."""
        x = [self.sites.index(name) for name in self.observed]
        marginal = torch.distributions.MultivariateNormal(
            torch.zeros(len(x), dtype=torch.float64), self.covariance()[x][:, x]
        )
        return marginal.log_prob(torch.tensor(data, dtype=torch.float64)).item()


CHAIN = LinearGaussian({("a", "b"): 1.0, ("b", "c"): 1.0, ("c", "y"): 1.0}, ("y",))
# Webb et al. 2018: explaining away needs the edge a - e, which the moral graph alone lacks.
COLLIDER = LinearGaussian({("a", "c"): 1.0, ("c", "d"): 1.0, ("e", "d"): 1.0}, ("d",))
# Weak data: s and t stay coupled through r.
TREE = LinearGaussian(
    {
        ("r", "s"): 2.0,
        ("r", "t"): -1.5,
        ("s", "y0"): 0.3,
        ("s", "y1"): 0.15,
        ("t", "y2"): 0.3,
        ("t", "y3"): -0.3,
    },
    ("y0", "y1", "y2", "y3"),
)
DIAMOND = LinearGaussian(
    {
        ("a", "b"): 1.0,
        ("a", "c"): -1.0,
        ("b", "d"): 0.7,
        ("c", "d"): 0.9,
        ("d", "y"): 1.0,
        ("b", "x"): 0.5,
    },
    ("y", "x"),
)
NETWORKS = {"chain": CHAIN, "collider": COLLIDER, "tree": TREE, "diamond": DIAMOND}


# ---- conjugate models


def conjugate_normal(y: Tensor) -> None:
    """mu ~ N(0, 2), y_i ~ N(mu, 1), on the device of the data."""
    mu = pyro.sample("mu", dist.Normal(y.new_zeros(()), 2.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mu, 1.0), obs=y)


def conjugate_normal_posterior(y: Tensor) -> tuple[float, float]:
    """Returns mean and sd of mu given y."""
    precision = 1 / 4 + len(y)
    return y.double().sum().item() / precision, precision**-0.5


def conjugate_normal_evidence(y: Tensor) -> float:
    """Returns log p(y): y ~ N(0, I + 4 J)."""
    count = len(y)
    covariance = torch.eye(count, dtype=torch.float64) + 4
    return (
        torch.distributions.MultivariateNormal(torch.zeros(count, dtype=torch.float64), covariance)
        .log_prob(y.double())
        .item()
    )


def drawn_normal(size: int = 6) -> None:
    """`conjugate_normal`, which draws its data, on request of another size."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    with pyro.plate("data", size):
        pyro.sample("y", dist.Normal(mu, 1.0))


def beta_bernoulli(y: Tensor) -> None:
    """p ~ Beta(2, 3), y_i ~ Bernoulli(p)."""
    p = pyro.sample("p", dist.Beta(torch.tensor(2.0), torch.tensor(3.0)))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(p), obs=y)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def beta_bernoulli_posterior(y: Tensor) -> tuple[float, float]:
    """Returns the two concentrations of the posterior Beta."""
    ones = y.sum().item()
    return 2 + ones, 3 + len(y) - ones


def beta_bernoulli_evidence(y: Tensor) -> float:
    """Returns log p(y) of the sequence."""
    return _log_beta(*beta_bernoulli_posterior(y)) - _log_beta(2, 3)


def eight_schools(y: Tensor, sigma: Tensor) -> None:
    """Rubin 1981, centered, on the device of the data; log evidence -31.3113 nats."""
    mu = pyro.sample("mu", dist.Normal(y.new_zeros(()), 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(y.new_tensor(5.0)))
    with pyro.plate("schools", len(y)):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta, sigma), obs=y)


def eight_schools_data() -> tuple[Tensor, Tensor]:
    return torch.tensor(SCHOOLS_Y), torch.tensor(SCHOOLS_SIGMA)


def eight_schools_evidence(points: int = 20_000) -> float:
    """Returns log p(y), by quadrature over tau: given tau, y is normal with mean 0 and a known covariance.

    tau = 5 tan(u pi / 2) with u uniform has the half-Cauchy law, so the midpoint rule in u needs no truncation.
    """
    y, sigma = (part.double() for part in eight_schools_data())
    u = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    # (points, 8)
    variance = sigma.square() + (5 * torch.tan(u * math.pi / 2)).square().unsqueeze(-1)
    # covariance = diag(variance) + 25 J: determinant and inverse by the rank-one lemmas
    weight = 1 / variance
    total = 1 / 25 + weight.sum(-1)
    log_det = variance.log().sum(-1) + math.log(25) + total.log()
    quadratic = (weight * y**2).sum(-1) - (weight * y).sum(-1) ** 2 / total
    log_prob = -0.5 * (log_det + quadratic + len(y) * math.log(2 * math.pi))
    return (log_prob.logsumexp(0) - math.log(points)).item()


# ---- the rest: one property each


def independent_locals(y: Tensor) -> None:
    """Nothing global: z_n in R^2 with its own y_n."""
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(z, 0.5).to_event(1), obs=y)


def nested(y: Tensor) -> None:
    """A global, a latent per group, a latent per member; y (groups, members)."""
    top = pyro.sample("top", dist.Normal(0.0, 1.0))
    with pyro.plate("groups", y.shape[0], dim=-2):
        group = pyro.sample("group", dist.Normal(top, 1.0))
        with pyro.plate("members", y.shape[1], dim=-1):
            member = pyro.sample("member", dist.Normal(group, 1.0))
            pyro.sample("y", dist.Normal(member, 1.0), obs=y)


def crossed(y: Tensor) -> None:
    """Row and column effects, coupled by every entry."""
    rows = pyro.plate("rows", y.shape[0], dim=-2)
    columns = pyro.plate("columns", y.shape[1], dim=-1)
    with rows:
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with columns:
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
    with rows, columns:
        pyro.sample("y", dist.Normal(a + b, 1.0), obs=y)


def coupled_instances(y: Tensor) -> None:
    """One datum reads all instances of z: the plate becomes one joint block."""
    scale = pyro.sample("scale", dist.Gamma(torch.tensor(3.0), torch.tensor(3.0)))
    with pyro.plate("parts", 4):
        z = pyro.sample("z", dist.Normal(0.0, scale))
    pyro.sample("y", dist.Normal((z * torch.arange(1.0, 5.0)).sum(-1, keepdim=True), 1.0), obs=y)


def vectors(y: Tensor) -> None:
    """A vector site and a positive scalar that depends on it."""
    z = pyro.sample("z", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    w = pyro.sample("w", dist.LogNormal(z.sum(-1), 1.0))
    pyro.sample("y", dist.Normal(z, w.unsqueeze(-1)).to_event(1), obs=y)


def constrained(y: Tensor) -> None:
    """Simplex, correlation Cholesky, interval and ordered supports in one model."""
    p = pyro.sample("p", dist.Dirichlet(torch.ones(3)))
    chol = pyro.sample("chol", dist.LKJCholesky(2, torch.tensor(2.0)))
    u = pyro.sample("u", dist.Uniform(torch.tensor(-1.0), torch.tensor(1.0)))
    loc = torch.cat([p[..., :1] + u.unsqueeze(-1), p[..., 1:2] * chol[..., 1, :1]], -1)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.MultivariateNormal(loc, scale_tril=chol), obs=y)


def discrete_locals(y: Tensor, k: Tensor | None = None) -> None:
    """A Bernoulli a datum, where it is not given: sampled by the guide."""
    p = pyro.sample("p", dist.Beta(torch.tensor(2.0), torch.tensor(2.0)))
    with pyro.plate("data", len(y)):
        k = pyro.sample("k", dist.Bernoulli(p), obs=k)
        pyro.sample("y", dist.Normal(2 * k, 1.0), obs=y)


def mixture(y: Tensor) -> None:
    """Two components, with discrete locals that enumeration can sum out."""
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(2)))
    with pyro.plate("components", 2):
        locs = pyro.sample("locs", dist.Normal(torch.tensor([-1.0, 1.0]), 2.0))
    with pyro.plate("data", len(y)):
        k = pyro.sample("k", dist.Categorical(weights), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(Vindex(locs.unsqueeze(-2))[..., k], 1.0), obs=y)


def barren(y: Tensor) -> None:
    """b and c carry no evidence: the guide draws them from the model."""
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(a, 1.0), obs=y)
    b = pyro.sample("b", dist.Normal(a, 2.0))
    pyro.sample("c", dist.Bernoulli(logits=b))


def with_factor(y: Tensor) -> None:
    """A factor couples a and b, which have no common child."""
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    pyro.factor("coupling", -((a - b) ** 2))
    pyro.sample("y", dist.Normal(a, 1.0), obs=y)


def support_parents(y: Tensor) -> None:
    """The support of z moves with hi."""
    hi = pyro.sample("hi", dist.Gamma(torch.tensor(3.0), torch.tensor(1.0)))
    z = pyro.sample("z", dist.Uniform(0.0, hi))
    pyro.sample("y", dist.Normal(z, 0.5), obs=y)


def deterministic_and_delta(y: Tensor) -> None:
    """Transparent sites: a deterministic one and a latent Delta."""
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    twice = pyro.deterministic("twice", 2 * a)
    same = pyro.sample("same", dist.Delta(twice))
    pyro.sample("y", dist.Normal(same, 1.0), obs=y)


def vae_like(y: Tensor) -> None:
    """A fixed nonlinear decoder; z_n in R^2."""
    weight = torch.linspace(-1.0, 1.0, 6).reshape(2, 3)
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("y", dist.Bernoulli(logits=torch.tanh(z) @ weight).to_event(1), obs=y)


def regression(x: Tensor, y: Tensor | None = None) -> None:
    """y = x w + noise, with y optional."""
    w = pyro.sample("w", dist.Normal(torch.zeros(x.shape[-1]), 1.0).to_event(1))
    s = pyro.sample("s", dist.LogNormal(0.0, 0.5))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal((x * w).sum(-1), s), obs=y)


def network_case(network: LinearGaussian) -> Case:
    return Case(
        network,
        lambda: tuple(torch.randn(len(network.observed))),
        dict.fromkeys(network.latent, ()),
    )


CASES: dict[str, Case] = {
    **{name: network_case(network) for name, network in NETWORKS.items()},
    "conjugate_normal": Case(conjugate_normal, lambda: (torch.randn(6) + 1,), {"mu": ()}, 1),
    "beta_bernoulli": Case(
        beta_bernoulli, lambda: (torch.tensor([1.0, 1.0, 0.0, 1.0]),), {"p": ()}, 1
    ),
    "eight_schools": Case(
        eight_schools, eight_schools_data, {"mu": (), "tau": (), "theta": (8,)}, 1
    ),
    "independent_locals": Case(independent_locals, lambda: (torch.randn(5, 2),), {"z": (5, 2)}, 1),
    "nested": Case(
        nested, lambda: (torch.randn(3, 4),), {"top": (), "group": (3, 1), "member": (3, 4)}, 2
    ),
    "crossed": Case(crossed, lambda: (torch.randn(3, 2),), {"a": (3, 1), "b": (2,)}, 2),
    "coupled_instances": Case(
        coupled_instances, lambda: (torch.tensor(2.0),), {"scale": (), "z": (4,)}, 1
    ),
    "vectors": Case(vectors, lambda: (torch.randn(3),), {"z": (3,), "w": ()}),
    "constrained": Case(
        constrained, lambda: (torch.randn(5, 2),), {"p": (3,), "chol": (2, 2), "u": ()}, 1
    ),
    "discrete_locals": Case(
        discrete_locals, lambda: (torch.randn(6),), {"p": (), "k": (6,)}, 1, False
    ),
    "barren": Case(barren, lambda: (torch.tensor(1.0),), {"a": (), "b": (), "c": ()}, 0, False),
    "with_factor": Case(with_factor, lambda: (torch.tensor(1.0),), {"a": (), "b": ()}),
    "support_parents": Case(support_parents, lambda: (torch.tensor(1.0),), {"hi": (), "z": ()}),
    "deterministic_and_delta": Case(
        deterministic_and_delta, lambda: (torch.tensor(1.0),), {"a": (), "same": ()}
    ),
    "vae_like": Case(
        vae_like, lambda: ((torch.randn(5, 3) > 0).to(torch.get_default_dtype()),), {"z": (5, 2)}, 1
    ),
    "regression": Case(
        regression, lambda: (torch.randn(6, 2), torch.randn(6)), {"w": (2,), "s": ()}, 1
    ),
}


def scatter(guide: Any, amount: float = 0.3) -> None:
    """Moves every parameter of a guide off its initial value, so that every weight matters."""
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter.add_(amount * torch.randn_like(parameter))


def minimize(optimizer, loss):
    """Takes one step of an optimizer that evaluates its loss, a function without arguments, itself (LBFGS)."""

    def closure():
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    optimizer.step(closure)


def amortized(model: Callable, **options: Any) -> AutoNaMIGuide:
    """A guide whose networks read the data from the first step on, though these may be the same in all of them."""
    return AutoNaMIGuide(model, **{"mode": "amortized", **options})


def learned(model: Callable, **options: Any) -> AutoNaMIGuide:
    """A guide of networks for all latents, those with an exact conditional included."""
    return AutoNaMIGuide(model, **{"exact": False, **options})


def called(model: Callable, *args: Any, **options: Any) -> AutoNaMIGuide:
    """A guide that was called once."""
    guide = AutoNaMIGuide(model, **options)
    guide(*args)
    return guide


def conditional(guide: AutoNaMIGuide, name: str, *args: Any, **given: Any) -> Any:
    """A guide's distribution at a site, given values of others."""
    return poutine.trace(poutine.condition(guide, given)).get_trace(*args).nodes[name]["fn"]


def ready(model: Callable, *args: Any, **options: Any) -> AutoNaMIGuide:
    """A guide that was called once, every weight away from zero."""
    guide = amortized(model, **options)
    guide(*args)
    scatter(guide)
    return guide


def ready_by_a_step(model: Callable, *args: Any, **options: Any) -> AutoNaMIGuide:
    """A guide that was trained on its arguments for one step, every weight away from zero."""
    guide = amortized(model, **options)
    SVI(model, guide, Adam({"lr": 1e-3}), Trace_ELBO()).step(*args)
    scatter(guide)
    return guide


def made_once(make: Callable) -> Callable:
    """Has a function make its result once for the same arguments, from a seed of its own, and return a copy each time.

    The parameter store stays as it was: a copy would else train the parameters of the one that is kept.
    """

    @functools.cache
    def once(args: tuple, options: tuple) -> Any:
        with untouched():
            torch.manual_seed(0)
            return make(*args, **dict(options))

    @functools.wraps(make)
    def copied(*args: Any, **options: Any) -> Any:
        return copy.deepcopy(once(args, tuple(options.items())))

    return copied


def conjugate_normal_guide(y: Tensor, observations: Mapping[str, Tensor] | None = None) -> None:
    """The exact posterior of `conjugate_normal`, for data sets of any batch dims."""
    y = (observations or {}).get("y", y)
    precision = 1 / 4 + y.shape[-1]
    pyro.sample("mu", dist.Normal(y.sum(-1, keepdim=y.dim() > 1) / precision, precision**-0.5))


def subsampled(y: Tensor) -> None:
    """`conjugate_normal` on two data at random."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    with pyro.plate("data", len(y), subsample_size=2) as index:
        pyro.sample("y", dist.Normal(mu, 1.0), obs=y[index])


# ---- models of any prior and likelihood


def noise(sd: float = 1.0) -> Callable:
    """N(loc, sd), as a function of loc."""
    return functools.partial(dist.Normal, scale=sd)


def pair(
    prior: Any, likelihood: Callable = noise(), default: Any = None, rows: int = 0
) -> Callable:
    """A model of a latent and its datum, z ~ prior and y ~ likelihood(z), or of a plate with some rows of these.

    A prior that must be made in every call is a function.
    """

    def model(y: Any = default) -> None:
        with pyro.plate("data", rows) if rows else contextlib.nullcontext():
            z = pyro.sample(
                "z", prior if isinstance(prior, torch.distributions.Distribution) else prior()
            )
            pyro.sample("y", likelihood(z), obs=y)

    return model


def pooled(prior: Any, likelihood: Callable = noise()) -> Callable:
    """A model of a latent that all rows share: mu ~ prior, y_n ~ likelihood(mu)."""

    def model(y: Tensor) -> None:
        mu = pyro.sample("mu", prior)
        with pyro.plate("data", len(y)):
            pyro.sample("y", likelihood(mu), obs=y)

    return model


def unobserved(**priors: Any) -> Callable:
    """A model of independent latents of these priors, and of no data."""

    def model() -> None:
        for name, prior in priors.items():
            pyro.sample(name, prior)

    return model


def learned_scale(y: Any = None) -> None:
    """z ~ N(0, scale), y ~ N(z, 1), where the scale is a parameter that starts at 2."""
    scale = pyro.param("scale", torch.tensor(2.0), constraint=dist.constraints.positive)
    z = pyro.sample("z", dist.Normal(0.0, scale))
    pyro.sample("y", dist.Normal(z, 1.0), obs=y)


def told(model: Callable) -> Callable:
    """A model whose data, y, come by name, as `CSIS` passes them; None where there are none."""

    def model_of_observations(observations: Mapping[str, Tensor] | None = None) -> None:
        model((observations or {}).get("y"))

    return model_of_observations


class Counted:
    """A model that counts its runs."""

    def __init__(self, model: Callable) -> None:
        self.model, self.runs = model, 0

    def __call__(self, *args: Any) -> Any:
        self.runs += 1
        return self.model(*args)

    def runs_of(self, function: Callable, *args: Any, **options: Any) -> int:
        before = self.runs
        function(*args, **options)
        return self.runs - before


# ---- a global, and a latent of each row of the data: the model of many tests of the guide


def local_normals(
    y: Tensor | None = None,
    size: int | None = None,
    around: Any = contextlib.nullcontext(),
    *,
    rows: int | None = None,
    sd: float = 1.0,
    prior: Callable = noise(),
    likelihood: Callable = noise(),
) -> None:
    """mu ~ N(0, sd), z_n ~ prior(mu), y_n ~ likelihood(z_n), of ``size`` rows a call, with a handler around these."""
    mu = pyro.sample("mu", dist.Normal(0.0, sd))
    with pyro.plate("data", len(y) if rows is None else rows, subsample_size=size) as index, around:
        z = pyro.sample("z", prior(mu))
        pyro.sample("y", likelihood(z), obs=y if size is None else y[index])


def partly_observed(y: Tensor, seen: Tensor) -> None:
    """mu ~ N(0, 1), n_i ~ N(mu, 1), of which those are data that are seen: the others are latents, n_unobserved."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("n", dist.Normal(mu, 1.0), obs=y, obs_mask=seen)


def varying_intercept(
    county: Tensor,
    counties: int,
    y: Tensor | None = None,
    dim: int = -1,
    likelihood: Callable = noise(0.5),
) -> None:
    """mu ~ N(0, 1), alpha_j ~ N(mu, 1) in a plate at ``dim``, y_n ~ likelihood(alpha[county_n])."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with pyro.plate("county", counties, dim=dim):
        alpha = pyro.sample("alpha", dist.Normal(mu, 1.0))
    with pyro.plate("obs", len(county), dim=-1):
        pyro.sample(
            "y", likelihood(alpha[..., county] if dim == -1 else alpha[..., county, 0]), obs=y
        )


def steps(
    model: Callable, guide: Any, *args: Any, count: int = 3, elbo: Any = None, lr: float = 0.01
) -> Tensor:
    """Trains for some steps, whose losses are to be finite, and returns these."""
    svi = SVI(model, guide, Adam({"lr": lr}), elbo or Trace_ELBO())
    losses = torch.tensor([svi.step(*args) for _ in range(count)])
    assert losses.isfinite().all()
    return losses


def through_file(value: Any, weights_only: bool = True) -> Any:
    """Returns what comes back from a file in which a value was saved."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def slopes_of(heights):
    """A log density with its slopes, as searches for modes take them."""

    def slopes(points):
        points = points.detach().requires_grad_()
        height = heights(points)
        return height.detach(), torch.autograd.grad(height.sum(), points)[0]

    return slopes


def robust_walk(y):
    step, noise = (pyro.sample(name, dist.HalfNormal(0.5)) for name in ("step", "noise"))
    z = torch.zeros(())
    for t in range(len(y)):
        z = pyro.sample(f"z_{t}", dist.Normal(z, step))
        pyro.sample(f"y_{t}", dist.StudentT(4.0, z, noise), obs=y[t])
