"""Smoothed weights and k-hat against ArviZ, and against tails of known shape."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from pyro_nami.inference.psis import smooth


def arviz_psis(log_weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """ArviZ's normalized smoothed log weights and k-hat."""
    arviz = pytest.importorskip("arviz")
    if not hasattr(arviz, "psislw"):
        pytest.skip("ArviZ 1.x sets the tail apart in another way")
    return arviz.psislw(log_weights.copy())


def heavy_tailed(draws: int, rows: int = 4) -> torch.Tensor:
    """Log weights ``(4 tails, rows, draws)``, from light to infinite mean."""
    torch.manual_seed(draws)
    scale = torch.tensor([0.3, 1.0, 2.0, 4.0], dtype=torch.float64)[:, None, None]
    return scale * torch.randn(4, rows, draws, dtype=torch.float64) - 700.0


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("draws", [21, 25, 100, 999, 5000])
def test_equals_arviz(draws):
    log_weights = heavy_tailed(draws)
    log_weights[0, 0, : draws // 2] = -math.inf
    log_weights[1, 0] = log_weights[1, 0].clamp(min=-700.0)  # half of the weights tie
    # a tail of fewer than M draws above underflow
    log_weights[2, 0] -= 720.0 * (torch.arange(draws) > 8)
    smoothed, k = smooth(log_weights)
    expected, expected_k = arviz_psis(log_weights.numpy())
    assert np.isfinite(expected_k).all()
    np.testing.assert_allclose(k.numpy(), expected_k, rtol=0, atol=1e-6)
    np.testing.assert_allclose(smoothed.log_softmax(-1).numpy(), expected, rtol=0, atol=1e-6)


def test_the_default_device_does_not_matter():
    log_weights = heavy_tailed(100)
    with torch.device("meta"):
        smoothed, k = smooth(log_weights)
    assert all(map(torch.equal, (smoothed, k), smooth(log_weights)))


def test_single_precision_agrees_with_double():
    log_weights = heavy_tailed(1000).float()
    smoothed, k = smooth(log_weights)
    exact, exact_k = smooth(log_weights.double())
    assert smoothed.dtype == k.dtype == torch.float32
    torch.testing.assert_close(k.double(), exact_k, rtol=0, atol=1e-6)
    # rounding at -700 is 6e-5
    torch.testing.assert_close(smoothed.double(), exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize("k", [-0.2, 0.1, 0.4, 0.7, 1.0])
def test_finds_the_shape_of_pareto_draws(k):
    repetitions, draws = 40, 10_000
    weights = stats.genpareto(k).rvs((repetitions, draws), random_state=np.random.default_rng(0))
    estimates = smooth(torch.as_tensor(weights).log())[1]
    # The excess over a threshold is Pareto of the same k. The tail has 300 draws; the maximum likelihood estimate has
    # sd (1 + k) / sqrt(300), and the prior draws k towards 0.5 by 10 / 310.
    expected = (300 * k + 5) / 310
    error = (1 + k) / math.sqrt(300 * repetitions)
    assert abs(float(estimates.mean()) - expected) < 4 * error + 0.01
    assert 0.7 < float(estimates.std()) / ((1 + k) / math.sqrt(300)) < 1.3


def test_smoothing_brings_a_heavy_tailed_mean_closer():
    draws = torch.as_tensor(
        stats.genpareto(0.6).rvs((400, 1000), random_state=np.random.default_rng(1))
    )
    smoothed = smooth(draws.log())[0].exp()
    exact = 1 / (1 - 0.6)
    raw_error, error = (
        (value.mean(-1) - exact).square().mean().sqrt() for value in (draws, smoothed)
    )
    assert error < 0.8 * raw_error


def test_rows_are_independent_of_each_other_and_of_the_scale():
    log_weights = heavy_tailed(300)
    smoothed, k = smooth(log_weights)
    assert smoothed.shape == (4, 4, 300) and k.shape == (4, 4)
    alone, k_alone = smooth(log_weights[2, 1])
    torch.testing.assert_close(smoothed[2, 1], alone)
    torch.testing.assert_close(k[2, 1], k_alone)
    torch.testing.assert_close(smooth(log_weights + 50.0)[0], smoothed + 50.0)


def test_only_the_tail_changes_and_never_beyond_the_largest_weight():
    log_weights = heavy_tailed(1000)[2]
    smoothed, _ = smooth(log_weights)
    assert ((smoothed != log_weights).sum(-1) <= math.ceil(3 * math.sqrt(1000))).all()
    assert (smoothed.amax(-1) <= log_weights.amax(-1)).all()
    assert (smoothed.gather(-1, log_weights.argsort(-1)).diff(dim=-1) >= 0).all()


def test_constant_weights_have_no_tail():
    log_weights = torch.full((1000,), -3.0)
    smoothed, k = smooth(log_weights)
    assert float(k) == -math.inf and torch.equal(smoothed, log_weights)


@pytest.mark.parametrize("size", [1e-7, 1e-6, 1e-4])
@pytest.mark.parametrize("draws", [100, 1000])
def test_rounding_of_constant_weights_looks_like_no_heavy_tail(size, draws):
    k = smooth(-20.0 + size * torch.randn(100, draws))[1]  # float32 has steps of 2e-6 at -20
    assert (k < 0.7).all()


@pytest.mark.parametrize("tied", [5, 60, 100, 189])
def test_a_tail_of_equal_weights_is_bounded(tied):
    """As a discrete latent's: of 4,000 draws some weigh the same, the others nothing, or less."""
    log_weights = torch.full((2, 4000), -math.inf)
    log_weights[:, :tied] = 1.0
    log_weights[1, tied] = 0.0
    smoothed, k = smooth(log_weights)
    assert torch.equal(smoothed, log_weights) and k.eq(-math.inf).all()


def test_too_few_weights_for_a_fit_give_inf():
    log_weights = torch.full((1000,), -50.0)
    log_weights[:3] = torch.tensor([0.0, -1.0, -2.0])
    smoothed, k = smooth(torch.stack([log_weights, torch.linspace(-5, 0, 1000)]))
    assert (
        float(k[0]) == math.inf and torch.equal(smoothed[0], log_weights) and torch.isfinite(k[1])
    )
    assert float(smooth(torch.randn(20))[1]) == math.inf
    assert float(smooth(torch.randn(1))[1]) == math.inf


def test_weights_that_are_equal_though_their_logarithms_are_not_are_ties():
    log_weights = torch.full((300,), -0.4, dtype=torch.double)
    log_weights[:40] += 5.6e-17
    assert (log_weights[:40] > -0.4).all() and (
        log_weights[:40].exp() == log_weights[-1].exp()
    ).all()
    log_weights[:6] = torch.linspace(-0.1, 0, 6)
    tied = torch.where(log_weights < -0.2, torch.full_like(log_weights, -0.4), log_weights)
    assert smooth(log_weights)[1] == smooth(tied)[1] and torch.isfinite(smooth(tied)[1])


@pytest.mark.parametrize(
    ("log_weights", "error", "message"),
    [
        (torch.tensor([0.0, math.nan]), ValueError, "NaN or inf in 1 of 2"),
        (torch.tensor([0.0, math.inf]), ValueError, "NaN or inf in 1 of 2"),
        (torch.full((3, 4), -math.inf), ValueError, "weights are zero in 3 of 3 data sets"),
        (torch.full((4,), -math.inf), ValueError, "all weights are zero. The proposal"),
        (torch.zeros(2, 0), ValueError, "at least one draw"),
        (torch.tensor(0.0), ValueError, "at least one draw"),
        (torch.zeros(4, dtype=torch.long), TypeError, "floating dtype"),
    ],
)
def test_what_is_no_weight_is_an_error(log_weights, error, message):
    with pytest.raises(error, match=message):
        smooth(log_weights)


@pytest.mark.cuda
def test_cuda_equals_cpu():
    log_weights = heavy_tailed(1000)
    for there, here in zip(smooth(log_weights.cuda()), smooth(log_weights)):
        torch.testing.assert_close(there.cpu(), here)
