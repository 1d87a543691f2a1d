"""`guide.rules` says how each latent is drawn and why; the option `rules` says how it shall be."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import called
from torch import nn

from pyro_nami import AutoNaMIGuide

pytestmark = pytest.mark.usefixtures("own_parameters")
Y = torch.tensor([0.3, -1.2, 4.0])


def model(y):
    """A latent of each kind: exact in a plate and outside of it, learned, and from the prior."""
    sd = pyro.sample("sd", dist.HalfCauchy(torch.ones(())))
    mu = pyro.sample("mu", dist.Normal(torch.zeros(()), 2.0))
    with pyro.plate("rows", len(y)):
        z = pyro.sample("z", dist.Normal(mu, 1.0))
        pyro.sample("y", dist.Normal(z, sd), obs=y)
        pyro.sample("new", dist.Normal(z, sd))


def pair(prior, likelihood, y=Y):
    def pair_model(y=y):
        z = pyro.sample("z", prior)
        with pyro.plate("rows", len(y)):
            pyro.sample("y", likelihood(z), obs=y)

    return pair_model


def test_a_line_for_each_latent_in_model_order():
    guide = called(model, Y)
    assert list(guide.rules) == ["sd", "mu", "z", "new"]
    assert [note.rule for note in guide.rules.values()] == ["quadrature", "exact", "exact", "prior"]
    assert repr(guide.rules).splitlines() == [
        "sd: quadrature, reads y; not exact: no closed form is known for a prior of type HalfCauchy",
        "mu: exact, reads sd, y",
        "z: exact, reads mu, sd, y",
        "new: prior",
    ]


def test_the_inverse_says_what_went_first_as_it_is_exact():
    line = "Eliminated first, as the model gives their conditionals: "
    assert str(called(model, Y).inverse).splitlines()[-1] == line + "z, mu"
    assert str(called(model, Y, rules={"mu": "learned"}).inverse).splitlines()[-1] == line + "z"
    for options in (
        {"inverse": "reverse"},
        {"exact": False},
        {"rules": {"mu": "learned", "z": "learned"}},
    ):
        assert line not in str(called(model, Y, **options).inverse)


def test_a_latent_that_would_be_exact_without_another_says_so():
    """A precision is conjugate and so is a mean, but not both together."""

    def normals(y):
        precision, mean = (
            pyro.sample("precision", dist.Gamma(2.0, 1.0)),
            pyro.sample("mean", dist.Normal(0.0, 1.0)),
        )
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(mean, precision.rsqrt()), obs=y)

    rules = called(normals, Y).rules
    assert rules["precision"].rule == "quadrature" and rules["mean"].rule == "exact"
    assert rules["precision"].reason == "its data depend on 'mean', which is drawn later"


def test_exact_rules_are_the_conjugate_latents_and_only_they_have_no_reason():
    guide = called(model, Y)
    assert (
        tuple(name for name, note in guide.rules.items() if note.rule == "exact") == guide.conjugate
    )
    assert all(not note.reason for note in guide.rules.values() if note.rule == "exact")
    assert all(note.reason for note in guide.rules.values() if note.rule == "learned")


@pytest.mark.parametrize("name", ["mu", "z"])
def test_a_latent_that_shall_be_learned_is(name):
    guide = called(model, Y, rules={name: "learned"})
    assert guide.rules[name].rule == "learned"
    assert name in guide.network.places and name not in guide.conjugate
    assert guide.rules[name].reason == "`rules` asks for that"


def test_exact_is_no_change_where_a_latent_is_exact():
    assert called(model, Y, rules={"mu": "exact", "z": "exact"}).conjugate == ("mu", "z")


REASONS = {
    "prior": (
        dist.Laplace(torch.zeros(()), 1.0),
        lambda z: dist.Normal(z, 1.0),
        "no closed form is known for a prior of type Laplace",
    ),
    "likelihood": (
        dist.Normal(torch.zeros(()), 1.0),
        lambda z: dist.StudentT(3.0, z, 1.0),
        "log density of 'y' does not stay quadratic",
    ),
    "form": (
        dist.Gamma(torch.tensor(2.0), 1.0),
        lambda z: dist.Normal(z, 1.0),
        "log density of 'y' does not add to a Gamma prior",
    ),
    "mask": (
        dist.Normal(torch.zeros(2), 1.0).mask(torch.tensor([True, False])).to_event(1),
        lambda z: dist.Normal(z.sum(-1), 1.0),
        "it is masked",
    ),
}


@pytest.mark.parametrize("prior, likelihood, reason", REASONS.values(), ids=list(REASONS))
def test_the_reason_is_told_and_raised(prior, likelihood, reason):
    assert reason in called(pair(prior, likelihood)).rules["z"].reason
    with pytest.raises(
        ValueError, match=f"Expected a latent with an exact conditional.*got 'z'.*{reason}"
    ):
        called(pair(prior, likelihood), rules={"z": "exact"})


def test_too_many_values_to_enumerate_are_the_reason():
    many = pair(dist.Categorical(torch.ones(65)), lambda z: dist.Normal(z * 0.1, 1.0))
    assert called(many, Y).rules["z"].reason == "it has 65 values, more than are enumerated"


def test_the_reason_names_another_site_that_is_at_fault():
    def outlier(y):
        z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
        far = pyro.sample("far", dist.Bernoulli(torch.tensor(0.1)))
        pyro.sample("y", dist.Normal(z, 1 + 9 * far), obs=y)

    with pytest.raises(ValueError, match="got 'z': its density reads 'far', which is discrete"):
        called(outlier, Y[0], rules={"z": "exact"})


def test_a_subsampled_child_is_the_reason():
    def minibatch(y):
        mu = pyro.sample("mu", dist.Normal(torch.zeros(()), 1.0))
        with pyro.plate("rows", len(y), subsample_size=2) as index:
            pyro.sample("y", dist.Normal(mu, 1.0), obs=y[index])

    with pytest.raises(ValueError, match="got 'mu': a call sees a part only of 'y'"):
        called(minibatch, Y, rules={"mu": "exact"})


@pytest.mark.parametrize(
    "options",
    [{"exact": False}, {"anchor": False}, {"families": "normal"}, {"families": {"z": "normal"}}],
    ids=str,
)
def test_options_that_exclude_it_contradict_exact(options):
    with pytest.raises(ValueError, match="got 'z': (the options|.families.)"):
        called(model, Y, rules={"z": "exact"}, **options)


def test_learned_excludes_what_it_names_only():
    assert called(model, Y, rules={"z": "learned"}, inverse="reverse").rules["mu"].rule == "learned"
    assert called(model, Y, rules={"mu": "learned"}, inverse="reverse").conjugate == ("z",)


def test_without_exact_conditionals_there_are_none():
    guide = called(model, Y, exact=False)
    assert guide.conjugate == ()
    assert [note.rule for note in guide.rules.values()] == [
        "learned",
        "learned",
        "learned",
        "prior",
    ]
    assert set(guide.network.places) == {"sd", "mu", "z"}


@pytest.mark.parametrize("name", ["nothing", "y"])
def test_rules_of_other_sites_are_refused(name):
    with pytest.raises(
        ValueError, match=rf"keys of `rules` to be a latent site each, .*'sd'.*got '{name}'"
    ):
        called(model, Y, rules={name: "learned"})


@pytest.mark.parametrize("rule", ["prior", "Exact", None, True])
def test_other_rules_are_refused_before_the_first_call(rule):
    with pytest.raises(ValueError, match=f"one of .* 'bound'; got {rule!r} for 'z'"):
        AutoNaMIGuide(model, rules={"z": rule})


def test_rules_need_a_call_first():
    with pytest.raises(RuntimeError):
        AutoNaMIGuide(model).rules  # noqa: B018


def test_what_dropout_moves_is_learned():
    """A conditional would be that of one mask; set-up runs the model without any."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5))

        def forward(self, x, y=None):
            w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
            mean = (self.features(x) * w[..., None, :]).sum(-1)
            with pyro.plate("rows", len(x)):
                pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    x = torch.linspace(-1.0, 1.0, 10).reshape(5, 2)
    for training, rule in ((True, "learned"), (False, "exact")):
        guide = AutoNaMIGuide(Model().train(training))
        guide(x, x.sum(-1))
        assert guide.rules["w"].rule == rule
        assert training == ("dropout" in str(guide.rules))
