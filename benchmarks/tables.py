"""Rewrites the tables of README.md and benchmarks/README.md from `results/*.json`, so every figure is one of theirs.

A line ``<!-- table: NAME -->`` on a page stands before a table, and an empty line after it; NAME is a function of
a `tables_of_*.py` beside this file. Run with::

    python benchmarks/tables.py [--smoke]

``--smoke`` writes nothing; it exits with 1 if a table on a page is not that of the results.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import tables_of_costs
import tables_of_fits
import tables_of_simulations

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "benchmarks/README.md")
TABLES = {**tables_of_fits.TABLES, **tables_of_simulations.TABLES, **tables_of_costs.TABLES}
MARKED = re.compile(r"(<!-- table: (\w+) -->\n)(?:\|.*\n)*")


def markdown(lines: list[str]) -> str:
    """Returns a table in Markdown from lines of cells divided by ``|``; the first is the header."""
    rule = " | ".join("---" for _ in lines[0].split(" | "))
    return "\n".join(f"| {line} |" for line in (lines[0], rule, *lines[1:]))


def with_tables(text: str) -> str:
    """Returns a page with each marked table made anew."""

    def table(match: re.Match[str]) -> str:
        return f"{match[1]}{markdown(TABLES[match[2]]())}\n"

    return MARKED.sub(table, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="compare only")
    smoke = parser.parse_args().smoke
    outdated = []
    for name in PAGES:
        page = ROOT / name
        text = page.read_text()
        made = with_tables(text)
        if made != text:
            outdated.append(name)
            if not smoke:
                page.write_text(made)
    if smoke:
        print(
            f"Outdated: {', '.join(outdated)}; run benchmarks/tables.py"
            if outdated
            else "All tables are current"
        )
        return int(bool(outdated))
    print(f"Rewritten: {', '.join(outdated) or 'nothing, all tables are current'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
