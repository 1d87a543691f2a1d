"""Constants of joint Gaussian blocks, kept from step to step: the steps are those that derive all afresh."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO

from pyro_nami import AutoNaMIGuide
from pyro_nami.factors.path_scored import PathShare
from pyro_nami.guide import derivation, first_latents

pytestmark = pytest.mark.usefixtures("double", "own_parameters")
GROUP = torch.tensor([0, 1, 2, 0, 1, 2, 2, 2, 1, 0, 0, 1])
OUTER = torch.tensor([0, 0, 1])
GENERATOR = torch.Generator().manual_seed(1)
X, Y, Z = torch.randn(3, 12, generator=GENERATOR, dtype=torch.float64)
SWITCHED: list[bool] = []  # not to be seen in a call's arguments
SEEN = torch.arange(12) % 4 > 0


@pytest.fixture(autouse=True)
def scales_are_learned(monkeypatch):
    """As those are of which there are more, so that blocks are derived in every step."""
    monkeypatch.setattr(first_latents, "MOST_ON_GRID", 0)
    monkeypatch.setattr(first_latents, "MOST_NUMBERS", 0)


def normal(name, loc=0.0, scale=1.0, **kwargs):
    return pyro.sample(name, dist.Normal(torch.as_tensor(loc), scale), **kwargs)


def spread(name):
    return pyro.sample(name, dist.HalfNormal(torch.ones(())))


# ---- models whose blocks have constants


def schools(data):
    mu, tau = normal("mu", 1.0, 5.0), spread("tau")
    with pyro.plate("schools", 12):
        normal("y", normal("theta", mu, tau), data["x"].exp(), obs=data["y"])


def regression(data):
    sd, b = spread("sd"), normal("b", 0.5, 3.0)
    w = pyro.sample("w", dist.Normal(torch.zeros(2), torch.tensor([1.0, 20.0])).to_event(1))
    with pyro.plate("rows", 12):
        normal("y", b + w[..., 0] * data["x"] + w[..., 1] * data["x"].square(), sd, obs=data["y"])


def varying_slopes(data):
    mu, taus, sd = normal("mu", 0.0, 5.0), [spread("tau0"), spread("tau1")], spread("sd")
    with pyro.plate("groups", 3):
        a = normal("a", mu, taus[0])
        b = normal("b", 0.5 * a + 1.0, taus[1])
    with pyro.plate("rows", 12):
        normal("y", a[..., GROUP] + b[..., GROUP] * data["x"], sd, obs=data["y"])


def nested(data):
    mu, sds = normal("mu", 0.0, 5.0), [spread(f"sd{i}") for i in range(3)]
    with pyro.plate("outer", 2):
        d = normal("d", mu, sds[0])
    with pyro.plate("inner", 3):
        b = normal("b", 2.0 * d[..., OUTER], sds[1])
    with pyro.plate("rows", 12):
        normal("y", b[..., GROUP], sds[2], obs=data["y"])


def two_children(data):
    mu, sd, other = normal("mu", 0.0, 5.0), spread("sd"), spread("other")
    with pyro.plate("rows", 12):
        z = normal("z", mu, sd)
        normal("y", z, other, obs=data["y"])
        normal("x", 2.0 * z + mu, 0.5, obs=data["x"])


def masked(data):
    mu, tau, sd = normal("mu", 0.0, 5.0), spread("tau"), spread("sd")
    with pyro.plate("rows", 12):
        z = normal("z", mu, tau)
        with poutine.mask(mask=data["seen"]):
            normal("y", z, sd, obs=data["y"])


def scaled(data):
    mu, sd = normal("mu", 0.0, 5.0), spread("sd")
    with pyro.plate("rows", 12), poutine.scale(scale=data["scale"]):
        normal("y", mu * data["x"], sd, obs=data["y"])


CONSTANT = [schools, regression, varying_slopes, nested, two_children, masked, scaled]


# ---- and models whose blocks have none


def drawn_slope(data):
    mu, slope, sd = normal("mu", 0.0, 5.0), spread("slope"), spread("sd")
    with pyro.plate("rows", 12):
        normal("y", slope * mu * data["x"], sd, obs=data["y"])


def drawn_shift(data):
    mu, shift, sd = normal("mu", 0.0, 5.0), spread("shift"), spread("sd")
    with pyro.plate("rows", 12):
        normal("y", mu * data["x"] + shift, sd, obs=data["y"])


def drawn_weights(data):
    mu, power, sd = normal("mu", 0.0, 5.0), spread("power"), spread("sd")
    with pyro.plate("rows", 12):
        normal("y", mu * data["x"], sd + power * data["x"].exp(), obs=data["y"])


def drawn_prior(data):
    rho, mu, sd = spread("rho"), normal("mu", 0.0, 5.0), spread("sd")
    with pyro.plate("rows", 12):
        normal("y", normal("z", rho * mu, 0.5), sd, obs=data["y"])


def detached(data):
    """Only values tell that it is none, not gradients."""
    mu, slope, sd = normal("mu", 0.0, 5.0), spread("slope").detach(), spread("sd")
    with pyro.plate("rows", 12):
        normal("y", slope * mu * data["x"], sd, obs=data["y"])


def parameter(data):
    mu, sd = normal("mu", 0.0, 5.0), spread("sd")
    with pyro.plate("rows", 12):
        normal("y", data["parameter"] * mu * data["x"], sd, obs=data["y"])


def subsampled(data):
    sd, tau = spread("sd"), spread("tau")
    with pyro.plate("rows", 12, subsample_size=5) as rows:
        normal("y", normal("mu", 0.0, tau) * data["x"][rows], sd, obs=data["y"][rows])


def random(data):
    mu, sd = normal("mu", 0.0, 5.0), spread("sd")
    with pyro.plate("rows", 12):
        normal("y", mu * (torch.rand(12) if SWITCHED else data["x"]), sd, obs=data["y"])


VARYING = [drawn_slope, drawn_shift, drawn_weights, drawn_prior, detached, parameter, subsampled]


def steps(model, monkeypatch, *, afresh, particles=1, change=None):
    """Returns losses and gradients of some steps, each at a seed of its own, and what was kept after each."""
    data = {"x": X.clone(), "y": Y.clone(), "seen": SEEN.clone(), "scale": 3.0}
    data["parameter"] = torch.tensor(0.7, requires_grad=True)
    found, kept = [], []
    with monkeypatch.context() as patch:
        if afresh:
            patch.setattr(derivation, "constants_of", lambda *args: None)
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        guide = AutoNaMIGuide(model)
        guide(data)
        elbo = Trace_ELBO(
            num_particles=particles, vectorize_particles=particles > 1, max_plate_nesting=1
        )
        for i in range(7):
            if change is not None and i >= 4:
                change(data)
            pyro.set_rng_seed(i)
            loss = elbo.differentiable_loss(model, guide, data)
            parameters = [*guide.parameters(), data["parameter"]]
            slopes = torch.autograd.grad(
                loss, parameters, allow_unused=True, materialize_grads=True
            )
            found.append(
                torch.cat([loss.detach().reshape(1), *(slope.flatten() for slope in slopes)])
            )
            kept.append(
                [each is not None for each in guide._reader.memory.derived.constants.values()]
            )
    assert {"mu", "w"} & set(guide.conjugate)
    return torch.stack(found), kept


def assert_same(model, monkeypatch, **options):
    """Returns what was kept after each step."""
    expected, _ = steps(model, monkeypatch, afresh=True, **options)
    found, kept = steps(model, monkeypatch, afresh=False, **options)
    assert expected.isfinite().all() and (expected != 0).any(0).sum() > 2
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)
    return kept


@pytest.mark.parametrize("particles", [1, 3])
@pytest.mark.parametrize("model", CONSTANT, ids=lambda model: model.__name__)
def test_steps_by_constants_are_those_derived_afresh(model, particles, monkeypatch):
    kept = assert_same(model, monkeypatch, particles=particles)
    assert kept[0] == [] and kept[-1] == [True]


@pytest.mark.parametrize("model", VARYING, ids=lambda model: model.__name__)
def test_nothing_passes_for_a_constant_that_is_none(model, monkeypatch):
    kept = assert_same(model, monkeypatch)
    assert kept[-1] == ([] if model is subsampled else [False])


def test_random_numbers_of_the_models_own_are_no_constants(monkeypatch):
    def runs(afresh):
        SWITCHED.clear()
        return steps(random, monkeypatch, afresh=afresh, change=lambda data: SWITCHED.append(True))

    monkeypatch.setattr(PathShare, "now", lambda self: torch.zeros(()))  # which remembers step 4
    expected, found = runs(afresh=True), runs(afresh=False)
    # Step 4 is answered by what the model read before; in step 5 it is run once more, and draws other numbers.
    assert found[1][3:6] == [[True], [True], [False]]
    for part in (slice(5), slice(6, None)):
        torch.testing.assert_close(found[0][part], expected[0][part], rtol=1e-7, atol=1e-7)


def in_place(data):
    data["y"].add_(0.5)


def other_values(data):
    data["y"] = data["y"] + 0.5


def slopes(data):
    data["x"] = data["x"] * 1.5


def one_slope(data):
    data["x"] = data["x"].clone()
    data["x"][3] += 1e-6


def mask(data):
    data["seen"] = ~data["seen"]


def dtype(data):
    data["y"] = Y.float()


@pytest.mark.parametrize(
    "model, change",
    [
        *[
            (model, change)
            for model in (regression, varying_slopes)
            for change in (in_place, other_values, slopes)
        ],
        *[
            (regression, one_slope),
            (schools, slopes),
            (masked, mask),
            (regression, dtype),
            (two_children, slopes),
        ],
    ],
    ids=lambda part: part.__name__,
)
def test_other_data_of_the_same_shapes_are_seen(model, change, monkeypatch):
    kept = assert_same(model, monkeypatch, change=change)
    assert kept[3] == [True]


def test_a_scale_that_changes_is_a_factor(monkeypatch):
    def change(data):
        data["scale"] += 1.0

    assert assert_same(scaled, monkeypatch, change=change)[-1] == [True]


def test_constants_are_forgotten_with_the_rest_and_are_not_saved(monkeypatch):
    guide, data = AutoNaMIGuide(schools), {"x": X, "y": Y}
    for _ in range(4):
        Trace_ELBO().differentiable_loss(schools, guide, data).backward()
    memory = guide._reader.memory
    assert [each is not None for each in memory.derived.constants.values()] == [True]
    assert memory.__getstate__()["derived"].constants == {}
    with torch.no_grad():  # what is kept is not used, as its results are others by rounding
        monkeypatch.setattr(derivation, "FromConstants", None)
        guide(data)
    guide.load_state_dict(guide.state_dict())
    assert memory.derived.constants == {}
