"""The guide's options: inverses, blocks and semi-observed sites, families, networks, embeddings."""

from __future__ import annotations

import copy

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import (
    CASES,
    CHAIN,
    TREE,
    amortized,
    beta_bernoulli,
    beta_bernoulli_posterior,
    discrete_locals,
    eight_schools,
    learned,
    regression,
    scatter,
    steps,
)
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO, TraceGraph_ELBO
from pyro.optim import ClippedAdam
from torch import nn

from pyro_nami import AutoNaMIGuide, mixture
from pyro_nami.factors.unconstrained import NormalFamily
from pyro_nami.graph import mean_field, nami, verify_inverse
from pyro_nami.reading.extraction import extract_bayesnet

pytestmark = pytest.mark.filterwarnings("error")
Y = torch.tensor(1.0)


# ---- inverses


@pytest.mark.parametrize(
    "name, direction",
    [
        *[
            ("collider", "auto"),
            ("tree", "forward"),
            ("diamond", "reverse"),
            ("eight_schools", "free"),
        ],
        *[("nested", "forward"), ("with_factor", "reverse"), ("barren", "auto")],
    ],
)
def test_the_guides_inverse_is_faithful_to_the_models_network(name, direction):
    case = CASES[name]
    for exact in (True, False):
        pyro.clear_param_store()
        guide = AutoNaMIGuide(case.model, inverse=direction, exact=exact)
        guide(*case.arguments())
        assert verify_inverse(guide.bayesnet, guide.inverse)
        if not (exact and direction == "auto"):  # where exact latents are eliminated first
            assert guide.inverse == nami(guide.bayesnet, direction=direction)


@pytest.mark.parametrize(
    "inverse", [mean_field(extract_bayesnet(CHAIN, Y)), mean_field, "mean_field"]
)
def test_an_inverse_may_be_given_or_computed(inverse):
    guide = AutoNaMIGuide(CHAIN, inverse=inverse)
    guide(Y)
    assert {v: set(guide.inverse.parents[v]) for v in "abc"} == {v: {"y"} for v in "abc"}


def test_extra_edges_may_be_added():
    guide = AutoNaMIGuide(
        CHAIN, inverse=lambda net: nami(net, direction="reverse").with_edges([("a", "c")])
    )
    guide(Y)
    assert {"a", "b"} <= set(guide.inverse.parents["c"])


# ---- blocks and semi-observed sites


def labelled(x, y=None):
    """Semi-supervised: y is a label that some calls observe."""
    y = pyro.sample("y", dist.Bernoulli(0.5), obs=y)
    z = pyro.sample("z", dist.Normal(0.0, 1.0))
    LIKELIHOODS.append(1)
    pyro.sample("x", dist.Normal(2 * y - 1 + z, 0.5), obs=x)


LIKELIHOODS: list[int] = []  # one for each run of that of `labelled`


X = torch.tensor(0.7)
SEMI = {"blocks": [["z"], ["y"]]}


@pytest.mark.parametrize(
    "first", [None, torch.tensor(1.0)], ids=["unlabelled first", "labelled first"]
)
def test_one_guide_for_labelled_and_unlabelled_calls(first):
    guide = AutoNaMIGuide(labelled, **SEMI)
    guide(X, first)
    assert set(guide(X)) == {"y", "z"}
    assert set(guide(X, torch.tensor(1.0))) == {"z"}
    label = {"observations": {"y": torch.tensor(1.0)}}
    assert set(guide(X, **label)) == {"z"}
    assert guide.inverse.order == ("z", "y")


def test_a_known_kind_of_call_does_not_run_the_likelihood():
    """The run in which latents are drawn ends at the last of them, and labels are found among the arguments."""
    guide = AutoNaMIGuide(labelled, **SEMI)
    label = torch.tensor(1.0)
    guide(X), guide(X, label)
    LIKELIHOODS.clear()
    assert set(guide(X)) == {"y", "z"} and set(guide(X, label)) == {"z"}
    assert set(guide(X, torch.tensor(0.0))) == {"z"}
    assert not LIKELIHOODS


@pytest.mark.parametrize("first", [False, True])
def test_a_label_that_the_model_makes_itself_is_read_in_every_call(first):
    guide = AutoNaMIGuide(
        lambda x, known=False: labelled(x, (x > 0.5).to(x) if known else None), **SEMI
    )
    guide(X, first)
    guide(X, not first)
    scatter(guide)
    for x, label in ((X, 1.0), (torch.tensor(0.2), 0.0)):
        assert set(guide(x, True)) == {"z"} and set(guide(x)) == {"y", "z"}
        values = {"y": torch.tensor(label), "z": torch.tensor(0.2)}
        y = poutine.trace(poutine.condition(guide, values)).get_trace(x).nodes["y"]
        expected = guide.log_prob(values, x) - y["fn"].log_prob(values["y"])
        assert torch.allclose(guide.log_prob({"z": values["z"]}, x, True), expected, atol=1e-5)


def test_the_joint_density_splits_into_label_and_rest_which_reads_the_label():
    guide = AutoNaMIGuide(labelled, **SEMI)
    guide(X)
    scatter(guide)
    values = {"y": torch.tensor(1.0), "z": torch.tensor(0.2)}
    trace = poutine.trace(poutine.condition(guide, values)).get_trace(X)
    trace.compute_log_prob()
    assert torch.allclose(guide.log_prob(values, X), trace.log_prob_sum())
    zero, one = (guide.log_prob({"z": values["z"]}, X, torch.tensor(label)) for label in (0.0, 1.0))
    assert torch.allclose(one, trace.nodes["z"]["log_prob"], atol=1e-5)
    assert zero != one


def test_training_on_both_kinds_of_calls():
    guide = AutoNaMIGuide(labelled, **SEMI)
    for label in ((), (torch.tensor(1.0),), (), (torch.tensor(0.0),)):
        steps(labelled, guide, X, *label, count=1, elbo=TraceGraph_ELBO())


def test_semi_observed_sites_in_a_plate():
    y, k = torch.randn(5), torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0])
    guide = AutoNaMIGuide(discrete_locals, blocks=[["k"], ["p"]])
    assert set(guide(y)) == {"p", "k"} and set(guide(y, k)) == {"p"}
    steps(discrete_locals, guide, y, k, count=1)


@pytest.mark.parametrize(
    "blocks", [[["a"], ["b"], ["c"]], [["c"], ["b"], ["a"]], [["b"], ["a", "c"]]], ids=str
)
def test_blocks_fix_the_order(blocks):
    guide = AutoNaMIGuide(CHAIN, blocks=blocks)
    guide(Y)
    position = {name: i for i, block in enumerate(blocks) for name in block}
    ranks = [position[name] for name in guide.inverse.order]
    assert ranks == sorted(ranks)
    assert verify_inverse(guide.bayesnet, guide.inverse)


# ---- families


OPTIONS = [
    {"families": "flow"},
    {"families": "mixture"},
    {"families": "match"},
    {"families": NormalFamily},
    {"families": mixture(2)},
    {"families": {"tau": "flow"}},
    {"families": {"mu": NormalFamily}},
    *(
        {"hidden_features": width, "shared": shared}
        for width in ((), (4,), (16, 16))
        for shared in (True, False)
    ),
]


@pytest.mark.parametrize("inverse", ["forward", "reverse"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_families_widths_and_sharing(options, inverse):
    case = CASES["eight_schools"]
    guide = AutoNaMIGuide(eight_schools, inverse=inverse, **options)
    steps(eight_schools, guide, *case.arguments())
    assert {
        key: tuple(value.shape) for key, value in guide(*case.arguments()).items()
    } == case.shapes
    if not isinstance(options.get("families", {}), dict):  # one for all is taken by all
        assert {note.rule for note in guide.rules.values()} == {"learned"}


def test_a_matching_family_reaches_a_conjugate_posterior():
    """Beta(5, 4): mean 0.556, sd 0.157; training noise over seeds is below 0.03."""
    y = torch.tensor([1.0, 1.0, 0.0, 1.0])
    a, b = beta_bernoulli_posterior(y)
    guide = learned(beta_bernoulli, families="match")
    objective = Trace_ELBO(num_particles=8, vectorize_particles=True, max_plate_nesting=1)
    svi = SVI(beta_bernoulli, guide, ClippedAdam({"lr": 0.05, "lrd": 0.99}), objective)
    for _ in range(300):
        svi.step(y)
    with torch.no_grad(), pyro.plate("outer", 4000, dim=-2):
        draws = guide(y)["p"]
    assert abs(draws.mean() - a / (a + b)) < 0.06
    assert abs(draws.std() - (a * b / ((a + b) ** 2 * (a + b + 1))) ** 0.5) < 0.04


DISCRETE = {
    "bernoulli": dist.Bernoulli(0.3),
    "categorical": dist.Categorical(torch.tensor([0.2, 0.3, 0.5])),
    "one-hot": dist.OneHotCategorical(torch.tensor([0.2, 0.3, 0.5])),
    "binomial": dist.Binomial(5, torch.tensor(0.3)),
    "poisson": dist.Poisson(torch.tensor(2.0)),
    "geometric": dist.Geometric(torch.tensor(0.3)),
    "negative binomial": dist.NegativeBinomial(torch.tensor(3.0), torch.tensor(0.4)),
    "relaxed bernoulli": dist.RelaxedBernoulli(torch.tensor(0.5), torch.tensor(0.3)),
    "relaxed one-hot": dist.RelaxedOneHotCategorical(
        torch.tensor(0.5), torch.tensor([0.2, 0.3, 0.5])
    ),
    "straight through": dist.RelaxedBernoulliStraightThrough(torch.tensor(0.5), torch.tensor(0.3)),
    "straight-through one-hot": dist.RelaxedOneHotCategoricalStraightThrough(
        torch.tensor(0.5), torch.tensor([0.2, 0.3, 0.5])
    ),
}


@pytest.mark.parametrize("inverse", ["forward", "reverse"])
@pytest.mark.parametrize("kind", DISCRETE)
def test_every_kind_of_discrete_latent(kind, inverse):
    """Beside a continuous one that it depends on, and that reads it."""

    def model(y):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            k = pyro.sample("k", DISCRETE[kind].expand([len(y)]))
            total = k[..., 0] if DISCRETE[kind].event_shape else k
            pyro.sample("y", dist.Normal(mu + total, 1.0), obs=y)

    guide = AutoNaMIGuide(model, inverse=inverse)
    steps(model, guide, torch.randn(4), elbo=Trace_ELBO(num_particles=3, vectorize_particles=True))
    trace = poutine.trace(guide).get_trace(torch.randn(4))
    assert trace.nodes["k"]["fn"].event_shape == DISCRETE[kind].event_shape


@pytest.mark.parametrize("observed", [(), ("y",)], ids=["svi", "compiled"])
def test_a_relaxed_latent_is_normal_in_unconstrained_space(observed):
    """As AutoNormal has it."""

    def model(y=None):
        k = pyro.sample("k", DISCRETE["relaxed one-hot"])
        pyro.sample("y", dist.Normal(k[..., 0], 1.0), obs=y)

    guide = AutoNaMIGuide(model, observed=observed)
    data = {"y": torch.tensor(0.3)}
    guide(**({"observations": data} if observed else data))
    assert guide._made().learned["k"].family.num_params == 2


# ---- networks


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", ["tree", "eight_schools", "vectors"])
def test_the_number_of_parameters_is_that_of_weights_which_gradients_reach(name, shared):
    """Of smooth networks with random weights, by the density at random values."""
    case = CASES[name]
    guide = amortized(
        case.model,
        inverse="reverse",
        shared=shared,
        hidden_features=(5, 4),
        families="normal",
        anchor=False,
    )
    with pytest.raises(RuntimeError, match="called once"):
        guide.num_parameters  # noqa: B018
    args = case.arguments()
    guide(*args)
    reached = [torch.zeros_like(value, dtype=torch.bool) for value in guide.parameters()]
    for _ in range(3):
        scatter(guide, 0.3)
        values = {name: value.detach() for name, value in guide(*args).items()}
        parameters = [*guide.parameters()]
        gradients = torch.autograd.grad(
            guide.log_prob(values, *args), parameters, allow_unused=True
        )
        reached = [seen if g is None else seen | (g != 0) for seen, g in zip(reached, gradients)]
    assert guide.num_parameters == sum(int(seen.sum()) for seen in reached)


@pytest.mark.parametrize("shared", [True, False])
def test_without_skip_weights_there_are_no_direct_ones(shared):
    def size(**options):
        pyro.clear_param_store()
        guide = learned(TREE, shared=shared, hidden_features=(8,), evidence=False, **options)
        guide(*CASES["tree"].arguments())
        return guide, guide.num_parameters

    with_skip, without = size(), size(skip=False)
    reads = sum(map(len, with_skip[0].inverse.parents.values()))
    assert with_skip[1] - without[1] == 2 * reads  # location and scale of each parent
    steps(TREE, without[0], *CASES["tree"].arguments())


def test_activations():
    guide = learned(CHAIN, activation=torch.nn.functional.elu)
    guide(Y)
    scatter(guide)
    other = learned(CHAIN)
    other(Y)
    other.load_state_dict(guide.state_dict())
    values = {name: torch.tensor(0.5) for name in "abc"}
    assert guide.log_prob(values, Y) != other.log_prob(values, Y)


def pooled_children(y):
    z = pyro.sample("z", dist.Gamma(torch.tensor(2.0), 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(torch.zeros(y.shape[1]), z.unsqueeze(-1)).to_event(1), obs=y)


@pytest.mark.parametrize("pooling", ["mean", "attention"])
def test_the_activation_is_that_of_set_encoders_too(pooling):
    guide = amortized(pooled_children, activation=torch.nn.functional.elu, pooling=pooling)
    guide(torch.randn(5, 2))
    assert [encoder.activation for encoder in guide.network.encoders] == [torch.nn.functional.elu]


def test_evidence_that_is_left_out_is_told_of():
    with pytest.warns(UserWarning, match="Site 'z' takes no evidence.*'data'.*129 inputs"):
        amortized(pooled_children, rules={"z": "learned"})(torch.randn(5, 129))


def test_covariates_that_are_left_out_are_told_of():
    with pytest.warns(UserWarning, match="site 'y' differ in 64 covariates"):
        AutoNaMIGuide(regression)(torch.randn(200, 70), torch.randn(200))


@pytest.mark.parametrize("within, coupled", [("autoregressive", True), ("independent", False)])
def test_elements_of_a_vector_are_independent_on_request(within, coupled):
    args = CASES["vectors"].arguments()
    guide = AutoNaMIGuide(CASES["vectors"].model, inverse="reverse", within=within)
    guide(*args)
    scatter(guide)
    held = {"z": torch.zeros(3), "w": torch.tensor(1.0)}
    fn = poutine.trace(poutine.condition(guide, held)).get_trace(*args).nodes["z"]["fn"]
    first, last = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 1.0])
    here = fn.log_prob(last) - fn.log_prob(0 * last)
    there = fn.log_prob(first + last) - fn.log_prob(first)
    assert (not torch.allclose(here, there, atol=1e-5)) == coupled


# ---- embeddings


class Mean(nn.Module):
    """A tiny embedding with a weight to train."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 2)

    def forward(self, value):
        return self.linear(value.flatten(1))


def pictures(y):
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        weight = torch.linspace(-1, 1, 12).reshape(2, 6)
        pyro.sample(
            "y", dist.Normal((z @ weight).reshape(z.shape[:-1] + (2, 3)), 1.0).to_event(2), obs=y
        )


@pytest.mark.parametrize("inverse", ["forward", "reverse"])
def test_embeddings_are_read_trained_and_saved(inverse):
    """The guide trains a copy."""
    module, y = Mean(), torch.randn(5, 2, 3)
    before = copy.deepcopy(module.state_dict())
    guide = learned(pictures, embeddings={"y": module}, inverse=inverse, mode="amortized")
    elbo = Trace_ELBO(num_particles=2, vectorize_particles=True, max_plate_nesting=1)
    steps(pictures, guide, y, count=2, elbo=elbo)
    scatter(guide)
    start = guide.embeddings["y"].linear.weight.detach().clone()
    steps(pictures, guide, y, elbo=elbo)
    assert not torch.equal(guide.embeddings["y"].linear.weight, start)
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert guide(y)["z"].shape == (5, 2)
    assert guide.log_prob({"z": torch.randn(7, 5, 2)}, y).shape == (7,)
    moved, z = y.clone(), {"z": torch.zeros(5, 2)}
    moved[3] += 1
    assert guide.log_prob(z, y) != guide.log_prob(z, moved)
    state = guide.state_dict()
    assert any("embeddings" in key for key in state)
    expected = guide.log_prob(z, y)
    pyro.clear_param_store()
    other = learned(pictures, embeddings={"y": Mean()}, inverse=inverse, mode="amortized")
    other.load_state_dict(state)
    assert torch.equal(other.log_prob(z, y), expected)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("inverse", ["mean_field", "auto"])
def test_an_anchor_brings_back_no_edge_that_the_inverse_drops(inverse, exact):
    """In mean field c is drawn whatever b is, though the model's own conditional of c is at b."""
    guide = AutoNaMIGuide(CHAIN, inverse=inverse, exact=exact)
    guide(Y)
    found = []
    for value in (0.0, 2.0):
        fixed = {"a": torch.tensor(value), "b": torch.tensor(value)}
        trace = poutine.trace(poutine.condition(guide, fixed)).get_trace(Y)
        found.append(trace.nodes["c"]["fn"].log_prob(torch.tensor(0.4)).item())
    reads = {"a", "b"}.intersection(guide.inverse.parents["c"])
    assert (found[0] == found[1]) == (not reads)
