"""Worlds of noisy-ORs: eight patterns, random sparse connections, and the words of titles.

A world is what the generative model is given: p(x_i = 0 | z) = exp(-leak_i - sum_k weights_ik z_k) with
z_k ~ Bernoulli(prior_k). Two kinds are Yan, Ailem and Sha's (2019, section 4.1), with drawings and random numbers of
our own, as theirs are not public. Where their leak is zero a wrong z has density zero; here no leak is below that of a
probability of 0.001, `FLOOR`.

How we read their Table 1: Beta(alpha_theta, beta_theta) draws are the weights themselves, not probabilities
1 - exp(-weight), and there is no leak. Of the six readings (weights or probabilities; no leak, one drawn from the same
Beta, or that one dropped as connections are) only this gives their sparsities within three points in five of the six
designs; the sixth, 73.6%, is 83% in this reading, and no reading that comes near it comes near the others.
"""

from __future__ import annotations

import csv
import gzip
import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import Beta

__all__ = [
    "DESIGNS",
    "FLOOR",
    "Design",
    "Drawn",
    "Split",
    "Titles",
    "World",
    "draw",
    "lemma",
    "patterns",
    "sparse",
    "split",
    "titles",
]

ACTIVE = -math.log(1 - 0.8)
FLOOR = -math.log(1 - 0.001)

_DRAWN = """
######## #....... ........ ........ ...##... ........ ...##... ........ ........
######## ##...... .######. ........ ...##... ........ ..####.. .......# .#....#.
........ ###..... .#....#. ........ ...##... ..####.. .##..##. ......## ........
........ ####.... .#....#. ###..... ...##... ..####.. ##....## .....### ........
........ #####... .#....#. ###..... ...##... ..####.. ##....## ....#### ........
........ ######.. .#....#. ###..... ...##... ..####.. .##..##. ...##### ........
........ ........ .######. ######## ...##... ........ ..####.. ..###### .#....#.
........ ........ ........ ######## ...##... ........ ...##... ........ ........
"""


class World(NamedTuple):
    """A noisy-OR with its parameters.

    Attributes:
        weights: ``(observed, latents)``, at least 0.
        leak: ``(observed,)``, at least 0.
        prior: ``(latents,)``, probabilities of 1.
    """

    weights: Tensor
    leak: Tensor
    prior: Tensor


class Drawn(NamedTuple):
    """Points of a world: ``z`` ``(points, latents)`` and ``x`` ``(points, observed)``, 0 or 1."""

    z: Tensor
    x: Tensor


class Design(NamedTuple):
    """A row of the paper's Table 1; ``sparsity`` is the percentage of zeros that it reports."""

    weight: tuple[float, float]
    prior: tuple[float, float]
    dropped: float
    observed: int
    latents: int
    sparsity: float


DESIGNS = {
    "small, 94.2%": Design((1, 5), (1, 10), 0.95, 50, 100, 94.2),
    "small, 71.8%": Design((2, 5), (2, 5), 0.95, 50, 100, 71.8),
    "small, 51.4%": Design((2, 5), (2, 5), 0.9, 50, 100, 51.4),
    "large, 98.4%": Design((1, 5), (1, 20), 0.995, 500, 500, 98.4),
    "large, 95.3%": Design((1, 20), (1, 20), 0.95, 500, 500, 95.3),
    "large, 73.6%": Design((1, 10), (1, 10), 0.95, 500, 500, 73.6),
}


def patterns() -> World:
    """Returns eight 8 by 8 patterns with priors 1/8, and a ninth as the leak; drawn pixels have probability 0.8."""
    rows = [row.split() for row in _DRAWN.split("\n") if row]
    pixels = torch.tensor([[[c == "#" for c in cell] for cell in row] for row in rows]).float()
    *shapes, leak = pixels.movedim(1, 0).flatten(1) * ACTIVE
    return World(torch.stack(shapes, -1), leak.clamp_min(FLOOR), torch.full((8,), 1 / 8))


def sparse(design: Design, seed: int) -> World:
    """Returns a world with random connections; a latent or an observed variable that has none is given one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shape = (design.observed, design.latents)
        weights = Beta(*map(float, design.weight)).sample(shape)
        prior = Beta(*map(float, design.prior)).sample(shape[1:])
        keep = torch.rand(shape) >= design.dropped
        for kept in (keep, keep.T):  # a transpose is a view, so both write to the same connections
            alone = (~kept.any(1)).nonzero().squeeze(-1)
            kept[alone, torch.randint(kept.shape[1], alone.shape)] = True
    return World(weights * keep, torch.full(shape[:1], FLOOR), prior)


def draw(world: World, points: int, seed: int) -> Drawn:
    """Returns points of the world; other seeds give other points."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.bernoulli(world.prior.expand(points, -1), generator=generator)
    off = torch.exp(-(z @ world.weights.T) - world.leak)
    return Drawn(z, torch.bernoulli(1 - off, generator=generator))


class Split(NamedTuple):
    """Points for training, for choosing settings, and for what is reported."""

    train: Drawn
    valid: Drawn
    test: Drawn


def split(world: World, points: int, seed: int, held_out: int = 1000) -> Split:
    """Returns ``points`` for training, which depend on the seed, and twice ``held_out`` ones, which do not.

    Fewer points for training are the first of more, up to 1,000.
    """
    first = Drawn(*(part[:points] for part in draw(world, max(1000, points), seed + 2)))
    return Split(first, draw(world, held_out, 0), draw(world, held_out, 1))


# ---- titles

_STOP = """
a about above across after again against all almost along also although always am among an and another any are aren as
at away be became because become been before behind being below better between beyond both but by can cannot could did
do does doing done down due during each either else enough et etc even ever every few first for from further get give
given go good had has have having he her here how however i if in instead into is isn it its itself just know known
last least less let like long made make many may me might more most much must my near need never new next no nor not
nothing now of off on once one only onto or other our out over own per perhaps quite rather s same see several she
should show since so some still such t than that the their them then there these they thing this those through thus to
together too toward towards two under until up upon us use used using very vs want was way we well were what when
where whether which while who whom whose why will with within without would yet you your
"""


class Titles(NamedTuple):
    """Words of titles: ``x`` ``(titles, words)``, 1 where a title has the word; and the words."""

    x: Tensor
    words: list[str]


def titles(folder: Path) -> Titles:
    """Returns which words occur in which titles, but for the five commonest and those of fewer than five titles.

    A word is a run of at least two letters, in lower case, not in a list of some 200 stop words, and replaced by its
    `lemma`. Stop words and rules are our own: the paper does not name its. Titles keep their order; one may have no
    word left.

    Args:
        folder: with ``nips_titles.csv`` or ``nips_titles.csv.gz``: a header ``year,title``, then a row each.

    Raises:
        ValueError: no such file, or one of other columns.
    """
    rows = [_words(title) for title in _read(folder)]
    seen = Counter(word for row in rows for word in row)
    rows = [[lemma(word, seen) for word in row if word not in _STOP_WORDS] for row in rows]
    counts = Counter(word for row in rows for word in set(row))
    common = {word for word, _ in counts.most_common(5)}
    words = sorted(word for word, count in counts.items() if count >= 5 and word not in common)
    place = {word: i for i, word in enumerate(words)}
    x = torch.zeros(len(rows), len(words))
    for i, row in enumerate(rows):
        x[i, [place[word] for word in row if word in place]] = 1.0
    return Titles(x, words)


def lemma(word: str, seen: Mapping[str, int]) -> str:
    """Returns the word without the ending of a plural or a verb, where what is left is in ``seen`` with three letters.

    Endings are -s, -es and -ies (left: y), and -ing and -ed, which may have replaced an e or doubled a consonant. Of
    several ways the one most seen is taken; what is left may have an ending as well (embeddings, embedding, embed).
    """
    ways = [word[: -len(ending)] + left for ending, left in _ENDINGS if word.endswith(ending)]
    ways += [way[:-1] for way in ways if way[-2:-1] == way[-1:] and word.endswith(("ing", "ed"))]
    found = [way for way in ways if len(way) >= 3 and seen.get(way, 0) and not word.endswith("ss")]
    return lemma(max(found, key=lambda way: seen[way]), seen) if found else word


_ENDINGS = (("s", ""), ("es", ""), ("ies", "y"), ("ing", ""), ("ing", "e"), ("ed", ""), ("ed", "e"))
_STOP_WORDS = frozenset(_STOP.split())


def _words(title: str) -> list[str]:
    return re.findall(r"[a-z]{2,}", title.lower())


def _read(folder: Path) -> list[str]:
    for file in (folder / "nips_titles.csv", folder / "nips_titles.csv.gz"):
        if file.exists():
            with (gzip.open if file.suffix == ".gz" else open)(
                file, "rt", encoding="utf-8", newline=""
            ) as text:
                rows = list(csv.DictReader(text))
            if not rows or "title" not in rows[0]:
                raise ValueError(
                    f"Expected a column 'title' in {file}; got {list(rows[0]) if rows else 'no rows'}."
                )
            return [row["title"] for row in rows]
    raise ValueError(
        f"Expected nips_titles.csv or nips_titles.csv.gz (columns year, title) in {folder}; none there."
    )
