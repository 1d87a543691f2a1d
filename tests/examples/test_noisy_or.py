"""Worlds and measures of the noisy-OR experiments, by enumeration, brute force and counting."""

import gzip
import itertools
import math
import sys
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from scripts import ROOT

sys.path.append(str(ROOT / "examples" / "noisy_or"))

import measures  # noqa: E402
import worlds  # noqa: E402
from noisy_or_distribution import NoisyOr  # noqa: E402


def small_world(observed: int = 4, latents: int = 3) -> worlds.World:
    torch.manual_seed(1)
    return worlds.World(
        2 * torch.rand(observed, latents),
        0.3 * torch.rand(observed),
        0.1 + 0.6 * torch.rand(latents),
    )


def all_states(size: int) -> torch.Tensor:
    return torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * size)


# ---- worlds


def test_patterns_are_eight_distinct_overlapping_shapes_and_a_leak():
    world = worlds.patterns()
    drawn = world.weights.T.unflatten(-1, (8, 8)) > 0
    assert world.weights.unique().tolist() == pytest.approx([0.0, -math.log(0.2)])
    assert world.leak.unique().tolist() == pytest.approx([-math.log(0.999), -math.log(0.2)])
    assert drawn[0, :2].all() and drawn[0].sum() == 16  # the first is a bar above
    shared = drawn.flatten(1).float() @ drawn.flatten(1).float().T
    # none holds another
    assert ((shared < shared.diagonal()) | torch.eye(8, dtype=torch.bool)).all()
    assert ((shared > 0).sum(1) >= 6).all()  # each overlaps five others or more


@pytest.mark.parametrize("name", worlds.DESIGNS)
def test_designs_connect_everything_and_have_the_papers_sparsity_but_for_the_sixth(name):
    """Single worlds of a small design differ by 2.5 points (sd); the paper has one, here is the mean of 20."""
    design = worlds.DESIGNS[name]
    zeros = []
    for seed in range(20 if design.latents == 100 else 2):
        world = worlds.sparse(design, seed)
        connected = world.weights > 0
        assert connected.any(0).all() and connected.any(1).all()
        assert abs(1 - connected.float().mean() - design.dropped) < 0.02
        zeros.append(100 * (1 - worlds.draw(world, 500, seed).x.mean().item()))
    off = sum(zeros) / len(zeros) - design.sparsity
    assert 8 < off < 11 if design.sparsity == 73.6 else abs(off) < 3


def test_the_same_seed_gives_the_same_world_and_leaves_the_random_numbers_alone():
    design = worlds.DESIGNS["small, 71.8%"]
    state = torch.get_rng_state()
    assert torch.equal(worlds.sparse(design, 3).weights, worlds.sparse(design, 3).weights)
    assert not torch.equal(worlds.sparse(design, 3).weights, worlds.sparse(design, 4).weights)
    assert torch.equal(state, torch.get_rng_state())


def test_draws_have_the_probabilities_of_all_states():
    world, count = small_world(), 40_000
    z, x = all_states(3), all_states(4)
    drawn = worlds.draw(world, count, 0)
    powers = 2 ** torch.arange(6, -1, -1.0)
    found = (torch.cat([drawn.z, drawn.x], 1) @ powers).long().bincount(minlength=128) / count
    prior = dist.Bernoulli(world.prior).log_prob(z).sum(-1)
    joint = (
        (prior[:, None] + NoisyOr(world.weights, world.leak, z[:, None]).log_prob(x))
        .exp()
        .flatten()
    )
    assert joint.sum() == pytest.approx(1.0, abs=1e-5)
    assert ((found - joint).abs() < 5 * (joint / count).sqrt() + 1e-4).all()


def test_fewer_points_are_the_first_of_more_and_held_out_ones_are_others():
    world = worlds.patterns()
    many, few, other = (
        worlds.split(world, n, seed, 50) for n, seed in ((1000, 0), (20, 0), (20, 1))
    )
    assert torch.equal(few.train.x, many.train.x[:20]) and torch.equal(
        few.train.z, many.train.z[:20]
    )
    assert not torch.equal(few.train.z, other.train.z)
    assert torch.equal(few.test.x, other.test.x) and torch.equal(few.valid.x, other.valid.x)
    assert not torch.equal(few.test.x, few.valid.x)


@pytest.mark.parametrize(
    ("word", "seen", "expected"),
    [
        ("networks", {"network": 3}, "network"),
        ("bayes", {}, "bayes"),  # what is left has to be a word
        ("process", {"proces": 9}, "process"),
        ("rates", {"rat": 2, "rate": 8}, "rate"),
        ("policies", {"policy": 1}, "policy"),
        ("classes", {"class": 1}, "class"),
        ("coding", {"code": 1}, "code"),
        ("programming", {"program": 1}, "program"),
        ("constrained", {"constrain": 1}, "constrain"),
        ("embeddings", {"embedding": 2, "embed": 1}, "embed"),
        ("string", {"str": 0}, "string"),
        ("red", {"r": 5}, "red"),
    ],
)
def test_a_word_loses_an_ending_where_what_is_left_is_seen(word, seen, expected):
    assert worlds.lemma(word, seen) == expected


def write_titles(folder: Path, titles: list[str], packed: bool) -> None:
    text = "year,title\n" + "".join(f'2000,"{title}"\n' for title in titles)
    name = folder / f"nips_titles.csv{'.gz' if packed else ''}"
    name.write_bytes(gzip.compress(text.encode()) if packed else text.encode())


@pytest.mark.parametrize("packed", [False, True])
def test_titles_lose_stop_words_rare_ones_and_the_five_commonest(tmp_path, packed):
    common = ["On the Alpha, Beta; gamma-delta epsilon"] * 9
    write_titles(
        tmp_path,
        [*common, *["Kernels with a Graph"] * 3, *["The kernel"] * 2, *["Graph"] * 4, "A"],
        packed,
    )
    found = worlds.titles(tmp_path)
    assert found.words == ["graph", "kernel"]
    expected = [[0, 0]] * 9 + [[1, 1]] * 3 + [[0, 1]] * 2 + [[1, 0]] * 4 + [[0, 0]]
    assert found.x.tolist() == expected


def test_a_folder_without_titles_is_told(tmp_path):
    with pytest.raises(ValueError, match="none there"):
        worlds.titles(tmp_path)
    (tmp_path / "nips_titles.csv").write_text("year,name\n1,x\n")
    with pytest.raises(ValueError, match="column 'title'"):
        worlds.titles(tmp_path)


# ---- measures


def test_exact_evidences_of_all_data_sum_to_one_and_the_joint_is_that_of_the_model():
    world, x = small_world(), all_states(4)
    posterior = measures.exact(world, x)
    assert posterior.log_evidence.exp().sum() == pytest.approx(1.0, abs=1e-5)

    def model():
        z = pyro.sample("z", dist.Bernoulli(world.prior).to_event(1))
        pyro.sample("x", NoisyOr(world.weights, world.leak, z))

    for (i, z), (j, value) in itertools.product(enumerate(posterior.states), enumerate(x)):
        joint = (
            poutine.trace(poutine.condition(model, {"z": z, "x": value})).get_trace().log_prob_sum()
        )
        assert posterior.log_joint[j, i] == pytest.approx(joint.item(), abs=1e-4)


def test_draws_of_the_exact_posterior_have_its_frequencies():
    world = small_world()
    posterior = measures.exact(world, torch.tensor([[1.0, 0.0, 1.0, 1.0]]).expand(20_000, -1))
    expected = posterior.log_joint[0].softmax(-1) @ posterior.states
    assert (
        (posterior.draw().mean(0) - expected).abs()
        < 4.5 * (expected * (1 - expected) / 20_000).sqrt()
    ).all()


def test_the_elbo_of_independent_latents_is_the_sum_over_states():
    world, x = small_world(), all_states(4)
    posterior, logits = measures.exact(world, x), torch.randn(16, 3)
    q = dist.Bernoulli(logits=logits).to_event(1)
    expected = torch.zeros(16)
    for i, z in enumerate(posterior.states):
        log_q = q.log_prob(z)
        expected += log_q.exp() * (posterior.log_joint[:, i] - log_q)
    assert torch.allclose(measures.mean_field_elbo(posterior, logits), expected, atol=1e-5)
    # whose posterior q can be
    one = worlds.World(world.weights[:, :1], world.leak, world.prior[:1])
    posterior = measures.exact(one, x)
    logit = posterior.log_joint.diff(dim=-1)
    assert torch.allclose(
        measures.mean_field_elbo(posterior, logit), posterior.log_evidence, atol=1e-5
    )


def test_cdi_descends_on_bounds_of_the_evidence_to_the_tightest():
    """Another optimizer finds it too, as the bound is convex; the formula is that of the paper, equations 7 and 11."""
    world, x = small_world(6, 3), all_states(6)[1:]
    rounds = measures.cdi(world, x, 40)
    evidence = measures.exact(world, x).log_evidence.mean()
    assert (rounds.upper >= evidence).all() and (rounds.elbo <= evidence).all()
    assert (rounds.upper.diff() < 1e-6).all() and rounds.upper[-1] < rounds.upper[0] - 0.1
    free = torch.zeros_like(x, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [free], max_iter=400, line_search_fn="strong_wolfe", tolerance_change=1e-12
    )

    def bound() -> torch.Tensor:
        psi = free.exp()
        g = -psi * psi.log() + (psi + 1) * (psi + 1).log()
        logits = (x * psi) @ world.weights - (1 - x) @ world.weights
        fixed = (x * (psi * world.leak - g) - (1 - x) * world.leak).sum(-1)
        return (fixed + torch.log(1 - world.prior + world.prior * logits.exp()).sum(-1)).mean()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = bound()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert rounds.upper[-1].item() == pytest.approx(bound().item(), abs=1e-3)


def test_full_steps_of_cdi_do_not_descend_on_the_patterns_and_searched_ones_end_worse_than_they_start():
    world = worlds.patterns()
    x = worlds.draw(world, 200, 1).x
    full, searched = (measures.cdi(world, x, 12, searches=searches) for searches in (False, True))
    assert (full.upper.diff() > 0).any()
    assert (searched.upper.diff() < 1e-5).all() and searched.elbo[-1] < searched.elbo[0] - 3


def test_f1_and_exact_match_are_those_of_counting():
    found, true = (torch.bernoulli(torch.full((50, 4), 0.4)) for _ in range(2))
    true[:, 3] = found[:, 3] = 0.0
    scores = []
    for k in range(4):
        pairs = list(zip(found[:, k].tolist(), true[:, k].tolist()))
        hits, extra, missed = (pairs.count(pair) for pair in ((1, 1), (1, 0), (0, 1)))
        scores.append(2 * hits / (2 * hits + extra + missed) if hits else 0.0)
    assert measures.macro_f1(found, true) == pytest.approx(100 * sum(scores) / 4, abs=1e-4)
    same = sum(a == b for a, b in zip(found.tolist(), true.tolist()))
    assert same > 0 and measures.exact_match(found, true) == pytest.approx(2 * same)


@pytest.mark.parametrize("latents", [4, 6])
def test_patterns_are_matched_as_by_trying_all_matchings(latents):
    torch.manual_seed(latents)
    found, true = torch.rand(5, latents), torch.rand(5, 4)
    cosines = torch.tensor(
        [[torch.cosine_similarity(a, b, dim=0) for b in found.T] for a in true.T]
    )
    best = max(
        itertools.permutations(range(latents), 4),
        key=lambda places: cosines[range(4), places].sum(),
    )
    values, places = measures.matched_cosines(found, true)
    assert places == list(best) and torch.allclose(values, cosines[range(4), best])


def test_pmi_is_that_of_counting_and_zero_for_words_that_are_independent():
    x = torch.bernoulli(torch.full((60, 5), 0.3))
    values = []
    for i, j in itertools.combinations((0, 2, 3), 2):
        both = sum(row[i] * row[j] for row in x.tolist())
        values.append(math.log((both + 1) / (x[:, i].sum().item() * x[:, j].sum().item() / 60 + 1)))
    assert measures.pmi(x, [0, 2, 3]) == pytest.approx(sum(values) / 3)
    assert measures.pmi(all_states(3), [0, 1, 2]) == pytest.approx(0.0)
