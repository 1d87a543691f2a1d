"""The Gaussian mixture's models agree with each other."""

import gaussian_mixture
import mixture_model
import pytest
import torch
from pyro import poutine
from pyro.infer import TraceEnum_ELBO, config_enumerate

from pyro_nami.inference import Simulator


@pytest.fixture
def simulations():
    return Simulator(mixture_model.plated, (torch.zeros(7, 2),)).draw(3)


def test_model_with_a_plate_and_grounded_one_have_the_same_density(simulations):
    values = {**simulations.latents, **simulations.observed}
    grounded = mixture_model.ground(values)
    for i in range(simulations.num):
        x = values["x"][i]
        totals = []
        for model, each in ((mixture_model.plated, values), (mixture_model.grounded, grounded)):
            given = {name: value[i] for name, value in each.items() if not name.startswith("x")}
            if model is mixture_model.plated:
                given = {
                    name: value.squeeze(0) if name != "z" else value
                    for name, value in given.items()
                }
            trace = poutine.trace(poutine.condition(model, given)).get_trace(x)
            totals.append(trace.log_prob_sum())
        torch.testing.assert_close(totals[0], totals[1], rtol=1e-5, atol=1e-4)


def test_density_with_z_summed_out_is_that_of_enumeration(simulations):
    x = simulations.observed["x"][0]
    values = {name: simulations.latents[name][0].squeeze(0) for name in mixture_model.GLOBALS}
    model = poutine.condition(config_enumerate(mixture_model.plated, "parallel"), values)
    enumerated = -TraceEnum_ELBO(max_plate_nesting=1).loss(model, lambda x: None, x)
    summed = (
        poutine.trace(poutine.condition(mixture_model.summed, values)).get_trace(x).log_prob_sum()
    )
    assert enumerated == pytest.approx(float(summed), rel=1e-5)


def test_summaries_do_not_depend_on_labels(simulations):
    draws = {name: simulations.latents[name].squeeze(1) for name in mixture_model.GLOBALS}
    x = mixture_model.load_faithful()
    assert x.shape == (272, 2)
    before = mixture_model.summarize(draws, x)
    after = mixture_model.summarize({name: value[:, [2, 0, 1]] for name, value in draws.items()}, x)
    for name, value in before.items():
        torch.testing.assert_close(value, after[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("gap", "epoch"), [([0.0, 1.0, 1.0], 2), ([1.0, 0.0, 1.0], 3), ([1.0, 1.0, -1.0], None)]
)
def test_epoch_from_which_a_curve_is_below_for_good(gap, epoch):
    lower = torch.tensor([[0.01, 0.01, 0.01], [-0.01, -0.01, -0.01]])
    assert gaussian_mixture.first_below(lower, lower + torch.tensor(gap)) == epoch
