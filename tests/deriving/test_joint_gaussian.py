"""Latents that are jointly Gaussian given the rest: against dense linear algebra, whatever their plates.

Every model here says its own design: `Program` makes the density that the model has as matrices, by other means than
the guide, and `dense` conditions it.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import called, nested
from pyro import poutine
from random_programs import COUNT

from pyro_nami import AutoNaMIGuide, verify_inverse
from pyro_nami.deriving import finder

pytestmark = pytest.mark.usefixtures("double", "own_parameters")
GROUP = torch.tensor([0, 1, 2, 0, 1, 2, 2, 2, 1, 0, 0, 1])
OTHER = torch.tensor([0, 0, 1, 1, 2, 3, 3, 2, 1, 0, 3, 2])
OUTER = torch.tensor([0, 0, 1, 1])
GENERATOR = torch.Generator().manual_seed(1)
X, Y = torch.randn(2, 12, generator=GENERATOR, dtype=torch.float64)
DESIGN = torch.randn(12, 4, generator=GENERATOR, dtype=torch.float64)
COVARIANCE = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)


def normal(name, loc=0.0, scale=1.0, **kwargs):
    return pyro.sample(name, dist.Normal(torch.as_tensor(loc), scale), **kwargs)


def spread(name, prior=dist.HalfNormal):
    return pyro.sample(name, prior(torch.ones(())))


# ---- designs, each with the latents that are Gaussian given the others


def schools(y=Y):
    mu, tau = normal("mu", 0.0, 5.0), spread("tau", dist.HalfCauchy)
    with pyro.plate("schools", len(y)):
        normal("y", normal("theta", mu, tau), X[: len(y)].exp(), obs=y)


def tiny(y=Y):
    mu, tau = normal("mu", 0.0, 5.0), pyro.sample("tau", dist.LogNormal(torch.tensor(-6.0), 0.1))
    with pyro.plate("schools", len(y)):
        normal("y", normal("theta", mu, tau), X[: len(y)].exp(), obs=y)


def regression(y=Y):
    w = pyro.sample("w", dist.Normal(torch.zeros(4), 2.0).to_event(1))
    b, sd = normal("b", 1.0, 3.0), spread("sd")
    with pyro.plate("rows", len(y)):
        mean = (w.unsqueeze(-2) * DESIGN[: len(y)]).sum(-1)
        normal("y", b + mean.reshape(w.shape[: max(0, w.dim() - 2)] + (-1,)), sd, obs=y)


def crossed(y=Y):
    mu, sds = normal("mu", 0.0, 5.0), [spread(f"sd{i}") for i in range(3)]
    with pyro.plate("A", 3):
        a = normal("a", 0.0, sds[0])
    with pyro.plate("B", 4):
        b = normal("b", 0.0, sds[1])
    with pyro.plate("rows", len(y)):
        normal("y", mu + a[..., GROUP[: len(y)]] + b[..., OTHER[: len(y)]], sds[2], obs=y)


def nested_by_index(y=Y):
    sd, mu, tau = spread("sd"), normal("mu", 0.0, 5.0), spread("tau")
    with pyro.plate("outer", 2):
        d = normal("d", mu)
    with pyro.plate("inner", 4):
        b = normal("b", d[..., OUTER], tau)
    with pyro.plate("rows", len(y)):
        normal("y", b[..., OTHER[: len(y)]], sd, obs=y)


def nested_plates(y=Y):
    sd, mu, tau = spread("sd"), normal("mu", 0.0, 5.0), spread("tau")
    with pyro.plate("outer", len(y) // 4, dim=-2):
        d = normal("d", mu)
        with pyro.plate("inner", 4, dim=-1):
            normal("y", normal("b", d, tau), sd, obs=y.reshape(-1, 4))


def rows_and_columns(y=Y):
    sd = spread("sd")
    with pyro.plate("rows", len(y) // 4, dim=-2):
        row = normal("row")
    with pyro.plate("columns", 4, dim=-1):
        column = normal("column", 0.0, 2.0)
    with pyro.plate("cell rows", len(y) // 4, dim=-2), pyro.plate("cell columns", 4, dim=-1):
        normal("y", row + column, sd, obs=y.reshape(-1, 4))


def varying_slopes(y=Y):
    sd, tau = spread("sd"), spread("tau")
    mu, nu = normal("mu", 0.0, 5.0), normal("nu", 0.0, 5.0)
    with pyro.plate("groups", 4):
        a, b = normal("a", mu, tau), normal("b", nu, 0.7)
    with pyro.plate("rows", len(y)):
        normal("y", a[..., OTHER[: len(y)]] + b[..., OTHER[: len(y)]] * X[: len(y)], sd, obs=y)


def chain(y=Y):
    sd, weight, z = (
        spread("sd"),
        pyro.sample("weight", dist.Beta(torch.tensor(2.0), 2.0)),
        torch.zeros(()),
    )
    for t in range(6):
        z = normal(f"z{t}", weight * z)
        normal(f"y{t}", z, sd, obs=y[t])


def vectors(y=Y):
    sd = spread("sd")
    mean = pyro.sample("mean", dist.MultivariateNormal(torch.ones(2), COVARIANCE))
    with pyro.plate("groups", 4):
        at = mean if mean.dim() == 1 else mean  # a batch of means has a plate dim of its own
        b = pyro.sample("b", dist.MultivariateNormal(at, COVARIANCE * sd[..., None, None]))
    with pyro.plate("rows", len(y)):
        normal(
            "y", b[..., OTHER[: len(y)], 0] + b[..., OTHER[: len(y)], 1] * X[: len(y)], sd, obs=y
        )


def noncentered(y=Y):
    sd, tau, mu = spread("sd"), spread("tau"), normal("mu", 0.0, 5.0)
    with pyro.plate("groups", 4):
        e = normal("e")
    with pyro.plate("rows", len(y)):
        normal("y", mu + tau * e[..., OTHER[: len(y)]], sd, obs=y)


def scale_behind(y=Y):
    mu = normal("mu", 0.0, 5.0)
    with pyro.plate("groups", 4):
        b = normal("b", mu, 2.0)
    sd = spread("sd")
    with pyro.plate("rows", len(y)):
        normal("y", b[..., OTHER[: len(y)]], sd, obs=y)


def vector_of_data(y=Y):
    mu, w = normal("mu", 0.0, 5.0), normal("w")
    pyro.sample("y", dist.MultivariateNormal(torch.stack([mu, mu + w], -1), COVARIANCE), obs=y[:2])


def masked(y=Y):
    mu, tau = normal("mu", 0.0, 5.0), spread("tau", dist.HalfCauchy)
    with pyro.plate("rows", len(y)):
        theta = normal("theta", mu, tau)
        with poutine.mask(mask=X[: len(y)] > 0):
            normal("y", theta, X[: len(y)].exp(), obs=y)


def two_children(y=Y):
    mu, sd = normal("mu", 0.0, 5.0), spread("sd")
    with pyro.plate("rows", len(y)):
        z = normal("z", mu)
        normal("x", 2.0 * z - 1.0, 0.5, obs=X[: len(y)])
        normal("y", z + mu, sd, obs=y)


def differences(y=Y):
    """Each row compares two instances of one plate."""
    sd = spread("sd")
    with pyro.plate("players", 4):
        skill = normal("skill", 0.0, 2.0)
    with pyro.plate("rows", len(y)):
        normal("y", skill[..., OTHER[: len(y)]] - skill[..., GROUP[: len(y)]], sd, obs=y)


def plain_index(y=Y):
    """No dims may be put to the left of ``b``."""
    mu, tau = normal("mu", 0.0, 5.0), spread("tau")
    with pyro.plate("groups", 4):
        b = normal("b", mu, tau)
    sd = spread("sd")
    with pyro.plate("rows", len(y)):
        normal("y", b[OTHER[: len(y)]], sd, obs=y)


def loop_over_instances(y=Y):
    mu, tau, sd = normal("mu", 0.0, 5.0), spread("tau"), spread("sd")
    with pyro.plate("groups", 4):
        theta = normal("theta", mu, tau)
    for i in range(4):
        normal(f"y{i}", theta[i], sd, obs=y[i])


def sequential_plate(y=Y):
    mu, sd = normal("mu", 0.0, 5.0), spread("sd")
    for i in pyro.plate("rows", 3):
        normal(f"y{i}", normal(f"z{i}", mu), sd, obs=y[i])


def matrix_product(y=Y):
    sd, w = spread("sd"), pyro.sample("w", dist.Normal(torch.zeros(4), 2.0).to_event(1))
    with pyro.plate("rows", len(y)):
        normal("y", DESIGN[: len(y)] @ w, sd, obs=y)


DESIGNS: dict[Callable, str] = {
    schools: "mu theta",
    tiny: "mu theta",
    regression: "w b",
    crossed: "mu a b",
    nested_by_index: "mu d b",
    nested_plates: "mu d b",
    rows_and_columns: "row column",
    varying_slopes: "mu nu a b",
    chain: "z0 z1 z2 z3 z4 z5",
    vectors: "mean b",
    noncentered: "mu e",
    scale_behind: "mu b",
    vector_of_data: "mu w",
    masked: "mu theta",
    two_children: "mu z",
    differences: "skill",
}
NOT_VECTORIZED: dict[Callable, str] = {
    plain_index: "mu b",
    loop_over_instances: "mu theta",
    sequential_plate: "mu z0 z1 z2",
    matrix_product: "w",
}
NESTING = {nested_plates: 2, rows_and_columns: 2}


def of(designs: Mapping[Callable, Any]) -> Any:
    return pytest.mark.parametrize("model", list(designs), ids=lambda model: model.__name__)


def drawn(guide: Any, *args: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in guide(*args).items()}


def density(
    guide: AutoNaMIGuide, values: Mapping[str, torch.Tensor], *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Returns the guide's log density of its exact latents given the others."""
    nodes = poutine.trace(poutine.condition(guide, values)).get_trace(*args, **kwargs).nodes
    return sum(nodes[name]["fn"].log_prob(values[name]).sum() for name in guide.conjugate)


def dense(
    model: Callable, names: tuple[str, ...], values: Mapping[str, torch.Tensor], *args: Any
) -> torch.Tensor:
    """Returns log p(names | others, data) by the gradient and the Hessian of the model's log joint, a quadratic."""
    sizes = [values[name].numel() for name in names]

    def log_joint(flat: torch.Tensor) -> torch.Tensor:
        parts = {
            name: part.reshape(values[name].shape) for name, part in zip(names, flat.split(sizes))
        }
        return (
            poutine.trace(poutine.condition(model, {**values, **parts}))
            .get_trace(*args)
            .log_prob_sum()
        )

    x = torch.cat([values[name].reshape(-1) for name in names]).requires_grad_()
    (slope,) = torch.autograd.grad(log_joint(x), x)
    precision = -torch.autograd.functional.hessian(log_joint, x.detach())
    # In units of the precision's diagonal: some scales are 3e-7.
    unit = precision.diagonal().rsqrt()
    scaled, step = unit[:, None] * precision * unit, unit * slope
    error = torch.linalg.solve(scaled, step)  # from the mean, in units
    constant = len(x) * torch.log(torch.tensor(2 * torch.pi)) + 2 * unit.log().sum()
    return (torch.logdet(scaled) - constant - error @ scaled @ error) / 2


def assert_close(found: torch.Tensor, expected: torch.Tensor, size: float = 1.0) -> None:
    torch.testing.assert_close(
        found.detach(), expected.detach(), rtol=0.0, atol=1e-8 * max(1.0, size)
    )


@pytest.mark.parametrize("model", [*DESIGNS, *NOT_VECTORIZED], ids=lambda model: model.__name__)
def test_a_design_is_exact_at_any_data(model):
    guide = called(model)
    assert set(guide.conjugate) == set({**DESIGNS, **NOT_VECTORIZED}[model].split())
    assert verify_inverse(guide.bayesnet, guide.inverse)
    for y in (Y, 3.0 - 2.0 * Y):
        values = drawn(guide, y)
        expected = dense(model, guide.conjugate, values, y)
        assert_close(density(guide, values, y), expected)
        with torch.no_grad():
            assert_close(density(guide, values, y), expected)


@of(DESIGNS)
def test_particles_are_exact_each(model):
    guide, nesting = called(model), NESTING.get(model, 1)
    with pyro.plate("particles", 3, dim=-1 - nesting):
        nodes = poutine.trace(guide).get_trace(2.0 * Y).nodes
    shapes = {name: value.shape for name, value in drawn(guide, 2.0 * Y).items()}
    for i in range(3):
        values = {
            name: nodes[name]["value"].detach()[i].reshape(shape) for name, shape in shapes.items()
        }
        log_probs = [
            nodes[name]["fn"].log_prob(nodes[name]["value"])[i].sum() for name in guide.conjugate
        ]
        assert_close(sum(log_probs), dense(model, guide.conjugate, values, 2.0 * Y))


@pytest.mark.parametrize(
    "model", [schools, varying_slopes, plain_index], ids=lambda model: model.__name__
)
def test_gradients_reach_what_was_drawn_before(model):
    guide = called(model)
    values = drawn(guide)
    before = [
        value.requires_grad_() for name, value in values.items() if name not in guide.conjugate
    ]
    found, expected = density(guide, values), dense_of_scales(model, guide.conjugate, values)
    for ours, theirs in zip(
        torch.autograd.grad(found, before), torch.autograd.grad(expected, before)
    ):
        assert_close(ours, theirs, float(theirs.abs().max()))


def dense_of_scales(
    model: Callable, names: tuple[str, ...], values: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Returns what `dense` does, differentiable in the other values."""
    sizes = [values[name].numel() for name in names]
    x = torch.cat([values[name].reshape(-1) for name in names]).requires_grad_()
    parts = {name: part.reshape(values[name].shape) for name, part in zip(names, x.split(sizes))}
    total = poutine.trace(poutine.condition(model, {**values, **parts})).get_trace().log_prob_sum()
    (slope,) = torch.autograd.grad(total, x, create_graph=True)
    rows = [torch.autograd.grad(each, x, create_graph=True)[0] for each in slope]
    precision = -torch.stack(rows)
    return dist.MultivariateNormal(
        x.detach() + torch.linalg.solve(precision, slope), precision_matrix=precision
    ).log_prob(x.detach())


@pytest.mark.parametrize(
    "model", [schools, nested_plates, rows_and_columns, masked], ids=lambda m: m.__name__
)
def test_the_number_of_groups_may_change(model):
    guide = called(model, Y)
    for y in (Y[:8], Y[:4], Y):
        values = drawn(guide, y)
        assert_close(density(guide, values, y), dense(model, guide.conjugate, values, y))


def sized(group, sizes, y):
    """Two crossed plates of sizes that come with the data."""
    mu, sd = normal("mu", 0.0, 5.0), spread("sd")
    effects = []
    for name, size, index in zip("ab", sizes, group):
        with pyro.plate(f"plate_{name}", size):
            effects.append(normal(name, mu, 1.5)[..., index])
    with pyro.plate("rows", len(y)):
        normal("y", sum(effects), sd, obs=y)


def test_the_number_of_groups_of_a_dense_plate_may_change():
    guide = called(sized, (GROUP, OTHER), (3, 4), Y)
    for args in (
        ((OTHER, GROUP), (5, 7), Y),
        ((GROUP[:5], OTHER[:5]), (3, 4), Y[:5]),
        ((OTHER, OTHER), (9, 4), Y),
    ):
        values = drawn(guide, *args)
        assert set(guide.conjugate) == {"mu", "a", "b"}
        assert_close(density(guide, values, *args), dense(sized, guide.conjugate, values, *args))


def test_a_dense_block_that_is_too_large_is_learned(monkeypatch):
    monkeypatch.setattr(finder, "MOST_DENSE", 6)
    guide = called(crossed)  # the smaller of two crossed plates, and the mean, would be 4 elements
    assert set(guide.conjugate) == {"mu", "a", "b"}
    monkeypatch.setattr(finder, "MOST_DENSE", 3)
    guide = called(crossed)
    assert "a" not in guide.conjugate
    assert "a joint block of 4 elements has more than 3" in guide.rules["a"].reason
    values = drawn(guide)
    if guide.conjugate:
        assert_close(density(guide, values), dense(crossed, guide.conjugate, values))


def wide_vector(y, size):
    w = pyro.sample("w", dist.Normal(torch.zeros(size), 1.0).to_event(1))
    normal("y", w.sum(-1), 1.0, obs=y)


@pytest.mark.parametrize("size, exact", [(500, True), (501, False)])
def test_the_limit_is_500_elements(size, exact):
    guide = called(wide_vector, Y[0], size)
    assert (guide.conjugate == ("w",)) == exact
    assert exact or "501 elements has more than 500" in guide.rules["w"].reason


# ---- random ones


@dataclass
class Site:
    """A site of a random program: x = const + sum_u read_u(x_u) + scale * root e."""

    name: str
    plate: str  # "" for none
    width: int  # of its vector; 0 for a number
    parents: list[tuple[str, Callable]]
    const: torch.Tensor
    scale: str | float  # a latent, or a number
    root: torch.Tensor | None  # of the covariance of a `MultivariateNormal`
    observed: bool


@dataclass
class Program:
    """A random linear-Gaussian model with plates, and its density as matrices."""

    seed: int
    sizes: dict[str, int] = field(default_factory=dict)
    sites: list[Site] = field(default_factory=list)
    scales: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self.generator = torch.Generator().manual_seed(self.seed)
        self.sizes = {f"p{i}": rng.randint(2, 4) for i in range(rng.randint(1, 3))}
        if rng.random() < 0.4:
            self.sizes |= {"row": rng.randint(2, 3), "column": rng.randint(2, 4)}
        # reads by ``z[index]``, such that particles are not possible
        self.plain = rng.random() < 0.15
        self.scales = [f"s{i}" for i in range(rng.randint(0, 2))]
        plates = ["", *self.sizes, *(["row column"] if "row" in self.sizes else [])]
        for i in range(rng.randint(2, 5)):
            self._add(f"z{i}", rng.choice(plates), rng, observed=False)
        for i in range(rng.randint(1, 3)):
            self._add(f"y{i}", rng.choice(plates), rng, observed=True)
        self.data = {
            site.name: torch.randn(self.shape(site), generator=self.generator)
            for site in self.sites
        }

    def _add(self, name: str, plate: str, rng: random.Random, observed: bool) -> None:
        width = rng.choice([0, 0, 0, 2])
        earlier = [site for site in self.sites if not (site.observed and rng.random() < 0.7)]
        parents = []
        for site in rng.sample(
            earlier, min(len(earlier), rng.choice([1, 1, 2, 3] if observed else [0, 1, 1, 2]))
        ):
            read = self._read(site, plate, width, rng)
            if read is not None:
                parents.append((site.name, read))
        root = None
        if width and rng.random() < 0.5:
            root = torch.eye(width) + 0.5 * torch.randn(
                width, width, generator=self.generator
            ).tril(-1)
        const = torch.randn((width,) if width else (), generator=self.generator)
        scale = rng.choice([*self.scales, 0.3, 1.0, 2.0])
        self.sites.append(Site(name, plate, width, parents, const, scale, root, observed))

    def _read(self, site: Site, plate: str, width: int, rng: random.Random) -> Callable | None:
        """Returns how a new site reads another one; None if it cannot."""
        weight = torch.randn((site.width or 1, width or 1), generator=self.generator)
        index, here, there = None, set(plate.split()), set(site.plate.split())
        if not there <= here:
            if {"row", "column"} & (here | there) or not here:
                return None
            count, total = self.sizes[plate], self.sizes[site.plate]
            index = torch.tensor([rng.randrange(total) for _ in range(count)])
        factor = None
        if plate and rng.random() < 0.4:  # a covariate
            shape = [self.sizes[each] for each in plate.split()] + [1] * (plate == "row")
            factor = torch.randn(shape, generator=self.generator)
        dots = () if self.plain else (...,)

        def read(z: torch.Tensor) -> torch.Tensor:
            z = z if site.width else z.unsqueeze(-1)
            z = z if index is None else z[(*dots, index)] if self.plain else z[..., index, :]
            z = (z.unsqueeze(-1) * weight).sum(-2)
            z = z if factor is None else z * factor.unsqueeze(-1)
            return z if width else z.squeeze(-1)

        return read

    def shape(self, site: Site) -> tuple[int, ...]:
        plates = [self.sizes[each] for each in site.plate.split()] + [1] * (site.plate == "row")
        return (*plates, *([site.width] if site.width else []))

    def model(self, data: Mapping[str, torch.Tensor]) -> None:
        values = {
            name: pyro.sample(name, dist.LogNormal(torch.zeros(()), 0.5)) for name in self.scales
        }
        plates = {
            name: pyro.plate(name, size, dim=-1 - (name == "row"))
            for name, size in self.sizes.items()
        }
        for site in self.sites:
            loc = site.const
            for name, read in site.parents:
                loc = loc + read(values[name])
            scale = torch.as_tensor(values.get(site.scale, site.scale))
            if site.root is not None:
                fn = dist.MultivariateNormal(loc, scale_tril=scale[..., None, None] * site.root)
            elif site.width:
                fn = dist.Normal(loc, scale.unsqueeze(-1)).to_event(1)
            else:
                fn = dist.Normal(loc, scale)
            with_plates = [plates[each] for each in site.plate.split()]
            values[site.name] = _within(
                with_plates,
                functools.partial(
                    pyro.sample, site.name, fn, obs=data[site.name] if site.observed else None
                ),
            )

    def exact(self) -> set[str]:
        """Returns the latents that data depend on."""
        found = {site.name for site in self.sites if site.observed}
        for site in reversed(self.sites):
            found |= {name for name, _ in site.parents} if site.name in found else set()
        return {site.name for site in self.sites if site.name in found and not site.observed}

    def log_prob(self, names: tuple[str, ...], values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns log p(names | scales, data): the quadratic that the noise of sites is in ``names``.

        Latents without data are drawn behind them, from their prior, and do not count.
        """
        known = {
            **values,
            **{site.name: self.data[site.name] for site in self.sites if site.observed},
        }
        x = torch.cat([known[name].reshape(-1) for name in names])
        units = torch.eye(len(x)).split([known[name].numel() for name in names], -1)
        unit = {name: each.reshape((-1,) + known[name].shape) for name, each in zip(names, units)}
        precision, pull = torch.zeros(len(x), len(x)), torch.zeros(len(x))
        for site in (site for site in self.sites if site.observed or site.name in unit):
            shape = self.shape(site)
            loc, moved = site.const.expand(shape), torch.zeros(len(x), *shape)
            for name, read in site.parents:
                loc = loc + read(known[name])
                if name in unit:
                    moved = moved - torch.stack([read(each).expand(shape) for each in unit[name]])
            if site.name in unit:
                moved = moved + unit[site.name]
            root = torch.eye(site.width or 1) if site.root is None else site.root
            root = root * torch.as_tensor(known.get(site.scale, site.scale))
            error, moved = (
                (known[site.name] - loc).reshape(-1, len(root)),
                moved.reshape(len(x), -1, len(root)),
            )
            error, moved = (
                torch.linalg.solve(root, each.unsqueeze(-1)).squeeze(-1) for each in (error, moved)
            )
            precision += moved.flatten(1) @ moved.flatten(1).T
            pull -= moved.flatten(1) @ error.flatten()
        return dist.MultivariateNormal(
            x + torch.linalg.solve(precision, pull), precision_matrix=precision
        ).log_prob(x)


def _within(plates: list[Any], sample: Callable) -> torch.Tensor:
    if not plates:
        return sample()
    with plates[0]:
        return _within(plates[1:], sample)


@pytest.mark.parametrize("seed", range(COUNT // 5))
def test_random_models_are_exact(seed):
    program = Program(seed)
    guide = called(program.model, program.data)
    assert set(guide.conjugate) == program.exact()
    assert verify_inverse(guide.bayesnet, guide.inverse)
    if not guide.conjugate:
        return
    values = drawn(guide, program.data)
    found, expected = (
        density(guide, values, program.data),
        program.log_prob(guide.conjugate, values),
    )
    assert_close(found, expected, float(expected.abs()))
    if seed % 4 == 0:
        assert_reads_no_more(guide, values, program.data)


def assert_reads_no_more(guide, values, data):
    """What the inverse does not list changes no conditional."""

    def log_probs(values, data):
        nodes = poutine.trace(poutine.condition(guide, values)).get_trace(data).nodes
        return {name: nodes[name]["fn"].log_prob(values[name]).detach() for name in guide.conjugate}

    before = log_probs(values, data)
    for site in (*guide.bayesnet.observed, *values):
        unread = [
            name
            for name in guide.conjugate
            if name != site and site not in guide.inverse.parents[name]
        ]
        if unread:
            now = log_probs(
                {**values, site: 1.3 * values[site]} if site in values else values,
                {**data, site: 1.3 * data[site] + 1} if site in data else data,
            )
            assert not [name for name in unread if not torch.allclose(now[name], before[name])], (
                site
            )


@torch.no_grad()
@pytest.mark.parametrize("seed", [0, 5])
def test_in_single_precision_means_far_from_the_priors_are_what_they_are_in_double(seed):
    """Slopes there are rounded by more than posteriors of crossed effects are wide: it was 7 nats off at a scale of
    0.08, no number below 0.004, and 1025 nats at seed 5, when means were taken anew once; at seeds 0 to 19 it is at
    most 0.6 nats off.
    """
    pyro.set_rng_seed(seed)
    a, b = torch.randint(12, (200,)), torch.randint(8, (200,))

    def model():
        s, mu = spread("s"), normal("mu", torch.zeros(()), 5.0)
        with pyro.plate("a", 12):
            u = normal("u", torch.zeros(()), 2.4)
        with pyro.plate("b", 8):
            v = normal("v", torch.zeros(()), 0.2)
        with pyro.plate("rows", 200):
            normal("y", mu + u[..., a] + v[..., b], s)

    s = torch.logspace(-2.0, 0.0, 20).unsqueeze(-1)
    latents = {
        "s": s,
        "mu": 5 * torch.randn(20, 1),
        "u": 2.4 * torch.randn(20, 12),
        "v": 0.2 * torch.randn(20, 8),
    }
    y = latents["mu"] + latents["u"][:, a] + latents["v"][:, b] + s * torch.randn(20, 200)
    found = []
    for dtype in (torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        guide = AutoNaMIGuide(model, observed=["y"], rules={"s": "learned"})
        now, data = (
            {name: value.to(dtype) for name, value in latents.items()},
            {"observations": {"y": y.to(dtype)}},
        )
        guide(observations={"y": y[-1].to(dtype)})
        assert {guide.rules[name].rule for name in ("mu", "u", "v")} == {"exact"}
        found.append(guide.log_prob_of(False, now, None, **data).double())
        found.append(guide.log_prob_of(False, now, None, **data).double())  # from where it ended
    for single in found[2:]:
        # as an error of a mean counts by its precision
        off = (single - found[0]).abs() * s.squeeze(-1) ** 2
        assert off.max() < 5e-4, single - found[0]
        assert (single - found[0]).abs().max() < 1.0


def test_priors_that_read_latents_drawn_later_are_not_taken_for_exact():
    """Where members are drawn first and their groups given them, the rows of a block would be in a wrong order."""
    y = torch.randn(3, 4)
    guide = AutoNaMIGuide(nested, inverse="forward")
    guide(y)
    assert guide.conjugate == ()
