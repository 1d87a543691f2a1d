"""Time series by `fit`: the Nile's flow with forecasts, and with two regimes; coal-mining disasters by year.

Each model is a plain loop over years. The guide reads it as a chain: states that are Normal given the scales are
exact (a Kalman smoother), those of counts are Normal about their posterior, corrected by weights, and regimes are
summed over (a hidden Markov model). Forecasts are the model's own, at draws of the last state. Run with::

    python examples/series.py [--smoke] [--seed 0] [--out out/series]

Data: the Nile at Aswan, 1871 to 1970, in 10^8 cubic meters (Cobb 1978); British coal-mining disasters, 1851 to 1961
(Jarrett 1979).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from study import pyplot
from torch import Tensor

from pyro_nami import fit
from pyro_nami.fit.posterior import Posterior

NILE_FROM, DISASTERS_FROM = 1871, 1851
NILE = """
1120 1160 963 1210 1160 1160 813 1230 1370 1140 995 935 1110 994 1020 960 1180 799 958 1140 1100 1210 1150 1250 1260
1220 1030 1100 774 840 874 694 940 833 701 916 692 1020 1050 969 831 726 456 824 702 1120 1100 832 764 821 768 845 864
862 698 845 744 796 1040 759 781 865 845 944 984 897 822 1010 771 676 649 846 812 742 801 1040 860 874 848 890 744 749
838 1050 918 986 797 923 975 815 1020 906 901 1170 912 746 919 718 714 740
"""
DISASTERS = """
4 5 4 0 1 4 3 4 0 6 3 3 4 0 2 6 3 3 5 4 5 3 1 4 4 1 5 5 3 4 2 5 2 2 3 4 2 1 3 2 2 1 1 1 1 3 0 0 1 0 1 1 0 0 3 1 0 3 2 2
0 1 1 1 0 1 0 1 0 0 0 2 1 0 0 0 1 1 0 2 3 3 1 1 2 1 1 1 1 2 4 2 0 0 1 4 0 0 0 1 0 0 0 0 0 1 0 0 1 0 1
"""
AHEAD = 10  # years of forecasts


def numbers(text: str) -> Tensor:
    return torch.tensor([float(number) for number in text.split()])


def flow(y: Tensor, years: int) -> None:
    """A level that moves from year to year, and a flow about it; flows ``(T,)`` in hundreds, forecasts beyond."""
    move = pyro.sample("move", dist.HalfNormal(1.0))
    noise = pyro.sample("noise", dist.HalfNormal(2.0))
    level = pyro.sample("start", dist.Normal(10.0, 5.0))
    for t in range(years):
        level = pyro.sample(f"level_{t}", dist.Normal(level, move))
        pyro.sample(f"flow_{t}", dist.Normal(level, noise), obs=y[t] if t < len(y) else None)


def regimes(y: Tensor) -> None:
    """Two regimes, one wetter than the other, that mostly stay; flows ``(T,)`` in hundreds."""
    dry = pyro.sample("dry", dist.Normal(8.0, 2.0))
    more = pyro.sample("more", dist.HalfNormal(4.0))
    noise = pyro.sample("noise", dist.HalfNormal(2.0))
    stay = pyro.sample("stay", dist.Beta(20.0, 1.0))
    wet = torch.tensor(1.0)
    for t in range(len(y)):
        wet = pyro.sample(f"wet_{t}", dist.Bernoulli(wet * stay + (1 - wet) * (1 - stay)))
        pyro.sample(f"flow_{t}", dist.Normal(dry + more * wet, noise), obs=y[t])


def disasters(y: Tensor) -> None:
    """A rate whose logarithm moves from year to year; counts ``(T,)``."""
    move = pyro.sample("move", dist.HalfNormal(0.5))
    rate = pyro.sample("start", dist.Normal(0.0, 2.0))
    for t in range(len(y)):
        rate = pyro.sample(f"rate_{t}", dist.Normal(rate, move))
        pyro.sample(f"count_{t}", dist.Poisson(rate.exp()), obs=y[t])


def band(draws: Tensor) -> Tensor:
    """Returns the median and the ends of a central 90% interval of draws ``(draws, T)``, ``(3, T)``."""
    return draws.quantile(torch.tensor([0.5, 0.05, 0.95]), 0)


def states(posterior: Posterior, stem: str, count: int) -> Tensor:
    """Returns draws of the states of a loop, ``(draws, T)``."""
    return torch.stack([posterior[f"{stem}_{t}"] for t in range(count)], -1)


def show(name: str, posterior: Posterior, sites: tuple[str, ...]) -> None:
    """Prints the verdict, and a line for each of some sites."""
    print(f"\n{name}: {posterior.verdict}")
    for site in sites:
        draws = posterior[site]
        print(f"  {site:6} {float(draws.mean()):8.3f} +- {float(draws.std()):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--smoke", action="store_true", help="the first years only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/series"))
    args = parser.parse_args()
    nile, coal = numbers(NILE) / 100, numbers(DISASTERS)
    if args.smoke:
        nile, coal = nile[:36], coal[:12]
    count = len(nile)

    level = fit(flow, nile, count, seed=args.seed)
    show("The Nile, a moving level", level, ("move", "noise"))
    print(level.guide.inverse)
    ahead = level.predict(nile, count + AHEAD)
    forecasts = torch.stack([ahead[f"flow_{t}"] for t in range(count, count + AHEAD)], -1)
    low, high = forecasts[:, -1].quantile(torch.tensor([0.05, 0.95])).tolist()
    print(f"  in {AHEAD} years 90% of flows between {low:.1f} and {high:.1f}")

    two = fit(regimes, nile, seed=args.seed)
    show("The Nile, two regimes", two, ("dry", "more", "noise", "stay"))
    wet = states(two, "wet", count).mean(0)
    falls = (wet[:-1] > 0.5) & (wet[1:] <= 0.5)
    for t in falls.nonzero().flatten().tolist():
        print(f"  dry from {NILE_FROM + t + 1} on")

    rates = fit(disasters, coal, seed=args.seed)
    show("Coal-mining disasters, a moving rate", rates, ("move",))
    smooth = states(rates, "rate", len(coal)).exp()
    first, last = smooth[:, 0].mean(), smooth[:, -1].mean()
    print(f"  {first:.1f} a year in {DISASTERS_FROM}, {last:.1f} at the end")

    args.out.mkdir(parents=True, exist_ok=True)
    figure, (above, below, beneath) = pyplot().subplots(3, 1, figsize=(8, 9), layout="constrained")
    years = torch.arange(count + AHEAD) + NILE_FROM
    whole = torch.cat((band(states(level, "level", count)), band(forecasts)), -1)
    above.plot(years[:count], nile, "k.", label="flow")
    above.plot(years, whole[0], label="level, then forecast")
    above.fill_between(years, whole[1], whole[2], alpha=0.3)
    above.set_title("The Nile at Aswan, 10^10 cubic meters a year")
    above.legend()
    below.plot(years[:count], wet)
    below.set_title("Probability of the wetter regime")
    times = torch.arange(len(coal)) + DISASTERS_FROM
    middle, bottom, top = band(smooth)
    beneath.plot(times, coal, "k.", label="count")
    beneath.plot(times, middle, label="rate")
    beneath.fill_between(times, bottom, top, alpha=0.3)
    beneath.set_title("Coal-mining disasters a year")
    beneath.legend()
    figure.savefig(args.out / "series.png", dpi=120)
    print(f"\nPicture: {args.out / 'series.png'}")


if __name__ == "__main__":
    main()
