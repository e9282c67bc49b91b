"""The tables and figures of docs/reproduction.md and the README, made from results/paper and results/bench.

    python docs/tables.py            write them into the documents, and the figures beside them
    python docs/tables.py --check    exit 1 if a document does not say what the results give (words, not pictures)

A table stands between `<!-- NAME SCALE -->` and `<!-- end -->`: NAME as of `growprune reproduce`, or headline, status,
bars, bases or cost.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from growprune import GrowpruneError, paper
from growprune.paper.comparison import bars_met, bases_trained, compared, done_so_far
from growprune.paper.cost import cost
from growprune.paper.grid import markdown
from growprune.paper.headline import headline
from growprune.paper.lab import Lab
from growprune.run import read_json

HERE = Path(__file__).parent
IMAGES = "imagenette"
"""What tables 3 and 4 are run on here: of ImageNet itself there is nothing."""
EXPERIMENTS = [paper.find(name, IMAGES) for name in paper.NAMES]
SECTION = re.compile(r"<!-- (\w+) (paper|short) -->\n.*?<!-- end -->", re.DOTALL)


def section(name: str, lab: Lab) -> tuple[str, dict[str, bytes]]:
    """One section's words, and its pictures by name."""
    if name == "headline":
        return markdown(headline(lab.look)), {}
    if name == "status":
        return markdown(done_so_far(lab, EXPERIMENTS)), {}
    if name == "bars":
        return markdown(bars_met(lab, EXPERIMENTS)), {}
    if name == "cost":
        bench = lab.out.parent / "bench"
        steps, loader = (read_json(bench / f"h200-{each}.json") for each in ("imagenet", "loader"))
        try:
            return markdown(cost(steps["steps"], loader["fed"]["torchvision:resnet50"])), {}
        except KeyError as error:
            raise GrowpruneError(
                f"{bench}: lacks {error} for what ImageNet costs: see benchmarks/imagenet.py"
            ) from error
    if name == "bases":
        settings = [each for name in paper.NAMES if name not in paper.OF_IMAGES for each in paper.find(name).settings()]
        return markdown(bases_trained(lab, list(dict.fromkeys(setting.base for setting in settings)))), {}
    comparison = compared(lab, paper.find(name, IMAGES))
    figures = {f"{each}-{lab.scale}": blob for each, blob in comparison.figures.items()}
    pictures = "\n".join(f"![{comparison.experiment.title}](figures/{each}.png)\n" for each in figures)
    return f"{comparison.markdown()}\n{pictures}".strip(), figures


def filled(text: str, results: Path) -> tuple[str, dict[str, bytes]]:
    """The document with every section made anew."""
    figures: dict[str, bytes] = {}

    def made(match: re.Match[str]) -> str:
        name, scale = match.groups()
        words, pictures = section(name, Lab(results, scale))  # type: ignore[arg-type]
        figures.update(pictures)
        return f"<!-- {name} {scale} -->\n\n{words}\n\n<!-- end -->"

    return SECTION.sub(made, text), figures


def main(arguments: Sequence[str] | None = None) -> None:
    try:
        write(arguments)
    except GrowpruneError as error:
        sys.exit(str(error))


def write(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 if something would change")
    parser.add_argument("--results", type=Path, default=HERE.parent / "results" / "paper")
    parser.add_argument("--document", type=Path, action="append", help="instead of those two; may be said again")
    asked = parser.parse_args(arguments)
    for document in asked.document or (HERE / "reproduction.md", HERE.parent / "README.md"):
        text = document.read_text()
        new, figures = filled(text, asked.results)
        if asked.check:
            if new != text:
                sys.exit(f"{document}: not what {asked.results} gives: run make tables")
            continue
        document.write_text(new)
        for name, blob in figures.items():
            (place := document.parent / "figures").mkdir(exist_ok=True)
            (place / f"{name}.png").write_bytes(blob)


if __name__ == "__main__":
    main()
