"""The command line: `growprune demo`, `growprune measure`.

Commands say what they do here and import what they need when called: torch takes seconds to load, `--help` must not.
Results go to stdout, progress to stderr. An error that a user can cause is one line on stderr and exit code 2.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from growprune.errors import GrowpruneError

REFUSED: type[Exception] = typer.BadParameter.__mro__[2]
"""ClickException, the parent of every usage error; typer keeps its own copy of click out of sight."""

app = typer.Typer(
    name="growprune",
    help="Prune PyTorch networks by growing regularization (GReg-1 and GReg-2, ICLR 2021).",
    add_completion=False,
    rich_markup_mode=None,  # plain help: the styled one takes as long again to load
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of a table.")]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The entry point: runs a command, turns what a user can cause into one line, exits."""
    command = typer.main.get_command(app)
    try:
        code = command.main(arguments, prog_name="growprune", standalone_mode=False)
    except REFUSED as error:
        fail(usage(error))
    except GrowpruneError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (typer.Abort, KeyboardInterrupt):
        code = 130
    if code == 130:
        print("growprune: interrupted", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


def usage(error: Any) -> str:
    """What is wrong with the command line, the nearest name where one is near, and where to look."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "growprune"
    message = str(error.format_message()).strip().rstrip(".")
    return f"{message} ({command} --help lists what there is)"


def fail(message: str) -> NoReturn:
    print(f"growprune: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def show_version(wanted: bool) -> None:
    if wanted:
        from growprune import __version__

        print(f"growprune {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def top(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=show_version, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the results; a new one, or that of the same demo.")] = Path(
        "demo"
    ),
    seed: Annotated[int, typer.Option(min=0, help="Decides the first weights and the order of the images.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    ratio: Annotated[float, typer.Option(help="The share of each layer's filters that go.")] = 0.9,
    scope: Annotated[
        Literal["path", "filter"],
        typer.Option(help="What the penalty touches: a filter's whole path, or its weights alone (the paper)."),
    ] = "path",
    longer: Annotated[
        bool, typer.Option("--longer", help="Also prune in one shot with as many steps as GReg-1 has in all.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train, prune, fine-tune and compare: no download, no GPU.

    A small residual network learns scikit-learn's handwritten digits; GReg-1 and one-shot pruning then take the same
    filters from it, in about a minute. The folder gets the figures, report.html, result.json and the smaller network.
    """
    from growprune.demo import DemoConfig, run
    from growprune.report import table

    result = run(DemoConfig(seed=seed, device=device, ratio=ratio, scope=scope, longer=longer), out)
    if as_json:
        print(json.dumps(result, indent=2))
        return
    show(table(result))
    print(f"Report: {out / 'report.html'}")


@app.command()
def measure(
    model: Annotated[
        str, typer.Option(help="resnet56, vgg19, torchvision:NAME, timm:NAME or package.module:function.")
    ],
    num_classes: Annotated[int | None, typer.Option(min=1, help="The model's own number if not given.")] = None,
    input_: Annotated[str, typer.Option("--input", help="Shape of one input.")] = "3x32x32",
    ratios: Annotated[
        str | None, typer.Option(help="0.5, '[0, 0.5, 0.5, 0.5]' by stage, or '[0:0, 1-15:0.7]' by layer.")
    ] = None,
    speedup: Annotated[float | None, typer.Option(help="How many times fewer MACs to plan for.")] = None,
    as_json: Json = False,
) -> None:
    """What a network costs, or a plan would give.

    Before any training: parameters and MACs before and after, the speed-up, and how many filters each layer would keep.
    """
    shape = read_shape(input_)
    if ratios is not None and speedup is not None:
        raise GrowpruneError("measure: give --ratios SPEC or --speedup X, not both")
    result = plan(model, num_classes, shape, ratios, speedup)
    print(json.dumps(result, indent=2)) if as_json else show(plan_table(result))


def read_shape(text: str) -> tuple[int, ...]:
    """
    >>> read_shape("3x32x32")
    (3, 32, 32)
    """
    parts = text.lower().split("x")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise GrowpruneError(f"--input: '{text}' is no shape; write it as 3x32x32 (channels, height, width)")
    return tuple(int(part) for part in parts)


def plan(
    name: str, num_classes: int | None, shape: tuple[int, ...], ratios: str | None, speedup: float | None
) -> dict[str, Any]:
    """The network as it is and as it would be, measured: the filters are removed from fresh weights."""
    import torch

    import growprune as gp
    from growprune.models import create
    from growprune.ratios import write

    try:
        model = create(name, num_classes).eval()
    except TypeError as error:
        if num_classes is None or "num_classes" not in str(error):
            raise
        raise GrowpruneError(f"--num-classes: {name} takes no such number; leave it out") from error
    example = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    before = gp.measure(model, example)
    asked: Any = ratios if ratios is not None else 0.0 if speedup is None else gp.Speedup(speedup)
    pruner = gp.Pruner(model, example, schedule=gp.OneShot(), ratios=asked)
    after = gp.measure(pruner.compact(), example)
    return {
        "model": name,
        "input": list(shape),
        "ratios": write(pruner.spec),
        "params": {"before": before.params, "after": after.params},
        "macs": {"before": before.macs, "after": after.macs},
        "speedup": gp.speedup(before, after),
        "sparsity": 1 - after.params / before.params,
        "widths": {layer: [len(kept), int(kept.sum())] for layer, kept in pruner.masks().items()},
        "skipped": pruner.skipped,
    }


def plan_table(result: dict[str, Any]) -> Any:
    from rich import box
    from rich.table import Table

    shown = Table("", "before", "after", "factor", title=f"{result['model']}, plan {result['ratios']}",
                  title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)  # fmt: skip
    for column in shown.columns[1:]:
        column.justify = "right"
    for label, key in (("parameters", "params"), ("MACs", "macs")):
        full, left = result[key]["before"], result[key]["after"]
        shown.add_row(label, f"{full:,}", f"{left:,}", f"{full / left:.2f}×", style="bold")
    for layer, (full, left) in result["widths"].items():
        shown.add_row(f"filters of {layer}", str(full), str(left), f"{full / left:.2f}×")
    for layer, reason in result["skipped"].items():
        shown.add_row(f"{layer}: left alone, {reason}")
    return shown


def show(what: Any) -> None:
    from rich.console import Console

    Console().print(what)
