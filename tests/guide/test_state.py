"""Saving, loading, copying and moving a guide."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import (
    CASES,
    CHAIN,
    conjugate_normal,
    eight_schools,
    learned,
    local_normals,
    nested,
    pooled,
    regression,
    scatter,
    steps,
    through_file,
)
from pyro import poutine
from pyro.infer import Predictive
from pyro.nn import PyroModule, PyroSample
from torch.utils._pytree import tree_leaves

from pyro_nami import AutoNaMIGuide

UNPICKLING = "ignore:You are using .torch.load.:FutureWarning"  # of torch 2.4's own tensors
pytestmark = [
    pytest.mark.filterwarnings("error", UNPICKLING),
    pytest.mark.usefixtures("own_parameters"),
]
DIRECTIONS = pytest.mark.parametrize("inverse", ["forward", "reverse"])
EXACT = pytest.mark.parametrize("exact", [True, False], ids=["exact", "networks"])
CATALOGUE = pytest.mark.parametrize(
    "name, inverse",
    [
        *[("nested", "forward"), ("eight_schools", "reverse"), ("constrained", "forward")],
        *[("coupled_instances", "reverse"), ("nested", "reverse"), ("constrained", "reverse")],
    ],
)
Y = torch.tensor(1.0)
ZEROS = {name: torch.zeros(()) for name in "abc"}


def trained(model, *args, **options):
    guide = learned(model, **options)
    steps(model, guide, *args, count=1, lr=1e-3)
    scatter(guide)
    return guide


def loaded(state, model, *args, strict=True, **options):
    """Returns a guide with the state of another, after a call if there are arguments for one."""
    other = learned(model, **options)
    if args:
        other(*args)
    result = other.load_state_dict(state, strict=strict)
    assert not strict or not (result.missing_keys or result.unexpected_keys)
    return other


def density(guide, name="nested"):
    case = CASES[name]
    values = {key: torch.full(shape, 0.3) for key, shape in case.shapes.items()}
    return guide.log_prob(values, *case.arguments())


def draw_the_same(guide, other, case):
    """Whether both guides draw the same under the same seed."""
    draws = []
    for one in (guide, other):
        one(*case.arguments())
        pyro.set_rng_seed(3)
        draws.append(one(*case.arguments()))
    return all(torch.equal(draws[0][key], draws[1][key]) for key in case.shapes)


def through_pickle(value):
    return pickle.loads(pickle.dumps(value))


# ---- state dicts


@EXACT
@CATALOGUE
@pytest.mark.parametrize("called", [True, False])
def test_a_state_dict_loads_into_a_called_guide_and_before_the_first_call(
    name, inverse, called, exact
):
    """Every guide of Pyro's raises "Unexpected key(s)" at the latter (contract 2)."""
    case = CASES[name]
    guide = trained(case.model, *case.arguments(), inverse=inverse, exact=exact)
    args = case.arguments() if called else ()
    other = loaded(
        through_file(guide.state_dict()), case.model, *args, inverse=inverse, exact=exact
    )
    assert draw_the_same(guide, other, case)


def test_a_wrong_state_dict_is_an_error_at_the_first_call():
    other = loaded(trained(CHAIN, Y).state_dict(), nested)
    with pytest.raises(RuntimeError, match="state_dict"):
        other(*CASES["nested"].arguments())


def test_a_state_of_a_guide_that_derives_other_latents_is_an_error_that_names_them():
    def model(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    guide, other = AutoNaMIGuide(model, rules={"mean": "learned"}), AutoNaMIGuide(model)
    guide(torch.tensor(1.0))
    other.load_state_dict(guide.state_dict())
    with pytest.raises(RuntimeError, match="'mean' differ"):
        other(torch.tensor(1.0))


def test_a_missing_key_is_an_error_unless_strict_is_off_which_is_kept_until_the_first_call():
    guide = trained(CHAIN, Y)
    state = guide.state_dict()
    del state[next(key for key in state if "output" in key)]
    with pytest.raises(RuntimeError, match="output"):
        guide.load_state_dict(state)
    assert any(
        "output" in missing for missing in guide.load_state_dict(state, strict=False).missing_keys
    )
    loaded(state, CHAIN, strict=False)(Y)


def tensors_of(state):
    return [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]


@EXACT
def test_a_state_dict_holds_no_data_unless_asked_to(exact):
    x, y = torch.randn(6, 2), torch.randn(6)
    for save_data in (False, True):
        pyro.clear_param_store()
        state = trained(regression, x, y, save_data=save_data, exact=exact).state_dict()
        held = [
            part for part in tensors_of(state) if part.shape == y.shape and torch.equal(part, y)
        ]
        assert bool(held) == save_data
    many = trained(regression, torch.randn(5000, 2), torch.randn(5000), exact=exact)
    assert all(part.numel() < 5000 for part in tensors_of(many.state_dict()))
    guide = trained(regression, x, y, observed=["y"], exact=exact)
    assert guide(x)["w"].shape == (2,)  # in the same process the data last seen are there
    other = loaded(guide.state_dict(), regression, observed=["y"], exact=exact)
    with pytest.raises(ValueError, match="data for the observed site 'y'.*save_data=True"):
        other(x)
    pyro.clear_param_store()
    other = learned(regression, exact=exact)
    other(x, -y)
    other.load_state_dict(trained(regression, x, y, exact=exact).state_dict())
    if other.rules["w"].rule == "learned":
        with pytest.raises(ValueError, match="trained on; this call brings others.*save_data=True"):
            other(x, -y)
    pyro.clear_param_store()
    called = learned(regression, exact=exact)
    called(x, y)  # it has these data itself
    called.load_state_dict(trained(regression, x, y, exact=exact).state_dict())
    assert called(x)["w"].shape == (2,)
    called.load_state_dict(trained(regression, x, y + 1, exact=exact).state_dict())
    with pytest.raises(ValueError, match="data for the observed site 'y'"):
        called(x)


def robust(x, y=None):
    b, s = pyro.sample("b", dist.Normal(0.0, 1.0)), pyro.sample("s", dist.HalfNormal(1.0))
    with pyro.plate("n", len(x)):
        pyro.sample("y", dist.StudentT(4.0, b * x, s), obs=y)


def test_a_guide_that_was_made_without_data_does_not_pass_over_them_later():
    """Its latents would be the prior's."""
    x, y = torch.randn(2, 20)
    guide = AutoNaMIGuide(robust)
    guide(x)
    with pytest.raises(
        ValueError, match="latent 'y' of the guide's first call.*first call with data"
    ):
        guide(x, y)


def test_weights_in_the_store_that_a_guide_has_no_place_for_are_told(tmp_path):
    """They were loaded, and the first call has no data: others would have been drawn from."""
    x, y = torch.randn(2, 20)
    trained(robust, x, y)
    pyro.get_param_store().save(tmp_path / "weights.pt")
    pyro.clear_param_store()
    pyro.get_param_store().load(tmp_path / "weights.pt")
    with pytest.raises(
        ValueError,
        match="weights of this guide alone in the parameter store; got 'AutoNaMIGuide.network",
    ):
        AutoNaMIGuide(robust)(x)
    AutoNaMIGuide(robust, exact=False)(x, y)


def test_a_loaded_guide_has_its_own_weights_whatever_others_are_in_the_store(caplog):
    """Pyro computes with the store's weights, and a second guide of the class has the same names."""
    x, y = torch.randn(2, 20)
    guide = trained(robust, x, y, exact=False)
    state, pickled = copy.deepcopy(guide.state_dict()), pickle.dumps(guide)
    means = guide.median(x, y)
    pyro.clear_param_store()
    with torch.no_grad():
        for value in trained(robust, x, y, exact=False).parameters():
            value += 0.1

    unpickled = pickle.loads(pickled)
    assert "holds other weights under the names of the loaded guide" in caplog.text
    assert not torch.allclose(unpickled.median(x, y)["b"], means["b"], atol=0.05)

    loaded = AutoNaMIGuide(robust, exact=False)
    loaded.load_state_dict(state)
    torch.testing.assert_close(loaded.median(x, y), means)


def test_a_copy_has_no_other_weights_than_those_in_the_store(caplog):
    guide = trained(robust, *torch.randn(2, 20), exact=False)
    copy.deepcopy(guide)
    pickle.loads(pickle.dumps(guide))
    assert "other weights" not in caplog.text


def test_a_state_of_other_sizes_says_what_to_do():
    """A first call without data finds other covariates, and has networks of other sizes."""
    x, y = torch.randn(2, 20)
    state = trained(robust, x, y, exact=False).state_dict()
    pyro.clear_param_store()
    loaded = AutoNaMIGuide(robust, exact=False, hidden_features=[7])
    loaded.load_state_dict(state)
    with pytest.raises(RuntimeError, match="(?s)size mismatch.*call the new guide with the data"):
        loaded(x, y)


class Regression(PyroModule):
    def forward(self, x, y=None):
        robust(x, y)


@pytest.mark.parametrize("kind", ["function", "module", "handler"])
def test_summaries_without_arguments_are_those_with_the_arguments_of_training(kind):
    x, y = torch.randn(2, 20)
    model = (
        robust
        if kind == "function"
        else Regression()
        if kind == "module"
        else poutine.scale(robust, 2.0)
    )
    guide = trained(model, x, y)
    for again in (
        guide,
        copy.deepcopy(guide),
        *([through_pickle(guide)] if model is robust else []),
    ):
        assert torch.equal(again.median()["b"], guide.median(x, y)["b"])
        assert torch.equal(again.quantiles([0.1])["b"], guide.quantiles([0.1], x, y)["b"])


def test_a_loaded_guide_asks_for_the_data_that_it_was_trained_on_and_then_keeps_to_them():
    model = functools.partial(local_normals, prior=lambda mu: dist.Cauchy(mu, 1.0))
    y = torch.randn(6)
    guide = trained(model, y)
    values = {"mu": torch.tensor(0.3), "z": torch.linspace(-1.0, 1.0, 6)}
    other = loaded(through_file(guide.state_dict()), model)
    changed = y.clone()
    changed[3] += 1e-3
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match="only if it was saved with save_data=True"),
    ):
        other.log_prob(values, changed)
    with torch.no_grad():
        expected = guide.log_prob(values, y)
        for data in (y.clone(), changed, y.flip(0)):
            for each in (guide, other):
                assert torch.equal(each.log_prob(values, data), expected)


@EXACT
def test_the_data_last_seen_belong_to_the_state_where_asked_for(exact):
    x, y = torch.randn(6, 2), torch.randn(6)
    guide = trained(regression, x, y, save_data=True, exact=exact)
    other = loaded(through_file(guide.state_dict()), regression, x, torch.zeros(6), exact=exact)
    values = {"w": torch.randn(2), "s": torch.tensor(1.0)}
    assert torch.equal(other.log_prob(values, x), guide.log_prob(values, x))
    assert torch.equal(other.log_prob(values, x), guide.log_prob(values, x, y))


def test_a_guide_with_waiting_state_has_that_state():
    """Saving again before the first call must not lose what was loaded."""
    guide = trained(CHAIN, Y)
    other = loaded(guide.state_dict(), CHAIN)
    for one in (copy.deepcopy(other), other):
        assert torch.equal(one.log_prob(ZEROS, Y), guide.log_prob(ZEROS, Y))


def test_training_goes_on_after_loading():
    state = trained(CHAIN, Y).state_dict()
    other = loaded(state, CHAIN)
    steps(CHAIN, other, Y, count=1)
    after = other.state_dict()
    assert any(
        isinstance(v, torch.Tensor) and not torch.equal(v, state[k]) for k, v in after.items()
    )


def test_parameters_in_the_store_are_saved_and_loaded(tmp_path):
    guide = trained(conjugate_normal, torch.ones(4))
    values = {"mu": torch.tensor(0.2)}
    expected = guide.log_prob(values, torch.ones(4))
    pyro.get_param_store().save(tmp_path / "params")
    pyro.clear_param_store()
    pyro.get_param_store().set_state(torch.load(tmp_path / "params", weights_only=False))
    other = learned(conjugate_normal)
    other(torch.ones(4))
    assert torch.equal(other.log_prob(values, torch.ones(4)), expected)


def test_a_second_guide_shares_parameters_in_the_store_and_says_so(caplog):
    """As Pyro's do, whose tests ask for it: clear the store, or use module_local_params."""
    first = trained(CHAIN, Y, mode="amortized")
    second = learned(CHAIN, mode="amortized")
    assert not caplog.messages
    second(Y)
    assert "weights of another guide named 'AutoNaMIGuide'" in caplog.text
    assert [name for name, _ in first.named_parameters()] == [
        name for name, _ in second.named_parameters()
    ]
    assert torch.equal(first.log_prob(ZEROS, Y), second.log_prob(ZEROS, Y))
    caplog.clear()
    pyro.clear_param_store()
    learned(CHAIN, mode="amortized")(Y)
    assert not caplog.messages


def test_a_second_guide_has_all_weights_in_the_store_those_that_nothing_reads_included():
    """Encoders of data that are the same in every call are not read, as they add a constant."""

    def model(y):
        z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Cauchy(z[..., :1], z[..., 1:].exp()), obs=y)

    y = torch.randn(5)
    first, second = (AutoNaMIGuide(model, rules={"z": "learned"}) for _ in range(2))
    first(y)
    second(y)
    pairs = list(zip(first.named_parameters(), second.named_parameters()))
    assert any("encoders" in name for (name, _), _ in pairs)
    assert all(torch.equal(value, other) for (_, value), (_, other) in pairs)


def test_parameters_of_another_guide_in_the_store_are_named():
    learned(CHAIN)(Y)
    with pytest.raises(ValueError, match="clear_param_store"):
        learned(CASES["vectors"].model)(*CASES["vectors"].arguments())


# ---- pickles and copies


@EXACT
@DIRECTIONS
def test_torch_save_of_a_whole_guide(inverse, exact):
    case = CASES["eight_schools"]
    guide = trained(eight_schools, *case.arguments(), inverse=inverse, exact=exact)
    other = through_file(guide, weights_only=False)
    assert draw_the_same(guide, other, case)
    ours, theirs = ({name: p.shape for name, p in one.named_parameters()} for one in (guide, other))
    assert ours == theirs


@EXACT
def test_a_guide_without_its_model_is_bound_again(exact):
    def local():
        CHAIN(Y)

    guide = trained(local, exact=exact)
    other = through_pickle(guide)
    guide()
    with pytest.raises(RuntimeError, match="bind"):
        other()
    assert other.bind(local) is other
    assert torch.equal(other.log_prob(ZEROS), guide.log_prob(ZEROS))


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("how", [copy.deepcopy, through_pickle])
def test_copies_leave_the_original_working_and_are_independent(how, called):
    """The base class drops the original's model (contract 2)."""
    args = CASES["nested"].arguments()
    guide = learned(nested)
    if called:
        guide(*args)
        scatter(guide)
    other = how(guide)
    assert guide.model is nested and other.model is nested
    guide(*args)
    other(*args)
    if called:
        assert torch.equal(density(guide), density(other))
    before = density(guide)
    scatter(other)
    assert torch.equal(density(guide), before) and not torch.equal(density(other), before)


def test_a_copy_shares_the_model_but_no_parameters():
    model = lambda y: CHAIN(y)  # noqa: E731
    guide = trained(model, Y)
    other = copy.deepcopy(guide)
    assert other.model is model
    ours, theirs = ({p.data_ptr() for p in one.parameters()} for one in (guide, other))
    assert not ours & theirs


class Model(PyroModule):
    """A Bayesian regression as a module, with a parameter of its own and a random weight."""

    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.tensor(0.5))
        self.linear = PyroModule[torch.nn.Linear](2, 1, bias=False)
        self.linear.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 2]).to_event(2))

    def forward(self, x, y=None):
        loc = self.linear(x).squeeze(-1) + self.bias
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(loc, 1.0), obs=y)


@EXACT
@DIRECTIONS
def test_a_module_as_model_is_no_part_of_the_guide_with_parameters_in_the_store(inverse, exact):
    """Site names with dots, and the model's own parameters stay the model's (tests/infer/test_autoguide.py:969)."""
    model, x, y = Model(), torch.randn(5, 2), torch.randn(5)
    guide = AutoNaMIGuide(model, inverse=inverse, exact=exact)
    bias = model.bias.detach().clone()
    steps(model, guide, x, y)
    assert list(guide(x, y)) == ["linear.weight"]
    assert not any("bias" in name or "linear" in name for name, _ in guide.named_parameters())
    assert not torch.equal(model.bias, bias), "the model's own parameter is trained with the guide"
    draws = Predictive(model, guide=guide, num_samples=3)(x)
    assert draws["y"].shape == (3, 5)
    assert copy.deepcopy(guide).model is model


# ---- dtypes, modes


@EXACT
@CATALOGUE
def test_a_guide_can_be_moved_to_double(name, inverse, exact):
    case = CASES[name]
    guide = AutoNaMIGuide(case.model, inverse=inverse, exact=exact)
    guide(*case.arguments())
    assert all(parameter.dtype == torch.float32 for parameter in guide.parameters())
    guide.to(torch.float64)
    torch.set_default_dtype(torch.float64)
    all_are_double(guide, *case.arguments())


def all_are_double(guide, *args):
    values = guide(*args)
    assert all(parameter.dtype == torch.float64 for parameter in guide.parameters())
    assert all(value.dtype == torch.float64 for value in values.values())
    assert guide.log_prob(values, *args).dtype == torch.float64


def of_the_dtype_of_its_data(y):
    mu = pyro.sample("mu", dist.Normal(y.new_zeros(()), 1.0))
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Normal(mu, y.new_ones(())))
        pyro.sample("y", dist.Normal(z, 1.0), obs=y)


@EXACT
def test_a_guide_of_float64_data_can_be_moved_to_float(exact):
    y = torch.randn(6, dtype=torch.float64)
    guide = trained(of_the_dtype_of_its_data, y, exact=exact).float()
    assert all(value.dtype == torch.float32 for value in guide(y.float()).values())
    steps(of_the_dtype_of_its_data, guide, y.float(), count=1)


@EXACT
@DIRECTIONS
def test_the_dtype_follows_the_models_against_the_default(inverse, exact):
    guide = AutoNaMIGuide(of_the_dtype_of_its_data, inverse=inverse, exact=exact)
    all_are_double(guide, torch.randn(3, dtype=torch.float64))


@EXACT
def test_integer_data_are_read(exact):
    model = pooled(dist.Gamma(2.0, 1.0), dist.Poisson)
    guide = AutoNaMIGuide(model, exact=exact)
    steps(model, guide, torch.tensor([1, 4, 2]), count=1)
    assert all(parameter.dtype == torch.float32 for parameter in guide.parameters())


@EXACT
def test_evaluation_mode_and_frozen_parameters(exact):
    guide = trained(CHAIN, Y, exact=exact)
    guide.eval()
    guide.requires_grad_(False)
    assert not poutine.trace(guide).get_trace(Y).log_prob_sum().requires_grad
    guide.requires_grad_(True)
    guide.train()
    assert poutine.trace(guide).get_trace(Y).log_prob_sum().requires_grad


@EXACT
@DIRECTIONS
def test_a_guide_is_traced_saved_and_loaded_as_torch_script(inverse, exact):
    """tests/infer/test_autoguide.py:461[jit]: the data are constants of the traced guide."""
    guide = trained(lambda: CHAIN(Y), inverse=inverse, exact=exact)
    pyro.set_rng_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace_module(guide, {"call": ()}, check_trace=False)
        file = io.BytesIO()
        torch.jit.save(traced, file)
        file.seek(0)
        script = torch.jit.load(file)
    pyro.set_rng_seed(5)
    expected = guide.call()
    pyro.set_rng_seed(5)
    assert all(torch.allclose(a, b) for a, b in zip(script.call(), expected))


def test_a_loaded_guide_reads_the_covariates_that_the_saved_one_did():
    """Which of several that say the same are read is chosen by the data of the first call."""

    def model(kind, y):
        with pyro.plate("rows", len(y)):
            z = pyro.sample("z", dist.Normal(torch.zeros(3), 1.0).to_event(1))
            pyro.sample("y", dist.Categorical(logits=z + torch.eye(3)[kind]), obs=y)

    first, later = torch.tensor([0, 0, 0, 1, 2, 2]), torch.tensor([1, 1, 1, 0, 2, 2])
    y = torch.tensor([0, 1, 2, 0, 1, 2])
    guide = AutoNaMIGuide(model, mode="amortized", exact=False)
    guide(first, y)
    scatter(guide)
    values = {"z": torch.randn(6, 3)}
    state = through_file(guide.state_dict())
    for called in ((), (later, y)):
        other = loaded(state, model, *called, mode="amortized", exact=False)
        for kind in (first, later):
            assert torch.equal(other.log_prob(values, kind, y), guide.log_prob(values, kind, y))
