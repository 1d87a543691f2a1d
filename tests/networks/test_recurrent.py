"""Recurrent networks: sums against a loop, gaps against shorter series, Kalman's backward recursion."""

import torch

from pyro_nami.networks.recurrent import (
    BackwardGRU,
    BackwardMessages,
    SeriesSummary,
    backward_sums,
)


def test_sums_are_those_of_a_loop():
    torch.manual_seed(0)
    for steps in (1, 2, 7, 32):
        terms, decay = torch.randn(steps, 3), torch.rand(steps, 3)
        found, total = [], torch.zeros(3)
        for t in reversed(range(steps)):
            total = terms[t] + decay[t] * total
            found.append(total)
        assert torch.allclose(
            backward_sums(terms, decay), torch.stack(found[::-1]), rtol=1e-4, atol=1e-5
        )


def test_steps_that_do_not_exist_change_nothing():
    torch.manual_seed(0)
    x, exists = torch.randn(9, 2, 3), torch.rand(9, 2) < 0.6
    messages = BackwardMessages(2, 3, 5, 4)
    with torch.no_grad():
        messages.output.weight.normal_()
    modules = [BackwardGRU(3, 5), SeriesSummary(3, 5)]
    for row in range(2):
        own = exists[:, row]
        short, there = x[own, row : row + 1], torch.ones(int(own.sum()), 1)
        states, summary = (module(x, exists) for module in modules)
        assert torch.allclose(states[own, row], modules[0](short)[:, 0], atol=1e-6)
        assert torch.allclose(summary[row], modules[1](short)[0], atol=1e-6)
        whole = messages(x[..., :2], x, torch.ones(9, 2), exists)
        alone = messages(short[..., :2], short, there)
        for part, expected in zip(whole, alone):
            assert torch.allclose(part[own, row], expected[:, 0], rtol=1e-4, atol=1e-5)


def test_first_messages_are_weighted_means_of_later_data():
    messages = BackwardMessages(1, 1, 4, 1)
    messages.start(torch.ones(1, 1), torch.zeros(1))
    y = torch.tensor([1.0, 2.0, 4.0])[:, None, None]
    location, log_precision = messages(y, y, torch.ones(3, 1))
    factor = torch.tensor(2.5).tanh()
    precision, force = 0.0, 0.0
    for t in (2, 1, 0):
        force = y[t] + 0.5 * factor * force
        precision = 1 + 0.5 * factor**2 * precision
        assert torch.allclose(location[t], force / precision, rtol=1e-5)
        assert torch.allclose(log_precision[t].exp(), torch.as_tensor(precision), rtol=1e-5)


def test_number_of_weights_is_that_of_a_step():
    messages = BackwardMessages(2, 3, 5, 4)
    for steps in (1, 50):
        x = torch.randn(steps, 1, 3)
        location, _ = messages(x[..., :2], x, torch.ones(steps, 1))
        assert location.shape == (steps, 1, 4)
