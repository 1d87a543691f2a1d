"""What one step of Adam moves: weights divided beyond a base, speeds, running averages."""

import pytest
import torch

from pyro_nami.networks import Base, MaskedMLP, Pace, Running, tempered

RATE = 1e-3


def build(inputs: int, width: int, base: Base) -> MaskedMLP:
    return MaskedMLP(
        torch.ones(2, inputs, dtype=torch.bool), (width,), base=base, activation=torch.tanh
    )


@pytest.mark.parametrize("inputs", [1, 20, 800])
@pytest.mark.parametrize("width", [4, 64, 512])
def test_a_step_moves_a_row_by_the_rate_times_the_bases(inputs, width):
    """The bias gives 1, the direct weights at most their base, the units theirs, whatever the numbers."""
    base = Base(2.0, 4.0, 3.0)
    mlp, x = build(inputs, width, base), torch.ones(1, inputs)
    before = mlp(x).detach()
    optimizer = torch.optim.Adam(mlp.parameters(), lr=RATE)
    mlp(x).sum().backward()
    optimizer.step()
    moved = (mlp(x) - before).abs().max().item()
    assert RATE <= moved <= (1 + base.inputs + base.output + 0.01) * RATE


def test_units_and_speeds_scale_rows_and_survive_saving():
    mlp, x = build(3, 5, Base()), torch.randn(4, 3)
    torch.nn.init.normal_(mlp.output)
    before, bias = mlp(x).detach(), mlp.output_bias().detach()
    mlp.set_units(torch.tensor([2.0, 3.0]), torch.tensor([1.0, 10.0]))
    expected = (before - bias) * torch.tensor([2.0, 3.0]) + bias * torch.tensor([1.0, 10.0])
    torch.testing.assert_close(mlp(x), expected)
    other = build(3, 5, Base())
    other.load_state_dict(mlp.state_dict())
    torch.testing.assert_close(other(x), mlp(x))


def test_a_speed_grows_with_steps_that_agree_and_falls_with_those_that_do_not():
    pace, value = Pace(torch.zeros(2)), torch.tensor([-4.0, 3.0])
    for number in range(400):
        noise = 10 * (2.0 * torch.randint(0, 2, ()) - 1)
        value += RATE * torch.stack((torch.ones(()), noise))
        before = value.clone()
        pace.adapt(value)
        if number == 60:
            assert value[0] > -4 + 3 * RATE * number  # well ahead of the optimizer
    assert value[0] - before[0] == pytest.approx(min(15 * RATE, 0.05), rel=1e-3)
    assert pace.speed[1] < 1


def test_a_pace_makes_no_step_longer_than_five_hundredths_by_itself():
    pace, value = Pace(torch.zeros(1)), torch.zeros(1)
    for number in range(200):
        value += 100.0 if number == 150 else 0.02  # somebody sets the parameter
        before = value.clone()
        pace.adapt(value)
        assert (value - before).abs() <= 0.0501
    assert 0.02 * pace.speed.item() <= 0.05 * 1.0001


@pytest.mark.parametrize("rate", [0.05, 0.01, 0.001])
@pytest.mark.parametrize("agree", [True, False])
def test_a_patient_parameter_goes_by_short_steps_until_they_agree(rate, agree):
    pace, value, moved = Pace(torch.zeros(2, 200)), torch.zeros(2, 200), torch.zeros(2)
    pace.patient[0] = True
    for number in range(400):
        before = value.clone()
        value += rate if agree else rate * (2.0 * torch.randint(0, 2, (200,)) - 1)
        pace.adapt(value)
        if number >= 300:
            moved += (value - before).abs().mean(1) / 100
    if agree:
        torch.testing.assert_close(moved, torch.full((2,), min(0.05, 16 * rate)), rtol=1e-3, atol=0)
    else:
        # a step back undoes one forth: four come to about a third of one
        assert moved[0] <= min(0.0025, moved[1])


def test_one_wild_step_moves_no_patient_parameter_far_but_what_somebody_sets_stays():
    pace, value = Pace(torch.zeros(2)), torch.zeros(2)
    pace.patient[0] = True
    pace.adapt(value)
    for number in range(100):  # of an optimizer at a high rate, from the first step on
        # as after one huge gradient
        step = 0.5 * torch.randn(2) if number < 60 else 1e-4 * torch.randn(2)
        value += step
        pace.adapt(value)
        # at 300 seeds 0.05 in the median, and at most 0.71, where the other goes 10.8
        assert value[0].abs() < 1.0
    before = value[0].item()
    value += 1.5
    pace.adapt(value)
    assert abs(value[0] - before) <= 0.1
    with torch.inference_mode():
        value += 0.01
        value.copy_(torch.tensor([3.0, -3.0]))  # a state that somebody loads
        pace.adapt(value)
    assert value.tolist() == [3.0, -3.0]


@pytest.mark.parametrize(
    "step, low, high", [(0.05, 0.0, 0.0011), (0.01, 0.03, 0.041), (0.001, 0.014, 0.0161)]
)
def test_a_shared_bias_goes_as_far_as_those_added_to_it_leave_of_a_step(step, low, high):
    pace, value = Pace(torch.zeros(2)), torch.zeros(2)
    pace.shared[0] = True
    for _ in range(200):
        before = value.clone()
        value += step
        pace.adapt(value)
    moved = value - before
    assert low <= moved[0] <= high
    assert moved[1] == pytest.approx(min(0.05, 16 * step), rel=1e-3)


def test_running_inputs_are_standard_and_those_that_do_not_follow_stay():
    running = Running(torch.full((2,), 1e-6), torch.tensor([True, False]))
    draws = torch.tensor([5.0, 5.0]) + 0.01 * torch.randn(600, 2)
    for x in draws:
        running.update(x.unsqueeze(0), 0, 2)
        running.passes += 1
    seen = running(draws[-200:], 0, 2)
    assert abs(seen[:, 0].mean()) < 0.7
    assert 0.5 < seen[:, 0].std() < 2
    torch.testing.assert_close(seen[:, 1], draws[-200:, 1])
    running.settle(draws[:1], 0, 2)
    assert torch.equal(running(draws[:1], 0, 2), torch.zeros(1, 2))


def test_tempered_features_are_the_same_inside_and_finite_anywhere():
    x = torch.tensor([-1e30, -3.0, 0.0, 9.0, 1e30])
    assert torch.equal(tempered(x)[1:4], x[1:4])
    assert tempered(x).abs().max() < 90
