"""Bad input: every row of the list in the issue is a clear error that names the site and the next step."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import (
    CASES,
    CHAIN,
    called,
    conjugate_normal,
    coupled_instances,
    eight_schools,
    local_normals,
    nested,
    pair,
    steps,
    support_parents,
)
from pyro import poutine
from pyro.infer import Predictive
from torch import nn

from pyro_nami import AutoNaMIGuide
from pyro_nami.graph import mean_field
from pyro_nami.reading.extraction import extract_bayesnet

Y = torch.tensor(1.0)


# ---- options


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"init_scale": -1.0}, ValueError, r"init_scale > 0\.; got -1\.0"),
        ({"init_scale": 0.0}, ValueError, "init_scale"),
        ({"within": "joint"}, ValueError, "within .*got 'joint'"),
        ({"pooling": "max"}, ValueError, "pooling to be one of mean, attention, or a callable"),
    ],
)
def test_options_out_of_range(options, error, message):
    with pytest.raises(error, match=message):
        AutoNaMIGuide(CHAIN, **options)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"inverse": "backward"}, ValueError, "'auto', 'forward'.*got 'backward'"),
        ({"inverse": lambda net: net}, TypeError, "Inverse; got BayesNet"),
        ({"blocks": [["a", "b"], ["c", "nope"]]}, ValueError, "'nope'"),
        ({"blocks": [["a", "b"]]}, ValueError, "'c'"),
        ({"blocks": [["a", "b"], ["b", "c"]]}, ValueError, "'b' twice"),
        ({"blocks": [["a"], ["b"], ["c"]], "inverse": "mean_field"}, ValueError, "blocks"),
        ({"families": {"nope": "flow"}}, ValueError, "families.*'nope'"),
        ({"families": {"y": "flow"}}, ValueError, "families.*'y'"),
        ({"families": "nope"}, ValueError, "nope"),
        ({"observed": ["nope"]}, ValueError, "nope"),
        ({"observed": "nope"}, ValueError, "nope"),
        ({"embeddings": {"nope": nn.Identity()}}, ValueError, "embeddings.*'nope'"),
        ({"embeddings": {"a": nn.Identity()}}, ValueError, "embeddings.*'a'"),
    ],
)
def test_options_that_name_what_the_model_lacks(options, error, message):
    with pytest.raises(error, match=message):
        called(CHAIN, Y, **options)


def test_an_inverse_of_another_model():
    other = extract_bayesnet(nested, *CASES["nested"].arguments())
    with pytest.raises(ValueError, match="latent sites.*extract_bayesnet"):
        called(CHAIN, Y, inverse=mean_field(other))


def test_an_order_that_a_support_forbids():
    for options in ({"inverse": "stuhlmueller"}, {"blocks": [["hi"], ["z"]]}):
        with pytest.raises(ValueError, match="'z'.*'hi'.*support"):
            called(support_parents, Y, **options)


# ---- models


def test_a_model_without_latent_sites_gets_an_empty_guide_as_pyros_and_a_word(caplog):
    def model(y):
        pyro.sample("y", dist.Normal(0.0, 1.0), obs=y)

    guide = called(model, Y)
    assert "at least one latent" in caplog.text and "'y'" in caplog.text
    assert guide(Y) == {} and guide.median(Y) == {}
    loss = steps(model, guide, Y, count=1)[0].item()
    assert loss == pytest.approx(-dist.Normal(0.0, 1.0).log_prob(Y).sum().item())


def test_a_model_without_sites(caplog):
    assert called(lambda: None)() == {}
    assert "no sites" in caplog.text


@pytest.mark.parametrize("inverse", ["forward", "reverse"])
def test_an_unsupported_support(inverse):
    model = pair(
        dist.ProjectedNormal(torch.tensor([1.0, 0.0])), lambda z: dist.Normal(z[..., 0], 1.0)
    )
    with pytest.raises(ValueError, match="'?\"?z.*register_family.*ProjectedNormalReparam"):
        called(model, Y, inverse=inverse)


def test_instances_that_are_not_independent():
    model = pair(dist.Normal(0.0, 1.0), lambda z: dist.Normal(z.cumsum(-1), 1.0), rows=3)
    with pytest.raises(ValueError, match="'y'.*'data'.*to_event"):
        called(model, torch.randn(3))


@pytest.mark.parametrize("by_name", [False, True])
def test_arguments_with_nan_are_named(by_name):
    def model(x, y):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(z * x, 1.0), obs=y)

    x, y = torch.tensor([1.0, torch.nan]), torch.zeros(2)
    args, kwargs = ((), {"x": x, "y": y}) if by_name else ((x, y), {})
    with pytest.raises(ValueError, match="got some in '(argument 0|x)'.*obs_mask="):
        AutoNaMIGuide(model)(*args, **kwargs)


# ---- calls


def vector(size, y):
    z = pyro.sample("z", dist.Normal(torch.zeros(size), 1.0).to_event(1))
    pyro.sample("y", dist.Normal(z.sum(-1), 1.0), obs=y)


def vector_in_a_collider(size, y):
    z = pyro.sample("z", dist.Normal(torch.zeros(size), 1.0).to_event(1))
    e = pyro.sample("e", dist.Normal(0.0, 1.0))
    c = pyro.sample("c", dist.Normal(z.sum(-1), 1.0))
    pyro.sample("y", dist.Normal(c + e, 1.0), obs=y)


def vector_of_data(size, y):
    z = pyro.sample("z", dist.Normal(0.0, 1.0))
    pyro.sample(
        "y",
        dist.Normal(z.unsqueeze(-1), 1.0).expand(z.shape + (size,)).to_event(1),
        obs=y.expand(size),
    )


@pytest.mark.parametrize("inverse", ["forward", "reverse"])
@pytest.mark.parametrize("anchor", [True, False])
@pytest.mark.parametrize(
    "model, site", [(vector, "z"), (vector_in_a_collider, "z"), (vector_of_data, "y")]
)
def test_a_changed_event_shape(model, site, inverse, anchor):
    guide = called(model, 2, Y, inverse=inverse, anchor=anchor)
    with pytest.raises(ValueError, match=f"'{site}'.*event shape.*new guide"):
        guide(3, Y)


@pytest.mark.parametrize(
    "model, data, plate",
    [
        (eight_schools, lambda n: (torch.randn(n), torch.rand(n) + 1), "schools"),
        (nested, lambda n: (torch.randn(3, n),), "members"),
    ],
    ids=["schools", "nested"],
)
@pytest.mark.parametrize("size", [2, 7])
def test_a_joint_plate_cannot_change_its_size(model, data, plate, size):
    guide = called(model, *data(4), inverse="forward")
    assert any(plate in joint for joint in guide.inverse.joint.values())
    with pytest.raises(ValueError, match=f"'{plate}' of size 4.*got {size}.*new guide"):
        guide(*data(size))
    with pytest.raises(ValueError, match=f"'{plate}' of size 4.*got {size}.*new guide"):
        guide.log_prob({name: torch.tensor(0.1) for name in guide.bayesnet.latent}, *data(size))


def test_data_never_seen():
    model = pair(dist.Normal(0.0, 1.0))
    guide = AutoNaMIGuide(model, observed=["y"])
    with pytest.raises(ValueError, match="'y'.*observations="):
        guide()
    other = AutoNaMIGuide(model)
    with torch.no_grad():
        other(observations={"y": Y})  # which are those of one call
    with pytest.raises(ValueError, match="'y'.*observations="):
        Predictive(model, guide=other, num_samples=2)()


def test_new_rows_that_the_order_of_sampling_cannot_predict():
    def model(x, y=None):
        local_normals(y, rows=len(x))

    guide = AutoNaMIGuide(model, inverse="stuhlmueller")
    steps(model, guide, torch.zeros(4), torch.zeros(4), count=1)
    with pytest.warns(UserWarning, match="'data' has 6 instances, 4 in training"):
        assert Predictive(model, guide=guide, num_samples=3)(torch.zeros(6))["z"].shape == (3, 6)
    with pytest.raises(
        NotImplementedError, match="instances of 'z' that training had.*another `inverse`"
    ):
        poutine.trace(guide).get_trace(torch.zeros(6))


@pytest.mark.parametrize("inverse", ["forward", "reverse"])
def test_nan_in_later_data_names_the_site(inverse):
    guide = called(conjugate_normal, torch.zeros(3), inverse=inverse)
    with pytest.raises(ValueError, match="(?s)'?y'?.*(nan|NaN)"):
        guide(torch.tensor([1.0, float("nan"), 0.0]))


@pytest.mark.parametrize(
    "name, bad, options, site",
    [
        ("chain", "", {"exact": False}, "[abc]"),
        ("eight_schools", "network.networks.0.output_unconstrained", {"exact": False}, "mu"),
        (
            "eight_schools",
            "network.networks.0.output_unconstrained",
            {"rules": {"tau": "learned"}},
            "tau",
        ),
    ],
)
def test_a_draw_with_nan_names_site_and_parameter_also_where_the_model_fails_at_it(
    name, bad, options, site
):
    """What a diverged optimizer leaves behind, in all parameters or in one."""
    case = CASES[name]
    guide = called(case.model, *case.arguments(), **options)
    with torch.no_grad():
        for key, parameter in guide.named_parameters():
            if bad in key:
                parameter.fill_(torch.nan)
    first = "output" if bad else "layer_0"
    message = rf"draw of site '{site}' without NaN; .*parameter 'network\.networks\.0\.{first}'.*lower the learning"
    with pytest.raises(ValueError, match=message):
        guide(*case.arguments())


# ---- densities, state, plates


def test_log_prob_without_a_latent():
    guide = called(CHAIN, Y)
    with pytest.raises(ValueError, match=r"\['a', 'b', 'c'\].*'b'"):
        guide.log_prob({"a": Y, "c": Y}, Y)


def test_log_prob_of_a_wrong_shape():
    guide = called(eight_schools, *CASES["eight_schools"].arguments())
    latents = {
        "mu": torch.zeros(3, 2, 4),
        "tau": torch.ones(3, 2, 4),
        "theta": torch.zeros(3, 2, 8),
    }
    with pytest.raises(ValueError, match="'mu'.*\\(3, 2, 4\\)"):
        guide.log_prob(latents, *CASES["eight_schools"].arguments())


def test_the_structure_before_the_first_call():
    guide = AutoNaMIGuide(CHAIN)
    for name in ("bayesnet", "inverse"):
        with pytest.raises(RuntimeError, match="call it"):
            getattr(guide, name)


def test_create_plates_that_are_no_plates():
    guide = AutoNaMIGuide(coupled_instances, create_plates=lambda y: ["parts"])
    with pytest.raises(TypeError, match="create_plates.*str"):
        guide(Y)


@pytest.mark.parametrize("later", [False, True])
def test_an_unknown_site_in_the_observations(later):
    guide = called(CHAIN, Y) if later else AutoNaMIGuide(CHAIN)
    with pytest.raises(ValueError, match="nope"):
        guide(Y, observations={"nope": Y})


def test_a_failed_first_call_leaves_the_guide_fresh():
    guide = AutoNaMIGuide(conjugate_normal)
    with pytest.raises(TypeError):
        guide(torch.zeros(3), torch.zeros(3))
    assert guide.prototype_trace is None
    assert guide(torch.zeros(3))["mu"].isfinite()
