"""Estimates from weighted draws against numpy's, normal theory, and ArviZ."""

import math
import sys

import numpy as np
import pytest
import torch
from torch.distributions import Normal

from pyro_nami.fit.posterior import Posterior
from pyro_nami.inference.weighted_samples import WeightedSamples


def proposal_draws(num, sets=(), dtype=torch.float64):
    """Draws of N(0, 1.5^2) weighted to N(m, 1), with m = 0.3, or 0.3 times the number of the data set; log Z = -7."""
    torch.manual_seed(5)
    mean = means(sets, dtype)
    z = 1.5 * torch.randn(num, *sets, dtype=dtype)
    log_weights = log_ratio(z, mean) - 7.0
    vector = torch.stack([z, -z, z.square()], -1)
    return WeightedSamples({"z": z, "v": vector}, log_weights, {"z": (), "v": ("p",)})


def means(sets, dtype):
    return 0.3 * (1 + torch.arange(math.prod(sets), dtype=dtype).reshape(sets))


def log_ratio(z, mean):
    """log N(z; mean, 1) - log N(z; 0, 1.5^2)."""
    target, proposal = Normal(mean, z.new_ones(())), Normal(0 * mean, 1.5)
    return target.log_prob(z) - proposal.log_prob(z)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("sets", [(), (3,)], ids=["one", "batch"])
def test_estimates_are_those_of_normal_theory(sets, dtype):
    draws = proposal_draws(20_000, sets, dtype)
    mean = means(sets, dtype)
    error = 1 / draws.effective_sample_size.sqrt().min()  # of a mean of a variable with sd 1
    assert ((draws.mean("z") - mean).abs() < 4 * error).all()
    assert ((draws.std("z") - 1).abs() < 4 * error).all()
    off = draws.quantile("z", 0.9) - mean - 1.2816
    assert (off.abs() < 4 * 1.7 * error).all()  # sd of a 0.9 quantile: 1.71
    assert (
        draws.mean("z").dtype == draws.log_evidence.dtype == dtype and draws.mean("z").shape == sets
    )
    assert draws.mean("v").shape == draws.std("v").shape == (*sets, 3)
    assert draws.quantile("v", [0.1, 0.5]).shape == (2, *sets, 3)
    assert (
        draws.log_evidence.shape
        == draws.pareto_k.shape
        == draws.effective_sample_size.shape
        == sets
    )
    assert ((draws.log_evidence + 7).abs() < 4 * draws.log_evidence_error).all()
    # E[w]^2 / E[w^2] for normals of sd 1 and s = 1.5, m apart: sqrt(2 s^2 - 1) / s^2 exp(-m^2 / (2 s^2 - 1)).
    expected = math.sqrt(3.5) / 2.25 * torch.exp(-(mean**2) / 3.5)
    torch.testing.assert_close(draws.effective_sample_size / 20_000, expected, rtol=0.03, atol=0)


@pytest.mark.parametrize("num", [40, 100, 400])
def test_draws_of_equal_weight_keep_the_errors_of_those_they_come_from(num):
    """400 draws of which some 330 are effective, resampled in 4,000 repetitions."""
    z = 1.5 * torch.randn(400, 4000, dtype=torch.float64)
    draws = WeightedSamples({"z": z}, log_ratio(z, torch.zeros(4000, dtype=z.dtype)))
    equal = draws.equally_weighted(num)
    assert equal.num_samples == num and equal.log_weights.std(0).max() < 1e-12
    torch.testing.assert_close(equal.log_evidence, draws.log_evidence)
    torch.testing.assert_close(equal.log_evidence_error, draws.log_evidence_error)
    assert torch.equal(equal.pareto_k, draws.pareto_k)
    variance = equal.mean("z").var()
    # Known to sqrt(2 / 4000) = 2.2%. Systematic resampling adds less than the sizes count: 0.98, 0.95, 0.91 expected.
    assert 0.83 < float(variance * equal.effective_sample_size.mean()) < 1.07
    again = equal.equally_weighted(10)
    torch.testing.assert_close(again.log_evidence_error, draws.log_evidence_error)
    assert (again.effective_sample_size < 10).all()
    alone = WeightedSamples({"z": z[:, 0]}, draws.log_weights[:, 0]).equally_weighted(num)
    assert alone.samples["z"].shape == (num,)
    torch.testing.assert_close(alone.log_evidence_error, draws.log_evidence_error[0])
    assert "effective sample size" in repr(alone)


def test_error_of_the_evidence_is_the_spread_over_repetitions():
    z = 1.5 * torch.randn(400, 500, dtype=torch.float64)  # 400 draws for each of 500 repetitions
    draws = WeightedSamples({}, log_ratio(z, torch.zeros((), dtype=z.dtype)))
    # The sd of 500 numbers is known to 1 / sqrt(1000) = 3%.
    ratio = draws.log_evidence.std() / draws.log_evidence_error.mean()
    assert 0.9 < float(ratio) < 1.1


def test_a_summary_has_a_line_for_each_element():
    draws = proposal_draws(2000)
    lines = draws.summary(prob=0.8).splitlines()
    assert lines[: len(repr(draws).splitlines())] == repr(draws).splitlines()
    head, *rows = lines[-5:]
    assert head.split() == ["mean", "sd", "10%", "50%", "90%", "draws", "moved"]
    assert [row.split()[0] for row in rows] == ["z", "v[0]", "v[1]", "v[2]"]
    expected = [draws.mean("z"), draws.std("z"), *draws.quantile("z", [0.1, 0.5, 0.9])]
    assert rows[0].split()[1:6] == [f"{float(number):.3g}" for number in expected]
    wide = (
        WeightedSamples({"w": torch.randn(10, 2, 300)}, torch.randn(10, 2)).summary().splitlines()
    )
    assert wide[-2].startswith("w[0, 99]") and wide[-1] == "w: 500 more"
    with pytest.raises(ValueError, match="between 0 and 1; got 90"):
        draws.summary(90)


def test_the_sites_of_a_loop_have_one_name():
    """Draws of a walk of 120 steps, by steps and as one tensor, have the same estimates and labels."""
    walk = torch.randn(50, 120, 2).cumsum(1)
    samples = {f"z_{t + 1}": walk[:, t] for t in range(120)} | {
        "sd": torch.ones(50),
        "b_7": walk[:, 0],
    }
    draws = WeightedSamples(samples, torch.randn(50))
    whole = WeightedSamples({"z": walk}, draws.log_weights)
    assert torch.equal(draws.mean("z"), whole.mean("z"))
    assert torch.equal(draws.quantile("z", 0.9), whole.quantile("z", 0.9))
    assert "z_1 ... z_120 (2,), sd, b_7 (2,)" in repr(draws)
    lines = draws.summary(elements=3).splitlines()
    assert [line.split()[0] for line in lines[-7:-1]] == [
        "sd",
        "b_7[0]",
        "b_7[1]",
        "z_1[0]",
        "z_1[1]",
        "z_2[0]",
    ]
    assert lines[-1] == "z: 237 more"
    assert lines[-7].split()[-1] == "0.00"  # a constant has not moved
    assert Posterior.of(draws, None)["z"].shape == (50, 120, 2)
    assert set(Posterior.of(draws, None).marginal("z", "sd").samples) == samples.keys() - {"b_7"}


def test_quantiles_equal_numpys():
    draws = proposal_draws(501, (2,))
    for smoothed in (True, False):
        log_weights = draws.smoothed_log_weights if smoothed else draws.log_weights
        weights = log_weights.softmax(0)[..., None].expand(501, 2, 3).numpy()
        for q in (0.0, 0.03, 0.5, 0.97, 1.0):
            v = draws.samples["v"].numpy()
            expected = np.quantile(v, q, axis=0, weights=weights, method="inverted_cdf")
            np.testing.assert_array_equal(
                draws.quantile("v", q, smoothed=smoothed).numpy(), expected
            )
    stacked = draws.quantile("z", torch.tensor([[0.1, 0.5], [0.9, 0.2]]))
    assert stacked.shape == (2, 2, 2) and torch.equal(stacked[1, 0], draws.quantile("z", 0.9))


def test_equal_weights_give_plain_statistics():
    value = torch.randn(101, 4, dtype=torch.float64)
    draws = WeightedSamples({"z": value}, torch.full((101,), -4.0, dtype=torch.float64))
    torch.testing.assert_close(draws.mean("z"), value.mean(0))
    torch.testing.assert_close(draws.std("z"), value.std(0, correction=0))
    assert torch.equal(draws.quantile("z", 0.5), value.median(0).values)
    assert float(draws.effective_sample_size) == pytest.approx(101)
    assert float(draws.log_evidence_error) < 1e-12 and float(draws.log_evidence) == pytest.approx(
        -4
    )


def test_integers_and_zero_weights():
    count = torch.tensor([3, 5, 1000])
    draws = WeightedSamples({"n": count}, torch.tensor([0.0, 0.0, -math.inf]))
    assert float(draws.mean("n")) == 4.0 and float(draws.std("n")) == 1.0
    assert draws.quantile("n", [0.0, 0.5, 1.0]).tolist() == [3, 3, 5]
    assert set(draws.resample(50)["n"].tolist()) == {3, 5}
    assert WeightedSamples({}, torch.zeros(1)).log_evidence_error == math.inf


def test_resampling_repeats_each_draw_its_expected_number_of_times():
    draws = proposal_draws(200, (2,))
    torch.manual_seed(0)
    drawn = draws.resample(1000)
    assert drawn["z"].shape == (1000, 2) and drawn["v"].shape == (1000, 2, 3)
    assert torch.equal(drawn["v"][..., 1], -drawn["z"]), "sites are resampled together"
    for column in range(2):
        count = (drawn["z"][:, column] == draws.samples["z"][:, column, None]).sum(-1)
        expected = 1000 * draws.smoothed_log_weights[:, column].softmax(0)
        assert ((count - expected).abs() < 1 + 1e-9).all()
    torch.manual_seed(0)
    assert torch.equal(draws.resample(1000)["z"], drawn["z"])
    assert not torch.equal(draws.resample(1000)["z"], drawn["z"])
    one_by_one = torch.tensor([float((a == b).all()) for a, b in zip(drawn["z"][1:], drawn["z"])])
    assert one_by_one.mean() < 0.1, "repetitions lie apart"


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_to_arviz_names_plates_and_keeps_the_figures():
    arviz = pytest.importorskip("arviz")
    value = {
        "mu": torch.randn(400),
        "theta": torch.randn(400, 8),
        "row": torch.randn(400, 5, 1),
        "vector": torch.randn(400, 8, 3),
    }
    plates = {"mu": (), "theta": ("schools",), "row": ("rows", None), "vector": ("schools",)}
    draws = WeightedSamples(value, 0.1 * torch.randn(400), plates)
    torch.manual_seed(0)
    result = draws.to_arviz(num=100)
    posterior = result["posterior"]
    assert posterior["mu"].dims == ("chain", "draw")
    assert posterior["theta"].dims == ("chain", "draw", "schools")
    assert posterior["row"].dims == ("chain", "draw", "rows")
    assert posterior["vector"].dims[:3] == ("chain", "draw", "schools")
    assert posterior["vector"].shape == (1, 100, 8, 3)
    torch.manual_seed(0)
    drawn = draws.resample(100)
    np.testing.assert_array_equal(posterior["theta"].values[0], drawn["theta"].numpy())
    assert posterior.attrs["pareto_k"] == pytest.approx(float(draws.pareto_k))
    assert len(arviz.summary(result, var_names=["theta"])) == 8


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_to_arviz_has_a_dim_for_data_sets():
    pytest.importorskip("arviz")
    posterior = proposal_draws(50, (2,)).to_arviz()["posterior"]
    assert posterior["v"].dims == ("chain", "draw", "data_set", "p")
    assert len(posterior.attrs["log_evidence"]) == 2


def test_to_arviz_of_1_x_passes_groups_in_one_mapping(monkeypatch):
    calls = []

    class Group:
        attrs: dict = {}

    def from_dict(data, *, name=None, dims=None):
        calls.append((data, dims))
        return {"posterior": Group()}

    monkeypatch.setitem(sys.modules, "arviz", type(sys)("arviz"))
    monkeypatch.setattr(sys.modules["arviz"], "from_dict", from_dict, raising=False)
    result = proposal_draws(50).to_arviz()
    ((data, dims),) = calls
    assert data["posterior"]["v"].shape == (1, 50, 3) and dims == {"z": [], "v": ["p"]}
    assert "pareto_k" in result["posterior"].attrs


def test_arviz_missing_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz", None)
    with pytest.raises(ImportError, match=r"pip install pyro-nami\[arviz\]"):
        proposal_draws(50).to_arviz()


def test_repr_says_what_was_drawn_and_whether_to_trust_it():
    text = repr(proposal_draws(20_000))
    for words in (
        "20,000 draws of z, v (3,)",
        "reliable: k-hat is below 0.5.",
        "-6.9985 +- 0.0034 nats",
    ):
        assert words in text
    torch.manual_seed(0)
    bad = WeightedSamples(
        {"z": torch.randn(1000, 3)}, torch.randn(1000, 3) * torch.tensor([0.1, 0.1, 9.0])
    )
    assert "for each of 3 data sets" in repr(bad) and "above 0.7 for 1 of 3 data sets" in repr(bad)
    torch.manual_seed(0)
    slow = WeightedSamples({}, 1.4 * torch.randn(5000))
    assert 0.5 < float(slow.pareto_k) <= 0.7 and "usable" in slow.verdict
    assert "unknown: k-hat could not be estimated;" in WeightedSamples({}, torch.randn(10)).verdict


def test_what_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match=r"site 'z' .* \(5, 2\) in front.*got \(5, 3\)"):
        WeightedSamples({"z": torch.zeros(5, 3)}, torch.zeros(5, 2))
    with pytest.raises(ValueError, match="zero in 1 of 2 data sets"):
        WeightedSamples({}, torch.tensor([[0.0, -math.inf], [1.0, -math.inf]]))
    draws = proposal_draws(50)
    with pytest.raises(ValueError, match="one of the sites 'z', 'v'; got 'w'"):
        draws.mean("w")
    with pytest.raises(ValueError, match="between 0 and 1"):
        draws.quantile("z", [0.5, 1.5])
    with pytest.raises(ValueError, match="at least 1; got 0"):
        draws.resample(0)
