"""Saving, loading, copying and moving a guide."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import CASES, CHAIN, conjugate_normal, eight_schools, nested, regression, scatter
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.nn import PyroModule, PyroSample
from pyro.optim import Adam
from torch.utils._pytree import tree_leaves

from pyro_nami import AutoNaMIGuide

pytestmark = pytest.mark.filterwarnings("error")
DIRECTIONS = pytest.mark.parametrize("inverse", ["forward", "reverse"])


def trained(model, *args, **options):
    guide = AutoNaMIGuide(model, **options)
    SVI(model, guide, Adam({"lr": 1e-3}), Trace_ELBO()).step(*args)
    scatter(guide)
    return guide


def density(guide, name="nested"):
    case = CASES[name]
    values = {key: torch.full(shape, 0.3) for key, shape in case.shapes.items()}
    return guide.log_prob(values, *case.arguments())


def through_pickle(value):
    return pickle.loads(pickle.dumps(value))


def through_file(value, weights_only):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


# ---- state dicts


@DIRECTIONS
@pytest.mark.parametrize("name", ["nested", "eight_schools", "constrained", "coupled_instances"])
def test_a_state_dict_loads_into_a_called_guide(name, inverse):
    case = CASES[name]
    guide = trained(case.model, *case.arguments(), inverse=inverse)
    state = through_file(guide.state_dict(), weights_only=True)
    pyro.clear_param_store()
    other = AutoNaMIGuide(case.model, inverse=inverse)
    other(*case.arguments())
    result = other.load_state_dict(state)
    assert not result.missing_keys and not result.unexpected_keys
    assert same(guide, other, case)


@DIRECTIONS
@pytest.mark.parametrize("name", ["nested", "eight_schools", "constrained", "coupled_instances"])
def test_a_state_dict_loads_before_the_first_call(name, inverse):
    """Every guide of Pyro's raises "Unexpected key(s)" here (contract 2)."""
    case = CASES[name]
    guide = trained(case.model, *case.arguments(), inverse=inverse)
    state = through_file(guide.state_dict(), weights_only=True)
    pyro.clear_param_store()
    other = AutoNaMIGuide(case.model, inverse=inverse)
    other.load_state_dict(state)
    assert same(guide, other, case)


def same(guide, other, case):
    """Both guides draw the same under the same seed."""
    draws = []
    for one in (guide, other):
        one(*case.arguments())
        pyro.set_rng_seed(3)
        draws.append(one(*case.arguments()))
    return all(torch.equal(draws[0][key], draws[1][key]) for key in case.shapes)


def test_a_wrong_state_dict_is_an_error_at_the_first_call():
    guide = trained(CHAIN, torch.tensor(1.0))
    pyro.clear_param_store()
    other = AutoNaMIGuide(nested)
    other.load_state_dict(guide.state_dict())
    with pytest.raises(RuntimeError, match="state_dict"):
        other(*CASES["nested"].arguments())


def test_a_missing_key_is_an_error_unless_strict_is_off():
    guide = trained(CHAIN, torch.tensor(1.0))
    state = guide.state_dict()
    key = next(key for key in state if "output" in key)
    del state[key]
    with pytest.raises(RuntimeError, match="output"):
        guide.load_state_dict(state)
    assert any("output" in missing for missing in guide.load_state_dict(state, strict=False).missing_keys)


def test_strict_off_is_kept_until_the_first_call():
    guide = trained(CHAIN, torch.tensor(1.0))
    state = guide.state_dict()
    del state[next(key for key in state if "output" in key)]
    pyro.clear_param_store()
    other = AutoNaMIGuide(CHAIN)
    other.load_state_dict(state, strict=False)
    other(torch.tensor(1.0))


def tensors_of(state):
    return [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]


def test_a_state_dict_holds_no_data_unless_asked_to():
    x, y = torch.randn(6, 2), torch.randn(6)
    for save_data in (False, True):
        pyro.clear_param_store()
        state = trained(regression, x, y, save_data=save_data).state_dict()
        held = [part for part in tensors_of(state) if part.shape == y.shape and torch.equal(part, y)]
        assert bool(held) == save_data
    pyro.clear_param_store()
    many = trained(regression, torch.randn(5000, 2), torch.randn(5000))
    assert all(part.numel() < 5000 for part in tensors_of(many.state_dict()))
    pyro.clear_param_store()
    guide = trained(regression, x, y, observed=["y"])
    assert guide(x)["w"].shape == (2,)  # in the same process the data last seen are there
    other = AutoNaMIGuide(regression, observed=["y"])
    other.load_state_dict(guide.state_dict())
    with pytest.raises(ValueError, match="data for the observed site 'y'.*save_data=True"):
        other(x)


def test_a_loaded_guide_tells_the_data_that_it_was_trained_on_from_others():
    """Constants of its own for each instance are those of the data that they were trained on, and of no other."""
    y = torch.randn(6)

    def model(y):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Cauchy(mu, 1.0))
            pyro.sample("y", dist.Normal(z, 1.0), obs=y)

    guide = trained(model, y)
    values = {"mu": torch.tensor(0.3), "z": torch.linspace(-1.0, 1.0, 6)}
    state = through_file(guide.state_dict(), weights_only=True)
    pyro.clear_param_store()
    other = AutoNaMIGuide(model)
    other.load_state_dict(state)
    changed = y.clone()
    changed[3] += 1e-3
    for data in (y, y.clone(), changed, y.flip(0)):
        assert torch.equal(other.eval().log_prob(values, data), guide.eval().log_prob(values, data))
    assert (guide.log_prob(values, changed) - guide.log_prob(values, y)).abs() > 0.1


def test_the_data_last_seen_belong_to_the_state_where_asked_for():
    x, y = torch.randn(6, 2), torch.randn(6)
    guide = trained(regression, x, y, save_data=True)
    state = through_file(guide.state_dict(), weights_only=True)
    pyro.clear_param_store()
    other = AutoNaMIGuide(regression)
    other(x, torch.zeros(6))
    other.load_state_dict(state)
    values = {"w": torch.randn(2), "s": torch.tensor(1.0)}
    assert torch.equal(other.log_prob(values, x), guide.log_prob(values, x))
    assert torch.equal(other.log_prob(values, x), guide.log_prob(values, x, y))


def test_a_guide_with_waiting_state_has_that_state():
    """Saving again before the first call must not lose what was loaded."""
    guide = trained(CHAIN, torch.tensor(1.0))
    state = guide.state_dict()
    pyro.clear_param_store()
    other = AutoNaMIGuide(CHAIN)
    other.load_state_dict(state)
    copied = copy.deepcopy(other)
    for one in (other, copied):
        assert torch.equal(
            one.log_prob({k: torch.zeros(()) for k in "abc"}, torch.tensor(1.0)),
            guide.log_prob({k: torch.zeros(()) for k in "abc"}, torch.tensor(1.0)),
        )


def test_training_goes_on_after_loading():
    guide = trained(CHAIN, torch.tensor(1.0))
    state = guide.state_dict()
    pyro.clear_param_store()
    other = AutoNaMIGuide(CHAIN)
    other.load_state_dict(state)
    svi = SVI(CHAIN, other, Adam({"lr": 0.01}), Trace_ELBO())
    svi.step(torch.tensor(1.0))
    after = other.state_dict()
    changed = [k for k, v in after.items() if isinstance(v, torch.Tensor) and not torch.equal(v, state[k])]
    assert changed


def test_the_param_store_saves_and_loads(tmp_path):
    guide = trained(conjugate_normal, torch.ones(4))
    values = {"mu": torch.tensor(0.2)}
    expected = guide.log_prob(values, torch.ones(4))
    pyro.get_param_store().save(tmp_path / "params")
    pyro.clear_param_store()
    pyro.get_param_store().set_state(torch.load(tmp_path / "params", weights_only=False))
    other = AutoNaMIGuide(conjugate_normal)
    other(torch.ones(4))
    assert torch.equal(other.log_prob(values, torch.ones(4)), expected)


# ---- pickles and copies


@DIRECTIONS
def test_a_pickled_guide_keeps_a_model_that_can_be_pickled(inverse):
    case = CASES["nested"]
    guide = trained(nested, *case.arguments(), inverse=inverse)
    other = pickle.loads(pickle.dumps(guide))
    assert other.model is nested
    assert torch.equal(density(guide), density(other))
    assert guide.model is nested, "pickling broke the original"


@DIRECTIONS
def test_torch_save_of_a_whole_guide(inverse):
    case = CASES["eight_schools"]
    guide = trained(eight_schools, *case.arguments(), inverse=inverse)
    other = through_file(guide, weights_only=False)
    assert same(guide, other, case)
    assert {k: v.shape for k, v in other.named_parameters()} == {
        k: v.shape for k, v in guide.named_parameters()
    }


def test_a_guide_without_its_model_is_bound_again():
    y = torch.tensor(1.0)

    def local():
        CHAIN(y)

    guide = trained(local)
    other = pickle.loads(pickle.dumps(guide))
    guide()
    with pytest.raises(RuntimeError, match="bind"):
        other()
    assert other.bind(local) is other
    values = {key: torch.zeros(()) for key in "abc"}
    assert torch.equal(other.log_prob(values), guide.log_prob(values))


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("how", [copy.deepcopy, through_pickle])
def test_copies_leave_the_original_working_and_are_independent(how, called):
    """The base class drops the original's model (contract 2)."""
    case = CASES["nested"]
    with pyro.settings.context(
        module_local_params=True
    ):  # the parameter store would tie guides of equal names
        guide = AutoNaMIGuide(nested)
        if called:
            guide(*case.arguments())
            scatter(guide)
        other = how(guide)
        assert guide.model is nested and other.model is nested
        guide(*case.arguments())
        other(*case.arguments())
        if called:
            assert torch.equal(density(guide), density(other))
        before = density(guide)
        scatter(other)
        assert torch.equal(density(guide), before) and not torch.equal(density(other), before)


def test_a_copy_shares_the_model_but_no_parameters():
    model = lambda y: CHAIN(y)  # noqa: E731
    guide = trained(model, torch.tensor(1.0))
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


@DIRECTIONS
def test_a_module_as_model_is_no_part_of_the_guide(inverse):
    """Site names with dots, and the model's own parameters stay the model's (tests/infer/test_autoguide.py:969)."""
    model, x, y = Model(), torch.randn(5, 2), torch.randn(5)
    guide = AutoNaMIGuide(model, inverse=inverse)
    svi = SVI(model, guide, Adam({"lr": 0.01}), Trace_ELBO())
    bias = model.bias.detach().clone()
    for _ in range(3):
        svi.step(x, y)
    assert list(guide(x, y)) == ["linear.weight"]
    assert not any("bias" in name or "linear" in name for name, _ in guide.named_parameters())
    assert not torch.equal(model.bias, bias), "the model's own parameter is trained with the guide"
    draws = Predictive(model, guide=guide, num_samples=3)(x)
    assert draws["y"].shape == (3, 5)
    other = copy.deepcopy(guide)
    assert other.model is model


# ---- dtypes, modes


@DIRECTIONS
@pytest.mark.parametrize("name", ["nested", "constrained", "eight_schools", "coupled_instances"])
def test_a_guide_can_be_moved_to_double(name, inverse):
    case = CASES[name]
    guide = AutoNaMIGuide(case.model, inverse=inverse)
    guide(*case.arguments())
    assert all(parameter.dtype == torch.float32 for parameter in guide.parameters())
    guide.to(torch.float64)
    torch.set_default_dtype(torch.float64)
    values = guide(*case.arguments())
    assert all(parameter.dtype == torch.float64 for parameter in guide.parameters())
    assert all(value.dtype == torch.float64 for value in values.values())
    assert guide.log_prob(values, *case.arguments()).dtype == torch.float64


@pytest.mark.parametrize("conjugate", [True, False])
def test_a_guide_of_float64_data_can_be_moved_to_float(conjugate):
    def model(y):
        mu = pyro.sample("mu", dist.Normal(y.new_zeros(()), 5.0))
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Normal(mu, y.new_ones(())))
            pyro.sample("y", dist.Normal(z, 1.0), obs=y)

    y = torch.randn(6, dtype=torch.float64)
    guide = trained(model, y, conjugate=conjugate).float()
    pyro.clear_param_store()
    assert all(value.dtype == torch.float32 for value in guide(y.float()).values())
    assert math.isfinite(SVI(model, guide, Adam({"lr": 1e-3}), Trace_ELBO()).step(y.float()))


@DIRECTIONS
def test_the_dtype_follows_the_models_against_the_default(inverse):
    def model(y):
        mu = pyro.sample("mu", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0))
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Normal(mu, 1.0))
            pyro.sample("y", dist.Normal(z, 1.0), obs=y)

    guide = AutoNaMIGuide(model, inverse=inverse)
    values = guide(torch.randn(3, dtype=torch.float64))
    assert all(value.dtype == torch.float64 for value in values.values())
    assert all(parameter.dtype == torch.float64 for parameter in guide.parameters())
    assert guide.log_prob(values, torch.randn(3, dtype=torch.float64)).dtype == torch.float64


def test_integer_data_are_read():
    def model(y):
        rate = pyro.sample("rate", dist.Gamma(torch.tensor(2.0), torch.tensor(1.0)))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Poisson(rate), obs=y)

    guide = AutoNaMIGuide(model)
    svi = SVI(model, guide, Adam({"lr": 0.01}), Trace_ELBO())
    assert torch.tensor(svi.step(torch.tensor([1, 4, 2]))).isfinite()
    assert all(parameter.dtype == torch.float32 for parameter in guide.parameters())


def test_evaluation_mode_and_frozen_parameters():
    guide = trained(CHAIN, torch.tensor(1.0))
    guide.eval()
    guide.requires_grad_(False)
    trace = poutine.trace(guide).get_trace(torch.tensor(1.0))
    assert not trace.log_prob_sum().requires_grad
    guide.requires_grad_(True)
    guide.train()
    assert poutine.trace(guide).get_trace(torch.tensor(1.0)).log_prob_sum().requires_grad


def test_parameter_names_are_kept_by_a_second_guide():
    """Two guides of one class share names in the store, as Pyro's do: clear it, or use module_local_params."""
    first = trained(CHAIN, torch.tensor(1.0), refine=None)
    second = AutoNaMIGuide(CHAIN, refine=None)
    second(torch.tensor(1.0))
    assert [name for name, _ in first.named_parameters()] == [name for name, _ in second.named_parameters()]
    values = {key: torch.zeros(()) for key in "abc"}
    assert torch.equal(first.log_prob(values, torch.tensor(1.0)), second.log_prob(values, torch.tensor(1.0)))


@DIRECTIONS
def test_a_guide_is_traced_saved_and_loaded_as_torch_script(inverse):
    """tests/infer/test_autoguide.py:461[jit]: the data are constants of the traced guide."""
    y = torch.tensor(1.0)
    guide = trained(lambda: CHAIN(y), inverse=inverse)
    pyro.set_rng_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace_module(guide, {"call": ()}, check_trace=False)
        file = io.BytesIO()
        torch.jit.save(traced, file)
        file.seek(0)
        loaded = torch.jit.load(file)
    pyro.set_rng_seed(5)
    expected = guide.call()
    pyro.set_rng_seed(5)
    assert all(torch.allclose(a, b) for a, b in zip(loaded.call(), expected))


def test_parameters_of_another_guide_in_the_store_are_named():
    import pyro.distributions as dist

    def other():
        z = pyro.sample("z", dist.Normal(torch.zeros(5), 1.0).to_event(1))
        pyro.sample("x", dist.Normal(z.sum(), 1.0), obs=torch.tensor(0.0))

    AutoNaMIGuide(CHAIN)(torch.tensor(1.0))
    with pytest.raises(ValueError, match="clear_param_store"):
        AutoNaMIGuide(other)()


def test_a_loaded_guide_reads_the_covariates_that_the_saved_one_did():
    """Which of several that say the same are read is chosen by the data of the first call."""

    def model(kind, y):
        with pyro.plate("rows", len(y)):
            z = pyro.sample("z", dist.Normal(torch.zeros(3), 1.0).to_event(1))
            pyro.sample("y", dist.Categorical(logits=z + torch.eye(3)[kind]), obs=y)

    first, later = torch.tensor([0, 0, 0, 1, 2, 2]), torch.tensor([1, 1, 1, 0, 2, 2])
    y = torch.tensor([0, 1, 2, 0, 1, 2])
    guide = AutoNaMIGuide(model, refine=None)
    guide(first, y)
    scatter(guide)
    values = {"z": torch.randn(6, 3)}
    state = through_file(guide.state_dict(), weights_only=True)
    pyro.clear_param_store()
    for call_first in (False, True):
        other = AutoNaMIGuide(model, refine=None)
        if call_first:
            other(later, y)
        other.load_state_dict(state)
        for kind in (first, later):
            assert torch.equal(other.log_prob(values, kind, y), guide.log_prob(values, kind, y))
