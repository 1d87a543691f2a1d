"""How good an approximate posterior, a found pattern or a topic is; and the exact posterior of a dozen latents."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import networkx as nx
import torch
import torch.nn.functional as F
from noisy_or_distribution import NoisyOr, NoisyOrDual
from torch import Tensor
from worlds import World

__all__ = [
    "Exact",
    "Rounds",
    "cdi",
    "exact",
    "exact_match",
    "macro_f1",
    "matched_cosines",
    "mean_field_elbo",
    "pmi",
]


class Exact(NamedTuple):
    """The exact posterior of every point, by enumeration of all states.

    Attributes:
        states: ``(states, latents)``, 0 or 1.
        log_joint: log p(x, z) in nats, ``(points, states)``.
    """

    states: Tensor
    log_joint: Tensor

    @property
    def log_evidence(self) -> Tensor:
        """log p(x) in nats, ``(points,)``."""
        return self.log_joint.logsumexp(-1)

    def draw(self) -> Tensor:
        """Returns a draw of z for every point, ``(points, latents)``."""
        return self.states[torch.multinomial(self.log_joint.softmax(-1), 1).squeeze(-1)]


class Rounds(NamedTuple):
    """What CDI has after each round.

    Attributes:
        upper: the bound on log p(x) in nats, mean over points, ``(rounds,)``.
        elbo: in nats, mean over points, ``(rounds,)``.
        logits: of q(z_k = 1 | x) after the last round, ``(points, latents)``.
    """

    upper: Tensor
    elbo: Tensor
    logits: Tensor


def exact(world: World, x: Tensor) -> Exact:
    """Returns the exact posterior of points ``(points, observed)``; it takes 2 ** latents states."""
    states = torch.tensor(list(itertools.product((0.0, 1.0), repeat=len(world.prior))))
    prior = states @ world.prior.log() + (1 - states) @ torch.log1p(-world.prior)
    rates = NoisyOr(world.weights, world.leak, states).rates
    present = torch.log(-torch.expm1(-rates))
    return Exact(states, x @ present.T - (1 - x) @ rates.T + prior)


def mean_field_elbo(posterior: Exact, logits: Tensor) -> Tensor:
    """Returns the ELBO in nats, ``(points,)``, of independent latents with ``logits`` ``(points, latents)``."""
    log_q = (
        F.logsigmoid(logits) @ posterior.states.T + F.logsigmoid(-logits) @ (1 - posterior.states).T
    )
    return (log_q.exp() * (posterior.log_joint - log_q)).sum(-1)


def cdi(
    world: World, x: Tensor, rounds: int, *, start: float = 0.5, searches: bool = True
) -> Rounds:
    """Conjugate dual inference: psi by its fixed point, round after round, at which the bound on log p(x) is tightest.

    A round sets log psi to the fixed point's given the last q, or goes the share of the way there at which the bound is
    lowest. All of the way, it may oscillate for ever: larger psi make latents likelier, and these make psi smaller. The
    way is one of descent and the bound is convex in psi, so with the search it ends at the tightest bound.

    Args:
        world: with as many latents as `exact` can take.
        x: ``(points, observed)``.
        start: of psi.
        searches: for that share, for each point; otherwise it is all of the way.
    """
    dual, posterior, psi = NoisyOrDual(), exact(world, x), torch.full_like(x, start)
    upper, elbos = [], []

    def bound(psi: Tensor) -> tuple[Tensor, Tensor]:
        constant, slope, _ = dual.coefficients(x.expand_as(psi), psi)
        evidence = slope @ world.weights
        log_mean = torch.logaddexp(torch.log1p(-world.prior), world.prior.log() + evidence).sum(-1)
        return (constant + slope * world.leak).sum(-1) + log_mean, evidence + world.prior.logit()

    shares = (
        torch.cat([torch.zeros(1), 0.5 ** torch.arange(10.0)])[:, None, None]
        if searches
        else torch.ones(1, 1, 1)
    )
    for _ in range(rounds):
        value, logits = bound(psi)
        upper.append(value.mean())
        elbos.append(mean_field_elbo(posterior, logits).mean())
        rates = NoisyOr(world.weights, world.leak, logits.sigmoid()).rates
        ways = psi ** (1 - shares) * dual.tightest(x, rates, rates.square()) ** shares
        psi = ways[bound(ways)[0].argmin(0), torch.arange(len(x))]
    return Rounds(torch.stack(upper), torch.stack(elbos), logits)


def macro_f1(found: Tensor, true: Tensor) -> float:
    """Returns the mean over latents of F1, in percent; both are ``(points, latents)``, 0 or 1."""
    return (
        100 * (2 * (found * true).sum(0) / (found.sum(0) + true.sum(0)).clamp_min(1)).mean().item()
    )


def exact_match(found: Tensor, true: Tensor) -> float:
    """Returns the percentage of points all of whose latents are right; both are ``(points, latents)``, 0 or 1."""
    return 100 * (found == true).all(-1).double().mean().item()


def matched_cosines(found: Tensor, true: Tensor) -> tuple[Tensor, list[int]]:
    """Returns the cosine of each true pattern to the found one that it is matched with, and which one that is.

    Each found pattern serves one true one; of all such matchings it is that with the largest sum of cosines.

    Args:
        found: ``(observed, latents)``, a pattern a column.
        true: ``(observed, patterns)``, at most as many patterns as latents.
    """
    cosines = F.normalize(true, dim=0).T @ F.normalize(found, dim=0)
    graph = nx.Graph()
    for (i, j), value in zip(
        itertools.product(*map(range, cosines.shape)), cosines.flatten().tolist()
    ):
        graph.add_edge(("true", i), ("found", j), weight=2.0 + value)
    pairs = dict(
        sorted(pair, reverse=True) for pair in nx.max_weight_matching(graph, maxcardinality=True)
    )
    places = [pairs["true", i][1] for i in range(len(cosines))]
    return cosines[range(len(cosines)), places], places


def pmi(x: Tensor, words: Sequence[int]) -> float:
    """Returns the mean pointwise mutual information, in nats, of all pairs of words in rows ``x`` ``(rows, words)``.

    For a pair it is log (c + 1) / (e + 1), c rows with both words and e as many as would be if they were independent.
    The ones keep it finite where no row has both, and near 0 where none is to be expected to.
    """
    chosen = x[:, list(words)].double()
    count = chosen.sum(0)
    together, expected = chosen.T @ chosen, count[:, None] * count / len(x)
    values = torch.log((together + 1) / (expected + 1))
    return values[tuple(torch.triu_indices(len(words), len(words), 1))].mean().item()
