"""The noisy-OR scripts run and write their claims and figures; guides are trained and judged as they say."""

import json
import sys

import pyro
import pyro.distributions as dist
import pytest
import torch
from scripts import ROOT, run

pytest.importorskip("matplotlib")

sys.path.append(str(ROOT / "examples" / "noisy_or"))

import logistic  # noqa: E402
import measures  # noqa: E402
import systems  # noqa: E402
import worlds  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture
def finished(tmp_path):
    """Runs a script that must succeed, and returns what it printed and the numbers that it wrote."""

    def finished(name, *arguments):
        done = run(f"examples/noisy_or/{name}.py", "--smoke", "--out", str(tmp_path), *arguments)
        assert done.code == 0, done.errors[-2000:]
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
        results = json.loads((tmp_path / f"{name}.json").read_text())
        assert all(
            {"claim", "paper", "ours", "holds"} <= claim.keys() for claim in results["claims"]
        )
        assert all(claim["holds"] or claim["why"] for claim in results["claims"])
        return done.printed, results

    return finished


def test_inference_compares_systems_with_the_exact_posterior_and_cdi(finished):
    printed, results = finished("inference")
    assert [row["system"] for row in results["rows"]] == list(systems.SYSTEMS)
    floor = results["exact"]["negative ELBO"]
    assert all(run["negative ELBO"] > floor - 0.1 for row in results["rows"] for run in row["runs"])
    assert results["claims"][-1]["holds"]  # a tighter bound has a worse ELBO: no training in it
    assert "96.6 / 24.6 / 39.0" in printed


def test_learning_matches_patterns_and_has_the_exact_evidence(finished):
    _, results = finished("learning")
    for row in results["rows"]:
        (found,) = row["runs"]
        assert len(found["cosines"]) == 8 and torch.tensor(found["images"]).shape == (9, 64)
        assert found["negative ELBO"] > found["negative log evidence"] - 0.1
        assert found["negative log evidence"] > results["negative log evidence of the true model"]


def test_sparse_worlds_are_compared_by_points(finished):
    printed, results = finished("sparse")
    assert "small, 94.2%: ACP" in printed and len(results["sparsities"]) == 6


def test_topics_have_words_of_the_titles_and_are_ordered_by_pmi(finished, tmp_path):
    generator = torch.Generator().manual_seed(0)
    words = [
        f"{a}{b}"
        for a in ("kon", "lum", "mar", "nit", "pol", "rad")
        for b in ("ba", "do", "fi", "gu", "ke")
    ]
    titles = [
        " ".join(words[i] for i in torch.randint(30, (6,), generator=generator).tolist())
        for _ in range(150)
    ]
    (tmp_path / "nips_titles.csv").write_text(
        "\n".join(["year,title", *(f"2000,{title}" for title in titles)])
    )
    printed, results = finished("topics", "--data", str(tmp_path), "--search", "2")
    assert "150 titles, 25 words" in printed
    (found,) = results["rows"][0]["runs"]
    assert len(found["words"]) == 20 and set(found["words"][0]) <= set(words)
    assert found["setting"] in (0, 1)
    assert found["PMI"] == sorted(found["PMI"], reverse=True)


def test_topics_without_titles_are_told(tmp_path):
    done = run("examples/noisy_or/topics.py", "--smoke", "--data", str(tmp_path / "absent"))
    assert done.code == 1 and "none there" in done.errors and "Traceback" not in done.errors


def test_logistic_compares_guides_with_the_exact_evidence(finished):
    _, results = finished("logistic")
    assert len(results["rows"]) == len(logistic.MODELS) * len(logistic.SYSTEMS)
    for row in results["rows"]:
        (found,) = row["runs"]
        assert found["gap"] > -5 * found["error of the gap"]
        rule = row["system"] in ("bound and correction", "bound", "Newton")
        assert (found["gap"] < 1) == rule  # after 3 steps only what the model's form gives is near


def test_evidence_of_logistic_models_is_that_of_draws_and_of_all_data_is_one():
    weights, bias = 2 * torch.randn(3, 2), torch.randn(3)
    x = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 3)
    found = logistic.log_evidence(weights, bias, x).exp()
    torch.testing.assert_close(found.sum(), torch.tensor(1.0).double(), rtol=1e-8, atol=0)
    ones = torch.sigmoid(torch.randn(100_000, 2) @ weights.T + bias)
    draws = torch.where(x[:, None] == 1, ones, 1 - ones).prod(-1)
    assert ((draws.mean(1) - found).abs() < 4.5 * draws.std(1) / 100_000**0.5).all()


def test_the_loss_is_that_of_the_sum_over_states_in_any_parts():
    world = worlds.patterns()
    x = worlds.draw(world, 40, 0).x
    slopes = 0.3 * torch.randn(64, 8)

    def guide(x: torch.Tensor) -> None:
        with pyro.plate("points", len(x)):
            pyro.sample("z", dist.Bernoulli(logits=x @ slopes).to_event(1))

    posterior = measures.exact(world, x)
    expected = -measures.mean_field_elbo(posterior, x @ slopes)
    model = systems.NoisyOrModel(world)
    for limit in (2e7, 1e5):
        found = torch.tensor(
            [systems.negative_elbo(model, guide, x, limit=limit) for _ in range(20)]
        )
        assert abs(found.mean() - expected.mean()) < 4.5 * found.std() / 20**0.5
        assert found.std() > 0


def test_settings_of_the_search_are_in_their_ranges_and_differ():
    found = [systems.setting(i) for i in range(100)]
    assert found == [systems.setting(i) for i in range(100)]
    assert {len(each.hidden) for each in found} == {1, 2}
    assert {each.hidden[0] for each in found} == {16, 32, 64, 128, 256}
    assert all(10**-2.5 <= each.rate <= 0.1 and 0.2 <= each.cooled <= 1 for each in found)
    assert len({each.rate for each in found}) == 100


@pytest.mark.parametrize("learns", [(), ("weights",), ("weights", "prior")])
def test_a_model_learns_what_it_is_told_to(learns):
    world = worlds.patterns()
    model = systems.NoisyOrModel(world, learns)
    before = [part.clone() for part in model.world]
    assert all((part >= 0).all() for part in before)
    systems.fit(model, "AVI", worlds.draw(world, 50, 0).x, systems.Setting((16,), 0.05, 1.0), 2)
    moved = [not torch.equal(a, b) for a, b in zip(before, model.world)]
    assert moved == ["weights" in learns, "weights" in learns, "prior" in learns]
