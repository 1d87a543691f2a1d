"""Topics of NeurIPS titles: which words a latent brings about, and how far these belong together.

Yan, Ailem and Sha 2019, section 4.5 and Tables 3 and 4: a title is the set of its words, a latent with its prior is a
topic, K = 20, with 5,241 and 2,000 titles to learn from, 1,000 for choosing settings and 1,000 to test. Weights, leak
and prior are learned. A topic's ten words are those of largest weight; its PMI is the mean over their pairs, from
co-occurrence in all titles themselves (`measures.pmi`): the paper counts words in Wikipedia, which is not at hand, so
that its 2.78 and 2.49 cannot be compared with the figures here. Weights start at the words' frequencies, with noise;
settings are searched for with the fewer titles. For comparison: the loss of words that come independently.

Titles are not shipped: ``--data`` is a folder with ``nips_titles.csv.gz`` (columns year and title, as in the file
papers.csv of Kaggle's benhamner/nips-papers). Stop words and the rules by which words lose their endings are our own
(`worlds.titles`): 1,259 words and 4.8 words a title; the paper has 1,216 and 4.5. Run with::

    python examples/noisy_or/topics.py --data FOLDER [--smoke] [--search 10] [--only SETTING] [--seeds 5]
        [--jobs 2] [--device cpu]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from measures import pmi
from search import (
    Cell,
    Options,
    Run,
    mean_and_error,
    parse_options,
    print_table,
    pyplot,
    searched,
    shown,
    write_results,
)
from systems import LEARNED, NoisyOrModel, fit, negative_elbo, setting
from torch import Tensor
from worlds import FLOOR, Titles, World, titles

NAME = "topics"
STEPS = 3000
TOPICS, WORDS, HELD_OUT = 20, 10, 1000
PAPER = {("ACP", 5241): 2.78, ("AVI", 5241): 2.49, ("ACP", 2000): 2.75, ("AVI", 2000): 2.55}


def read(options: Options) -> Titles:
    """Returns the titles, shuffled by a fixed seed; in a smoke run the first 300 and their commonest words."""
    found = titles(options.extra["data"])
    order = torch.randperm(len(found.x), generator=torch.Generator().manual_seed(0))
    if options.setting != "smoke":
        return Titles(found.x[order], found.words)
    common = found.x.sum(0).argsort(descending=True)[:50].sort().values.tolist()
    return Titles(found.x[order[:300]][:, common], [found.words[i] for i in common])


def parts(x: Tensor, points: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns titles for training, for choosing settings, and to test."""
    held_out = min(HELD_OUT, len(x) // 4)
    return x[2 * held_out :][:points], x[:held_out], x[held_out : 2 * held_out]


def run_cell(cell: Cell, run: Run) -> dict[str, Any]:
    """Learns topics and a guide; a seed is a start, and titles are the same for all."""
    data, device = read(run.options), run.options.device
    train, valid, test = parts(data.x, cell["points"])
    words = train.shape[1]
    start = World(
        torch.zeros(words, TOPICS), torch.full((words,), FLOOR), torch.full((TOPICS,), 1 / TOPICS)
    )
    model = NoisyOrModel(start, learns=("weights", "prior")).to(device)
    model.start_at(train.to(device))
    chosen = setting(cell["setting"])
    guide = fit(
        model, cell["system"], train.to(device), chosen, run.options.extra["steps"], run.tell
    )
    if cell["search"]:
        return {"valid": negative_elbo(model, guide, valid.to(device))}
    learned = World(*(part.detach().cpu() for part in model.world))
    top = learned.weights.topk(WORDS, 0).indices.T.tolist()
    values = [pmi(data.x, chosen_words) for chosen_words in top]
    order = sorted(range(TOPICS), key=lambda k: -values[k])
    return {
        "negative ELBO": negative_elbo(model, guide, test.to(device)),
        "PMI": [values[k] for k in order],
        "words": [[data.words[i] for i in top[k]] for k in order],
        "prior": [round(learned.prior[k].item(), 4) for k in order],
    }


# ---- the report


def mean_pmi(row: dict[str, Any]) -> list[float]:
    return [sum(run["PMI"]) / TOPICS for run in row["runs"]]


def claims(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns what is claimed, beside what was found."""
    found = {(row["system"], row["points"]): row for row in rows}
    results = []
    for points in sorted({row["points"] for row in rows}, reverse=True):
        pairs = [found[system, points] for system in ("ACP", "AVI")]
        for name, measure in (
            ("mean PMI of topics", mean_pmi),
            ("loss on other titles", lambda row: [-run["negative ELBO"] for run in row["runs"]]),
        ):
            gain, error = mean_and_error([a - b for a, b in zip(*map(measure, pairs))])
            results.append(
                {
                    "claim": f"ACP has a better {name} than AVI at {points} titles",
                    "paper": f"PMI {PAPER.get(('ACP', points))} and {PAPER.get(('AVI', points))}, by Wikipedia"
                    if measure is mean_pmi
                    else "not in the paper",
                    "ours": {"gain": gain, "its error": error},
                    "holds": gain > 0,
                    "why": ""
                    if gain > 0
                    else f"{gain:.3f} nats" + (f" +- {error:.3f}" if error is not None else ""),
                }
            )
    return results


def report(rows: list[dict[str, Any]]) -> None:
    """Prints losses and PMI, and the words of the four topics of largest PMI of each system, at seed 0."""
    table = [
        [
            row["system"],
            row["points"],
            shown([run["negative ELBO"] for run in row["runs"]]),
            shown(mean_pmi(row)),
        ]
        for row in rows
    ]
    print_table(["", "titles", "negative ELBO", "mean PMI"], table)
    for row in rows:
        first = row["runs"][0]
        print(f"\n{row['system']}, {row['points']} titles")
        for value, words in list(zip(first["PMI"], first["words"]))[:4]:
            print(f"  {value:5.2f}  {' '.join(words)}")


def draw(file: Path, rows: list[dict[str, Any]]) -> None:
    """Draws the PMI of all topics, from the best to the last, and the losses."""
    plt = pyplot()
    sizes = sorted({row["points"] for row in rows}, reverse=True)
    figure, axes = plt.subplots(
        1, len(sizes) + 1, figsize=(4 * len(sizes) + 4, 3.6), layout="constrained"
    )
    colors = dict(zip(LEARNED, ("tab:blue", "tab:orange", "tab:green", "tab:red")))
    for axis, points in zip(axes, sizes):
        for row in (row for row in rows if row["points"] == points):
            curve = torch.tensor([run["PMI"] for run in row["runs"]]).mean(0).tolist()
            axis.plot(
                range(1, TOPICS + 1),
                curve,
                marker="o",
                ms=3,
                label=row["system"],
                color=colors[row["system"]],
            )
        axis.set(
            title=f"{points} titles", xlabel="topic, by its PMI", ylabel="PMI of ten words, nats"
        )
    axes[0].legend(frameon=False, fontsize=8)
    for place, row in enumerate(rows):
        mean, error = mean_and_error([run["negative ELBO"] for run in row["runs"]])
        axes[-1].errorbar(
            [place], [mean], [error or 0.0], marker="o", capsize=3, color=colors[row["system"]]
        )
    axes[-1].set_xticks(
        range(len(rows)),
        [f"{row['system']}, {row['points']}" for row in rows],
        rotation=60,
        ha="right",
    )
    axes[-1].set_ylabel("negative ELBO, nats a title")
    figure.savefig(file, dpi=130)
    plt.close(figure)


def add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with nips_titles.csv or nips_titles.csv.gz"
    )
    parser.add_argument("--only", type=int, help="number of a setting, in place of the search")


def main() -> None:
    """Learns with all systems, then prints tables and words, and writes numbers and figure."""
    options = parse_options(__doc__, STEPS, add_data)
    try:
        data = read(options)
    except ValueError as error:
        sys.exit(str(error))
    print(
        f"{len(data.x)} titles, {len(data.words)} words, {data.x.sum(1).mean():.2f} words a title"
    )
    sizes = options.choose((150,), (5241, 2000), (5241, 2000))
    conditions = [{"system": system, "points": points} for points in sizes for system in LEARNED]
    settings = {"words": len(data.words)}
    found = searched(
        NAME, run_cell, conditions, settings, options, at=lambda c: {**c, "points": min(sizes)}
    )
    rows = [{**condition, "runs": runs} for condition, runs in zip(conditions, found)]
    train, _, test = parts(data.x, max(sizes))
    rate = train.mean(0).clamp(1 / (2 * len(train)), 1 - 1e-6)
    apart = -(test @ (rate.log() - torch.log1p(-rate)) + torch.log1p(-rate).sum()).mean().item()
    report(rows)
    print(f"\nwords by themselves: {apart:.2f}\n")
    extra = {name: options.extra.get(name) for name in ("steps", "search", "only")}
    payload = {
        "settings": extra,
        "words": len(data.words),
        "independent words": apart,
        "rows": rows,
        "claims": claims(rows),
    }
    draw(write_results(NAME, payload, options), rows)


if __name__ == "__main__":
    main()
