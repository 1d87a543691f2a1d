"""What a trained guide answers when its user goes on: predictions, held-out losses, masks, minibatches, copies.

`PROGRAMS` are trained for a few steps, on one data set each. `USES` are calls that are no training step; in each of
them the posterior of training stays, as `AutoNormal`'s does. Two draws from one seed tell: shared latents are the same.
"""

from __future__ import annotations

import copy
import functools
import pickle
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import through_file
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO, TraceEnum_ELBO, config_enumerate
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam
from torch import Tensor, nn

from pyro_nami import AutoNaMIGuide, importance_sample

pytestmark = pytest.mark.filterwarnings("ignore:The guide was trained on data without")
Call = tuple[tuple, dict[str, Any]]


class Program(NamedTuple):
    """A model, and how it is called.

    Attributes:
        model: with data as its keyword arguments.
        call: (rows, seed) -> arguments and data of a call with that many rows.
        rows: of training.
        outcomes: names of the keyword arguments that are data.
        elbo: the objective.
        hidden: sites that the guide leaves to the model, by `poutine.block`.
    """

    model: Callable
    call: Callable[[int, int], Call]
    rows: int = 12
    outcomes: tuple[str, ...] = ("y",)
    elbo: Callable = Trace_ELBO
    hidden: Callable[[Any], bool] | None = None

    def seen(self) -> Callable:
        """Returns what the guide is made for."""
        return self.model if self.hidden is None else poutine.block(self.model, hide_fn=self.hidden)


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def line(x, y=None):
    a, b = (pyro.sample(name, dist.Normal(0.0, 3.0)) for name in "ab")
    s = pyro.sample("s", dist.HalfNormal(1.0))
    with pyro.plate("rows", len(x)):
        return pyro.sample("y", dist.Normal(a + b * x, s), obs=y)


def panel(t, y=None):
    m, b = (pyro.sample(name, dist.Normal(0.0, 10.0)) for name in "mb")
    s = pyro.sample("s", dist.HalfNormal(1.0))
    with pyro.plate("subjects", 5, dim=-2):
        a = pyro.sample("a", dist.Normal(m, 3.0))
        with pyro.plate("times", len(t), dim=-1):
            return pyro.sample("y", dist.Normal(a + b * t, s), obs=y)


def curve(t, y=None):
    """A panel whose curve is not linear, on (times, subjects)."""
    rate = pyro.sample("rate", dist.LogNormal(0.0, 1.0))
    subjects = pyro.plate("subjects", 4, dim=-1)
    with subjects:
        size = pyro.sample("size", dist.LogNormal(0.0, 1.0))
    with pyro.plate("times", len(t), dim=-2), subjects:
        return pyro.sample("y", dist.Normal(size * (-rate * t[:, None]).exp(), 0.3), obs=y)


def intercepts(x, y=None):
    mu, tau = pyro.sample("mu", dist.Normal(0.0, 2.0)), pyro.sample("tau", dist.HalfNormal(1.0))
    with pyro.plate("groups", 3):
        alpha = pyro.sample("alpha", dist.Normal(mu, tau))
    with pyro.plate("rows", len(x)):
        group = torch.arange(len(x)) % 3
        return pyro.sample("y", dist.Normal(alpha[..., group] + x, 0.5), obs=y)


def crossing(x, y=None):
    with pyro.plate("students", 3):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with pyro.plate("items", 4):
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(x)):
        place = torch.arange(len(x))
        logits = a[..., place % 3] - b[..., place % 4] + x
        return pyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


def mixed(x, y=None):
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(2)))
    with pyro.plate("parts", 2):
        loc = pyro.sample("loc", dist.Normal(torch.tensor([-1.0, 1.0]), 1.0))
    with pyro.plate("rows", len(x)):
        z = pyro.sample("z", dist.Categorical(weights))
        return pyro.sample(
            "y", dist.Normal(loc[..., z] if loc.dim() == 1 else loc.gather(-1, z), 0.5), obs=y
        )


@config_enumerate
def chain(x, y=None):
    stay = pyro.sample("stay", dist.Beta(4.0, 2.0))
    loc = pyro.sample("loc", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    state: Any = 0
    for i in pyro.markov(range(len(x))):
        to = torch.where(torch.as_tensor(state) == 0, 1 - stay, stay)
        state = pyro.sample(f"state_{i}", dist.Bernoulli(to))
        observed = None if y is None else y[i]
        pyro.sample(
            f"y_{i}",
            dist.Normal(torch.where(state == 0, loc[..., 0], loc[..., 1]), 0.7),
            obs=observed,
        )


def process(x, y=None):
    length = pyro.sample("length", dist.LogNormal(0.0, 0.5))
    kernel = (
        -0.5 * ((x[:, None] - x) / length[..., None, None]).square()
    ).exp() + 1e-3 * torch.eye(len(x))
    f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(len(x)), kernel))
    return pyro.sample("y", dist.Poisson(f.exp()).to_event(1), obs=y)


def counts(x, y=None):
    slope, tau = (
        pyro.sample("slope", dist.Normal(0.0, 1.0)),
        pyro.sample("tau", dist.HalfNormal(1.0)),
    )
    with pyro.plate("rows", len(x)):
        z = pyro.sample("z", dist.Normal(slope * x, tau))
        return pyro.sample("y", dist.Poisson(z.exp()), obs=y)


def censored(x, y=None):
    rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
    with pyro.plate("rows", len(x)):
        seen = x < 0.5
        with poutine.mask(mask=seen):
            pyro.sample("y", dist.Exponential(rate), obs=y)
        with poutine.mask(mask=~seen):
            pyro.sample(
                "late", dist.Bernoulli(logits=-rate), obs=None if y is None else torch.zeros(len(x))
            )


def missing_covariate(x, y=None):
    a, b = (pyro.sample(name, dist.Normal(0.0, 2.0)) for name in "ab")
    with pyro.plate("rows", len(x)):
        u = pyro.sample("u", dist.Normal(0.0, 1.0), obs=x, obs_mask=x > -0.8)
        return pyro.sample("y", dist.Normal(a + b * u, 0.5), obs=y)


def level(x, y=None):
    walk = pyro.sample("walk", dist.HalfNormal(1.0))
    z = pyro.sample("z_0", dist.Normal(0.0, 1.0))
    for i in range(len(x)):
        z = pyro.sample(f"z_{i + 1}", dist.Normal(z, walk))
        pyro.sample(f"y_{i}", dist.Normal(z, 0.3), obs=None if y is None else y[i])


DECODER = nn.Linear(2, 3)
nn.init.normal_(DECODER.weight, generator=torch.Generator().manual_seed(0))


def decoded(x, y=None):
    with pyro.plate("rows", len(x)):
        z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        return pyro.sample("y", dist.Bernoulli(logits=DECODER(z)).to_event(1), obs=y)


def network(x, y=None):
    with pyro.plate("values", 2):
        wet, slips = (
            pyro.sample("wet", dist.Beta(1.0, 1.0)),
            pyro.sample("slips", dist.Beta(2.0, 2.0)),
        )
    with pyro.plate("rows", len(x)):
        first = (x > 0).long()
        road = pyro.sample(
            "road", dist.Bernoulli(wet[..., first]), obs=None if y is None else y[:, 0]
        )
        pyro.sample(
            "fall", dist.Bernoulli(slips[..., road.long()]), obs=None if y is None else y[:, 1]
        )


def outcomes(x, y1=None, y2=None):
    slope = pyro.sample("slope", dist.Normal(0.0, 2.0))
    with pyro.plate("rows", len(x)):
        z = pyro.sample("z", dist.Normal(slope * x, 1.0))
        pyro.sample("y1", dist.Normal(z, 0.5), obs=y1)
        return pyro.sample("y2", dist.Poisson(z.exp()), obs=y2)


def normal_call(rows: int, seed: int, *shape: int) -> Call:
    return (numbers(seed, rows),), {"y": numbers(seed + 1, *shape, rows)}


def integer_call(rows: int, seed: int, most: int = 1) -> Call:
    return (numbers(seed, rows),), {"y": numbers(seed + 1, rows).abs().round().clamp(max=most)}


def both(rows: int, seed: int) -> Call:
    (x,), data = normal_call(rows, seed)
    return (x,), {"y1": data["y"], "y2": data["y"].abs().round()}


PROGRAMS = {
    "regression": Program(line, normal_call),
    "panel": Program(panel, lambda rows, seed: normal_call(rows, seed, 5), rows=6),
    "nonlinear panel": Program(
        curve,
        lambda rows, seed: ((numbers(seed, rows).abs(),), {"y": numbers(seed + 1, rows, 4)}),
        rows=6,
    ),
    "index map": Program(intercepts, normal_call),
    "crossed": Program(crossing, integer_call),
    "mixture": Program(mixed, normal_call),
    "hidden Markov": Program(
        chain,
        normal_call,
        rows=5,
        elbo=TraceEnum_ELBO,
        hidden=lambda site: site["name"].startswith("state_"),
    ),
    "Gaussian process": Program(process, lambda rows, seed: integer_call(rows, seed, 5), rows=6),
    "counts": Program(counts, lambda rows, seed: integer_call(rows, seed, 5)),
    "censored": Program(
        censored, lambda rows, seed: ((numbers(seed, rows),), {"y": numbers(seed, rows).abs()})
    ),
    "missing covariate": Program(missing_covariate, normal_call),
    "time loop": Program(level, normal_call, rows=4),
    "VAE": Program(
        decoded,
        lambda rows, seed: ((numbers(seed, rows),), {"y": (numbers(seed, rows, 3) > 0).float()}),
    ),
    "Bayesian network": Program(
        network,
        lambda rows, seed: ((numbers(seed, rows),), {"y": (numbers(seed, rows, 2) > 0).float()}),
    ),
    "two outcomes": Program(outcomes, both, outcomes=("y1", "y2")),
}


def predicted(program: Program, rows: int, seed: int) -> Call:
    args, _ = program.call(rows, seed)
    return args, {}


def of_one_outcome(program: Program) -> Call:
    args, data = program.call(program.rows, 8)
    return args, {program.outcomes[0]: data[program.outcomes[0]]}


# name -> the call that a program is used with
USES: dict[str, Callable[[Program], Call]] = {
    "without data": lambda program: predicted(program, program.rows, 0),
    "other inputs": lambda program: predicted(program, program.rows, 8),
    "more rows": lambda program: predicted(program, program.rows + 3, 8),
    "fewer rows": lambda program: predicted(program, program.rows - 2, 8),
    "held-out data": lambda program: program.call(program.rows, 8),
    "more held-out data": lambda program: program.call(program.rows + 3, 8),
    "one outcome": of_one_outcome,
}


@functools.cache
def trained(name: str, kind: Any = AutoNaMIGuide) -> Any:
    """Returns a guide after a few steps, without the parameter store's part in it."""
    program = PROGRAMS[name]
    return after_steps(program, kind(program.seen()), program.call(program.rows, 0))


def after_steps(program: Program, guide: Any, call: Call) -> Any:
    """Returns a guide of a program's model, trained for a few steps."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    args, data = call
    with pyro.settings.context(module_local_params=True):
        elbo = program.elbo()(program.model, guide)
        elbo(*args, **data)
        optimizer = torch.optim.Adam(elbo.parameters(), lr=0.01)
        for _ in range(4):
            optimizer.zero_grad()
            elbo(*args, **data).backward()
            optimizer.step()
    return guide


@pytest.fixture(autouse=True)
def _own_parameters():
    with pyro.settings.context(module_local_params=True):
        yield


def drawn(guide: Any, call: Call, seed: int = 3) -> dict[str, Tensor]:
    args, data = call
    pyro.set_rng_seed(seed)
    with torch.no_grad():
        return guide(*args, **data)


def assert_stays(guide: Any, expected: dict[str, Tensor], call: Call, atol: float = 0.0) -> None:
    """Checks that a call has the draws that it is to have, of all latents that it shares with training."""
    now = drawn(guide, call)
    shared = [name for name in expected if name in now and now[name].shape == expected[name].shape]
    assert (
        shared
        or not expected.keys() & now.keys()
        or not any(value.dim() == 0 for value in expected.values())
    )
    for name in shared:
        torch.testing.assert_close(now[name], expected[name], rtol=0.0, atol=atol, msg=name)


@pytest.mark.parametrize("name", PROGRAMS)
def test_data_that_the_model_reads_elsewhere_stay_those_of_training(name):
    """As from an attribute, which changes between calls that bring nothing."""
    program = PROGRAMS[name]
    place = types.SimpleNamespace(call=program.call(program.rows, 0))

    def model():
        args, data = place.call
        return program.model(*args, **data)

    elsewhere = program._replace(model=model)
    guide = after_steps(elsewhere, AutoNaMIGuide(elsewhere.seen()), ((), {}))
    expected = drawn(guide, ((), {}))
    for use in USES.values():
        place.call = use(program)
        assert_stays(guide, expected, ((), {}))
    place.call = program.call(program.rows, 0)
    assert_stays(guide, expected, ((), {}))


def test_data_that_the_model_reads_elsewhere_are_others_once_it_is_trained_on_them():
    """Covariates alone, as well: of a slope of 2 and of -2."""
    x = numbers(0, 20)
    place = types.SimpleNamespace(x=x, y=2 * x)
    guide = AutoNaMIGuide(lambda: known(place.x, place.y))
    svi = SVI(guide.model, guide, Adam({"lr": 0.01}), Trace_ELBO())
    slopes = []
    for _ in range(2):
        for _ in range(4):
            svi.step()
        slopes.append(
            float(torch.stack([drawn(guide, ((), {}), i)["b"] for i in range(50)]).mean())
        )
        place.x = -x
    torch.testing.assert_close(slopes, [2.0, -2.0], rtol=0, atol=0.1)  # deviations are 0.11


def test_what_the_model_notes_of_its_runs_is_no_data():
    x = numbers(0, 12)
    place = types.SimpleNamespace(x=x, y=2 * x, seen=None)

    def model():
        place.seen = known(place.x, place.y)

    guide = AutoNaMIGuide(model)
    svi = SVI(model, guide, Adam({"lr": 0.01}), Trace_ELBO())
    noted = []
    for _ in range(3):
        svi.step()
        noted.append(guide._reader._latest_surroundings)
    assert noted[0] is noted[2]
    expected = drawn(guide, ((), {}))
    place.x = place.y = -x
    assert_stays(guide, expected, ((), {}))


def test_numbers_and_what_is_written_to_in_place_stay_those_of_training():
    x = numbers(0, 12)
    place = types.SimpleNamespace(x=x.clone(), y=2 * x, sign=1.0)
    guide = AutoNaMIGuide(lambda: known(place.sign * place.x, place.y))
    svi = SVI(guide.model, guide, Adam({"lr": 0.01}), Trace_ELBO())
    for _ in range(3):
        svi.step()
    expected = drawn(guide, ((), {}))
    place.sign = -1.0
    assert_stays(guide, expected, ((), {}))
    place.x.mul_(2.0)
    assert_stays(copy.deepcopy(guide), expected, ((), {}))


def test_a_history_beside_the_model_is_no_data_of_its_steps():
    class Experiment:
        def __init__(self):
            self.history = torch.zeros(9)
            self.guide = AutoNaMIGuide(self.model)

        def model(self, y):
            mu = pyro.sample("mu", dist.Normal(0.0, 3.0))
            with pyro.plate("rows", 12, subsample_size=len(y)):
                pyro.sample("y", dist.Normal(mu, 1.0), obs=y)

    experiment = Experiment()
    svi = SVI(experiment.model, experiment.guide, Adam({"lr": 0.01}), Trace_ELBO())
    for i in range(9):
        experiment.history[i] = svi.step(numbers(i, 5))
    assert experiment.history.isfinite().all() and experiment.guide.mode == "fixed"


def test_a_loaded_state_has_its_own_data():
    x = numbers(0, 12)
    place = types.SimpleNamespace(x=x, y=2 * x)
    guides = []
    for sign in (1.0, -1.0):
        pyro.clear_param_store()
        place.x = sign * x
        guides.append(AutoNaMIGuide(lambda: known(place.x, place.y), save_data=True))
        svi = SVI(guides[-1].model, guides[-1], Adam({"lr": 0.01}), Trace_ELBO())
        for _ in range(3):
            svi.step()
    place.x = x
    expected = drawn(guides[0], ((), {}))
    guides[1].load_state_dict(guides[0].state_dict())
    assert_stays(guides[1], expected, ((), {}), atol=1e-5)


@pytest.mark.parametrize("size", [5, None], ids=["as many", "all"])
def test_instances_that_training_did_not_have_are_new_in_a_subsampled_plate_as_well(size):
    def model(y, size=None):
        with pyro.plate("rows", len(y), subsample_size=size) as rows:
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(z, 0.1), obs=y[rows])

    guide = AutoNaMIGuide(model)
    svi = SVI(model, guide, Adam({"lr": 0.01}), Trace_ELBO())
    for _ in range(4):
        svi.step(numbers(0, 12), 5)
    draws = torch.stack([drawn(guide, ((5 + numbers(1, 30), size), {}), i)["z"] for i in range(40)])
    assert draws.shape == (40, size or 30) and abs(draws.mean()) < 0.5  # from the prior


@pytest.mark.parametrize("name", ["regression", "counts"])
def test_all_instances_of_a_subsampled_plate_are_those_of_training(name):
    """Trained on 5 of 12 at a time, of data that are passed whole, and called with all, with others, and with none."""
    likelihood = {
        "regression": lambda z: dist.Normal(z, 0.5),
        "counts": lambda z: dist.Poisson(z.exp()),
    }[name]
    y = numbers(0, 12).exp().round()

    def model(y, size=None):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 12, subsample_size=size) as rows:
            z = pyro.sample("z", dist.Normal(mu, 1.0))
            pyro.sample("y", likelihood(z), obs=None if y is None else y[rows])

    guide = AutoNaMIGuide(model)
    svi = SVI(model, guide, Adam({"lr": 0.01}), Trace_ELBO())
    for _ in range(30):
        svi.step(y, 5)
    expected = drawn(guide, ((y,), {}))
    for call in (((y.flip(0),), {}), ((), {"y": 1 + y})):
        assert_stays(guide, expected, call)
    means = [
        torch.stack([drawn(guide, ((), {"y": data}), i)["z"] for i in range(100)]).mean(0)
        for data in (y, None)
    ]
    torch.testing.assert_close(*means, rtol=0, atol=0.35)  # deviations of draws are at most 0.6


@pytest.mark.filterwarnings("ignore:.*are inferred from the rows of data")
def test_rows_that_training_cannot_give_are_told():
    """A table whose rows come as arguments in steps of 5 of 12."""

    def model(y):
        with pyro.plate("rows", 12, subsample_size=len(y)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(z, 0.5), obs=y)

    guide = AutoNaMIGuide(model)
    svi = SVI(model, guide, Adam({"lr": 0.01}), Trace_ELBO())
    for seed in range(4):
        svi.step(numbers(seed, 5))
    with pytest.warns(UserWarning, match="'z' are inferred from the rows of data in this call"):
        drawn(guide, ((numbers(9, 12),), {}))


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_later_call_has_the_posterior_of_training(name, use):
    program, guide = PROGRAMS[name], copy.deepcopy(trained(name))
    expected = drawn(guide, program.call(program.rows, 0))
    assert_stays(guide, expected, USES[use](program))
    # nor does the use change it for later calls
    assert_stays(guide.eval(), expected, program.call(program.rows, 0))


@pytest.mark.parametrize("use", ["without data", "other inputs", "held-out data"])
@pytest.mark.parametrize(
    "name", [name for name in PROGRAMS if name not in ("mixture", "missing covariate")]
)
def test_it_is_as_with_auto_normal(name, use):
    program, guide = PROGRAMS[name], trained(name, AutoNormal)
    assert_stays(guide, drawn(guide, program.call(program.rows, 0)), USES[use](program))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_call_with_gradients_that_do_not_come_back_is_no_training(name):
    program, guide = PROGRAMS[name], copy.deepcopy(trained(name))
    expected = drawn(guide, program.call(program.rows, 0))
    for seed in (8, 9, 10, 11):
        args, data = program.call(program.rows, seed)
        guide(*args, **data)
    assert guide.mode == "fixed"
    assert_stays(guide, expected, program.call(program.rows, 8))


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("way", ["copied", "pickled", "state with data", "state without"])
def test_saved_and_copied_guides_answer_alike(name, way):
    program, guide = PROGRAMS[name], trained(name)
    if way == "pickled" and program.hidden is not None:
        pytest.skip("a lambda hides its states, and cannot be pickled")
    train = program.call(program.rows, 0)
    expected = drawn(guide, train)
    if way == "copied":
        other = copy.deepcopy(guide)
    elif way == "pickled":
        other = pickle.loads(pickle.dumps(guide))
        other.bind(program.seen())
    else:
        saver = copy.deepcopy(guide)
        saver._options = saver._options._replace(save_data=way == "state with data")
        other = AutoNaMIGuide(program.seen())
        if way == "state without":
            drawn(other, train)
        other.load_state_dict(through_file(saver.state_dict()))
    for use in ("other inputs", "more held-out data"):
        assert_stays(other, expected, USES[use](program), atol=1e-3)  # as tables are found anew


@pytest.mark.parametrize(
    "name", ["regression", "panel", "index map", "counts", "VAE", "two outcomes", "time loop"]
)
@pytest.mark.parametrize("parallel", [True, False])
def test_predictions_at_other_inputs_come_from_the_posterior_of_training(name, parallel):
    """Means and deviations of many draws, and of one."""
    program, guide = PROGRAMS[name], copy.deepcopy(trained(name))
    count, trained_draws = 400 if parallel else 50, 150
    args, _ = program.call(program.rows, 8)
    options: dict[str, Any] = {"guide": guide, "parallel": parallel}
    found = Predictive(program.model, num_samples=count, **options)(*args)
    one = Predictive(program.model, num_samples=1, **options)(*args)
    args, data = program.call(program.rows, 0)
    with torch.no_grad():
        drawn_before = [guide(*args, **data) for _ in range(trained_draws)]
    for name in drawn_before[0]:
        if name not in found:
            continue
        value = torch.stack([draw[name] for draw in drawn_before])
        now = found[name].reshape(count, *value.shape[1:])
        error = 5 * (value.std(0) / count**0.5 + value.std(0) / trained_draws**0.5) + 1e-5
        assert ((now.mean(0) - value.mean(0)).abs() < error).all()
        assert ((now.std(0) / value.std(0)).log().abs() < 5 / (2 * count) ** 0.5 + 0.35).all()
        assert one[name].shape[0] == 1


def line_posterior(x: Tensor, y: Tensor, sd: float) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the weights of `known`, by dense algebra."""
    design = torch.stack([torch.ones_like(x), x], -1).double()
    covariance = torch.linalg.inv(design.T @ design / sd**2 + torch.eye(2) / 9)
    return covariance @ design.T @ y.double() / sd**2, covariance


def known(x, y=None, mask=None):
    a, b = (pyro.sample(name, dist.Normal(0.0, 3.0)) for name in "ab")
    with (
        pyro.plate("rows", len(x)),
        poutine.mask(mask=torch.ones(len(x)).bool() if mask is None else mask),
    ):
        return pyro.sample("y", dist.Normal(a + b * x, 0.5), obs=y)


def weights(found: Any) -> Tensor:
    """Draws of both weights of `known`, ``(draws, 2)``."""
    return torch.stack([found[name].flatten() for name in "ab"], -1)


def fitted(
    model: Callable, *args: Any, steps: int = 5, lr: float = 0.01, **options: Any
) -> AutoNaMIGuide:
    guide = AutoNaMIGuide(model, **options)
    svi = SVI(model, guide, Adam({"lr": lr}), Trace_ELBO())
    for _ in range(steps):
        svi.step(*args)
    return guide


def test_a_held_out_loss_is_that_of_exact_draws_of_training():
    x, x_test = numbers(0, 30), numbers(1, 20)
    y, y_test = 1 + 2 * x + 0.5 * numbers(2, 30), 1 - 2 * x_test + 0.5 * numbers(3, 20)
    guide = fitted(known, x, y)
    svi = SVI(
        known, guide, Adam({"lr": 0.01}), Trace_ELBO(num_particles=400, vectorize_particles=True)
    )
    mean, covariance = line_posterior(x, y, 0.5)
    q = dist.MultivariateNormal(mean, covariance)
    w = q.sample((20_000,))
    likelihood = dist.Normal(w[:, :1] + w[:, 1:] * x_test, 0.5).log_prob(y_test.double()).sum(-1)
    prior = dist.Normal(0.0, 3.0).log_prob(w).sum(-1)
    expected = (q.log_prob(w) - prior - likelihood).mean()
    assert abs(svi.evaluate_loss(x_test, y_test) / expected - 1) < 0.02
    assert abs(svi.evaluate_loss(x_test, y_test) / expected - 1) < 0.02


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_masks_of_a_later_call_change_nothing(share):
    x, y = numbers(0, 30), numbers(2, 30)
    guide = fitted(known, x, y)
    mask = torch.arange(30) < 30 * share
    mean, covariance = line_posterior(x, y, 0.5)
    draws = Predictive(known, guide=guide, num_samples=2000, parallel=True)(
        x + 1, torch.zeros(30), mask
    )
    draws = weights(draws)
    assert ((draws.mean(0) - mean).abs() < 5 * covariance.diagonal().sqrt() / 2000**0.5).all()
    assert ((draws.std(0) / covariance.diagonal().sqrt()).log().abs() < 0.1).all()


def masked(x, y, mask=None):
    """A slope whose likelihood takes a mask if one is given."""
    slope = pyro.sample("slope", dist.Normal(0.0, 2.0))
    with pyro.plate("rows", len(x)):
        fn = dist.Normal(slope * x, 1.0)
        pyro.sample("y", fn if mask is None else fn.mask(mask), obs=y)


@pytest.mark.parametrize("exact", [True, False])
def test_the_same_data_with_another_mask_are_other_data(exact):
    """Also where a backward pass may come, as in a loss by `Trace_ELBO.loss`; a mask is an argument of its own."""
    x, y = numbers(0, 20), numbers(1, 20)
    mask = torch.arange(20) < 5

    def answer(*args):
        pyro.set_rng_seed(3)
        return torch.stack([guide(*args)["slope"].detach() for _ in range(200)])

    guide = AutoNaMIGuide(masked, exact=exact)
    svi = SVI(masked, guide, Adam({"lr": 0.01}), Trace_ELBO())
    for _ in range(3):
        svi.step(x, y)
    before = answer(x, y)
    torch.testing.assert_close(answer(x, y, mask), before)
    torch.testing.assert_close(answer(x, y), before)
    precision = x.square().sum() + 1 / 4
    if exact:
        off = before.mean() - (x * y).sum() / precision
        assert abs(float(off)) < 5 / float(200 * precision) ** 0.5


@pytest.mark.parametrize("rows", [30, 7])
def test_rows_that_are_masked_are_predicted_at_their_own_inputs(rows):
    """Data that say nothing are no posterior to keep: a latent that is masked everywhere comes from the model."""

    def model(x, y, mask):
        a, b = (pyro.sample(name, dist.Normal(0.0, 3.0)) for name in "ab")
        with pyro.plate("rows", len(x)):
            return pyro.sample("y", dist.Normal(a + b * x, 0.5), obs=y, obs_mask=mask)

    x, y = numbers(0, 30), numbers(2, 30) + 2
    guide = fitted(model, x, y, torch.ones(30).bool())
    mean, covariance = line_posterior(x, y, 0.5)
    none, at = torch.zeros(rows), torch.full((rows,), 3.0)
    draws = Predictive(model, guide=guide, num_samples=400)(at, none, none.bool())["y"]
    design = torch.tensor([1.0, 3.0]).double()
    scale = (design @ covariance @ design + 0.25).sqrt()
    assert (draws.mean(0) - (mean[0] + 3 * mean[1])).abs().max() < 5 * scale / 20


def test_a_second_data_set_that_stays_is_the_data_of_training_from_then_on():
    x, y = numbers(0, 30), numbers(2, 30)
    guide = fitted(known, x, y)
    svi = SVI(known, guide, Adam({"lr": 0.01}), Trace_ELBO())
    for rows, shift in ((30, 3.0), (17, -3.0)):
        for _ in range(3):
            svi.step(x[:rows], y[:rows] + shift)
        mean, covariance = line_posterior(x[:rows], y[:rows] + shift, 0.5)
        draws = Predictive(known, guide=guide, num_samples=2000, parallel=True)(x)
        draws = weights(draws)
        assert guide.mode == "fixed"
        assert ((draws.mean(0) - mean).abs() < 5 * covariance.diagonal().sqrt() / 2000**0.5).all()


def test_data_that_are_written_to_after_training_are_not_read():
    x, y = numbers(0, 30), numbers(2, 30)
    guide = fitted(known, x, y)
    expected = weights(drawn(guide, ((x,), {})))
    x.zero_(), y.fill_(100.0)
    assert torch.equal(weights(drawn(guide, ((x,), {}))), expected)


def test_observations_ask_for_the_posterior_of_these_data_and_what_was_learned_is_named():
    x, y, other = numbers(0, 30), numbers(2, 30), numbers(4, 30) + 3
    guide = fitted(known, x, y)
    mean, covariance = line_posterior(x, other, 0.5)
    posterior = importance_sample(known, guide, x, num_samples=2000, observations={"y": other})
    assert posterior.effective_sample_size > 1900
    means = torch.stack([posterior.mean(name) for name in "ab"])
    assert ((means - mean).abs() < 5 * covariance.diagonal().sqrt() / 2000**0.5).all()
    learned = fitted(known, x, y, exact=False)
    with torch.no_grad(), pytest.warns(UserWarning, match="'a', 'b' were learned on those alone"):
        learned(x, observations={"y": other})


def test_before_training_the_latest_data_decide():
    x, y = numbers(0, 30), numbers(2, 30)
    guide = AutoNaMIGuide(known)
    for shift in (0.0, 3.0):
        guide(x, y + shift)
        mean, covariance = line_posterior(x, y + shift, 0.5)
        draws = Predictive(known, guide=guide, num_samples=2000, parallel=True)(x[:5])
        draws = weights(draws)
        assert ((draws.mean(0) - mean).abs() < 5 * covariance.diagonal().sqrt() / 2000**0.5).all()


def test_new_rows_are_named_once():
    program, guide = PROGRAMS["counts"], copy.deepcopy(trained("counts"))
    with pytest.warns(UserWarning, match="'rows' has 15 instances, 12 in training") as told:
        for _ in range(3):
            drawn(guide, USES["more rows"](program))
    assert len(told) == 1


# ---- minibatches


def logistic(x, y=None, scale=1.0):
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 2.0).to_event(1))
    with pyro.plate("rows", len(x)), poutine.scale(scale=scale):
        return pyro.sample("y", dist.Bernoulli(logits=(x * w[..., None, :]).sum(-1)), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("scaled", [True, False])
def test_minibatches_by_arguments_are_learned_from_all_steps(scaled, caplog):
    """Means of two seeds are at most a tenth farther from the exact ones than `AutoNormal`'s, and Adam's noise."""
    torch.manual_seed(0)
    x = torch.randn(400, 3)
    y = torch.bernoulli(torch.sigmoid(x @ torch.tensor([1.0, -2.0, 0.5])))
    scale = 8.0 if scaled else 1.0
    exact = _posterior_mean(x, y, scale / 8)
    errors = {}
    for kind in (AutoNormal, AutoNaMIGuide):
        found = []
        for seed in range(2):
            pyro.set_rng_seed(seed)
            guide = kind(logistic)
            svi = SVI(
                logistic, guide, pyro.optim.ClippedAdam({"lr": 0.03, "lrd": 0.99}), Trace_ELBO()
            )
            for _ in range(40):
                for part in torch.randperm(400).split(50):
                    svi.step(x[part], y[part], scale)
            draws = Predictive(logistic, guide=guide, num_samples=1000, parallel=True)(x[:5])["w"]
            found.append((draws.mean(0).flatten() - exact).norm())
        errors[kind] = torch.stack(found).mean()
    assert guide.mode == "minibatches" and guide.rules["w"].rule == "learned"
    told = [
        record.getMessage()
        for record in caplog.records
        if "minibatches of one data set" in record.getMessage()
    ]
    assert len(told) == 2 and "plate 'rows'" in told[0] and "mode='fixed'" in told[0]
    assert errors[AutoNaMIGuide] < 1.1 * errors[AutoNormal] + 0.02  # an eighth of a deviation


def _posterior_mean(x: Tensor, y: Tensor, weight: float) -> Tensor:
    """Returns the posterior mean of `logistic`, by importance sampling from a wide Normal at the mode."""
    w = torch.zeros(3)
    for _ in range(30):
        p = torch.sigmoid(x @ w)
        gradient = weight * x.T @ (y - p) - w / 4
        hessian = weight * x.T @ (x * (p * (1 - p))[:, None]) + torch.eye(3) / 4
        w = w + torch.linalg.solve(hessian, gradient)
    q = dist.MultivariateNormal(w, 1.5 * torch.linalg.inv(hessian))
    draws = q.sample((20_000,))
    likelihood = dist.Bernoulli(logits=draws @ x.T).log_prob(y).sum(-1)
    prior = dist.Normal(0.0, 2.0).log_prob(draws).sum(-1)
    return torch.softmax(weight * likelihood + prior - q.log_prob(draws), 0) @ draws


@pytest.mark.slow
def test_instances_of_a_plate_that_stays_are_told_apart_in_minibatches():
    """Means of groups, whose rows come in any order, are those of all rows under exact hyperparameters."""
    torch.manual_seed(0)
    group = torch.arange(200) % 4
    y = torch.tensor([-2.0, 0.0, 1.0, 4.0])[group] + torch.randn(200)

    def model(group, y=None):
        with pyro.plate("groups", 4):
            mean = pyro.sample("mean", dist.Normal(1.0, 3.0))
        with pyro.plate("rows", len(group)), poutine.scale(scale=5.0):
            pyro.sample("y", dist.Normal(mean[group], 1.0), obs=y)

    guide = AutoNaMIGuide(model)
    svi = SVI(model, guide, pyro.optim.ClippedAdam({"lr": 0.03, "lrd": 0.98}), Trace_ELBO())
    for _ in range(40):
        for part in torch.randperm(200).split(40):
            svi.step(group[part], y[part])
    means = torch.stack([drawn(guide, ((group,), {}), seed)["mean"] for seed in range(400)])
    precision = 1 / 9 + 50
    exact = torch.stack([(1 / 9 + y[group == i].sum()) / precision for i in range(4)])
    assert guide.mode == "minibatches"
    assert (means.mean(0) - exact).abs().max() < 0.5 / precision**0.5
    assert ((means.std(0) * precision**0.5).log().abs() < 0.5).all()


def test_latents_of_rows_read_their_own_row_in_minibatches():
    """And whatever the data of a call are, latents outside have one posterior."""
    program = PROGRAMS["two outcomes"]
    guide = AutoNaMIGuide(program.model)
    svi = SVI(program.model, guide, Adam({"lr": 0.01}), Trace_ELBO())
    for seed in range(20):
        args, data = program.call(8, seed)
        svi.step(*args, **data)
    assert guide.mode == "minibatches"
    (x,), data = program.call(8, 30)
    slope = drawn(guide, ((x,), data))["slope"]
    data["y2"] = data["y2"] + torch.eye(8)[3] * 20
    moved = drawn(guide, ((x,), data))
    assert torch.equal(moved["slope"], slope)
    with pytest.warns(UserWarning, match="brings no data of 'y1', 'y2'"):
        assert torch.equal(drawn(guide, ((x,), {}))["slope"], slope)


def test_modes_can_be_said_and_belong_to_the_state():
    program = PROGRAMS["counts"]
    args, data = program.call(8, 0)
    guide = AutoNaMIGuide(program.model, mode="minibatches")
    drawn(guide, (args, data))
    assert (
        guide.mode == "minibatches"
        and "minibatches" in repr(guide)
        and guide.rules["slope"].rule == "learned"
    )
    for early in (True, False):
        other = AutoNaMIGuide(program.model)
        if not early:
            drawn(other, (args, data))
        other.load_state_dict(through_file(guide.state_dict()))
        assert torch.equal(drawn(other, (args, data))["slope"], drawn(guide, (args, data))["slope"])
        assert other.mode == "minibatches"


def test_losses_of_several_data_sets_before_one_backward_pass_are_of_minibatches():
    x = numbers(0, 20)
    data = [(x[:10], 1 + 2 * x[:10]), (x[10:], 3 + 2 * x[10:])]
    guide, loss = AutoNaMIGuide(known), Trace_ELBO().differentiable_loss
    for _ in range(3):
        sum(loss(known, guide, *each) for each in data).backward()
    guide(x)
    assert guide.mode == "minibatches"


def test_a_loss_that_is_dropped_is_no_training():
    x = numbers(0, 12)
    guide, loss = AutoNaMIGuide(known), Trace_ELBO().differentiable_loss
    loss(known, guide, x, 1 + 2 * x).backward()
    expected = drawn(guide, ((x,), {}))
    for seed in range(5):
        kept = loss(known, guide, numbers(seed, 12), numbers(seed, 12))
        loss(known, guide, x, 1 + 2 * x).backward()
    del kept
    assert guide.mode == "fixed"
    assert_stays(guide, expected, ((numbers(1, 12),), {}))


def test_a_guide_that_is_not_in_training_mode_is_trained_by_a_backward_pass():
    x = numbers(0, 12)
    guide = AutoNaMIGuide(known).eval()
    Trace_ELBO().differentiable_loss(known, guide, x, 1 + 2 * x).backward()
    expected = drawn(guide, ((x,), {}))
    assert_stays(guide, expected, ((x, 1 - 2 * x), {}))


def test_a_torch_optimizer_goes_on_with_the_parameters_of_minibatches():
    """It was made for those of the first call, and may have moved them before."""
    x = numbers(0, 96)
    y = (numbers(1, 96) < x).double()

    def model(x, y):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 96, subsample_size=len(x)):
            pyro.sample("y", dist.Bernoulli(logits=slope * x), obs=y)

    means = []
    for kind in (AutoNormal, AutoNaMIGuide):
        pyro.clear_param_store()
        guide = kind(model)
        elbo = Trace_ELBO()(model, guide)
        elbo(x, y)
        optimizer = torch.optim.Adam(elbo.parameters(), lr=0.05)
        for step in range(300):
            rows = slice(32 * (step % 3), 32 * (step % 3) + 32)
            optimizer.zero_grad()
            elbo(x[rows], y[rows]).backward()
            optimizer.step()
        with torch.no_grad():
            means.append(torch.stack([guide(x, y)["slope"] for _ in range(200)]).mean())
    assert guide.mode == "minibatches"
    assert abs(means[1] - means[0]) < 0.15 and means[1] > 0.5  # the posterior's deviation is 0.25


def test_a_fixed_guide_stays_fixed_where_it_is_asked_to():
    program = PROGRAMS["regression"]
    guide = AutoNaMIGuide(program.model, mode="fixed")
    svi = SVI(program.model, guide, Adam({"lr": 0.01}), Trace_ELBO())
    with pytest.warns(UserWarning, match="differ from step to step"):
        for seed in range(8):
            args, data = program.call(8, seed)
            svi.step(*args, **data)
    assert guide.mode == "fixed"


def test_minibatches_are_recognised_with_many_particles_a_step():
    program = PROGRAMS["regression"]
    guide = AutoNaMIGuide(program.model)
    svi = SVI(program.model, guide, Adam({"lr": 0.01}), Trace_ELBO(num_particles=12))
    for seed in range(5):
        args, data = program.call(8, seed)
        svi.step(*args, **data)
    assert guide.mode == "minibatches"
