"""The command line: `growprune demo | train | prune | eval | measure | resume | bench`.

Commands say what they do here and import what they need when called: torch takes seconds to load, `--help` must not.
Results go to stdout, progress to stderr. An error that a user can cause is one line on stderr and exit code 2.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_type_hints

import typer

from growprune import config as configs
from growprune.errors import GrowpruneError, nearest

REFUSED: type[Exception] = typer.BadParameter.__mro__[2]
"""ClickException, the parent of every usage error; typer keeps its own copy of click out of sight."""

app = typer.Typer(
    name="growprune",
    help="Prune PyTorch networks by growing regularization (GReg-1 and GReg-2, ICLR 2021).",
    add_completion=False,
    rich_markup_mode=None,  # plain help: the styled one takes as long again to load
    context_settings={"help_option_names": ["-h", "--help"]},
)

Out = Annotated[
    Path | None, typer.Option(help="Folder of the run, to make or to go on with. [runs/COMMAND-MODEL-DATA]")
]
File = Annotated[Path | None, typer.Option("--config", help="TOML file with any of these options.")]
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
    if code == 130 and heard():
        print("growprune: interrupted", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


def usage(error: Any) -> str:
    """What is wrong with the command line, the nearest name where one is near, and where to look."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "growprune"
    message = str(error.format_message()).strip().rstrip(".")
    unknown = getattr(error, "option_name", None)
    if unknown and context and "did you mean" not in message.lower():
        known = [name for parameter in context.command.params for name in parameter.opts]
        message += nearest(unknown, known)
    return f"{message} ({command} --help lists what there is)"


def fail(message: str) -> NoReturn:
    if not heard():
        time.sleep(10)  # torchrun ends this process once the one that speaks has ended; if not, that one did not fail
    print(f"growprune: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def heard() -> bool:
    """Does this process speak? Those of torchrun's that fail before they have come together all have the same to say;
    afterwards they settle it among themselves."""
    together = sys.modules.get("torch.distributed")
    return os.environ.get("LOCAL_RANK", "0") == "0" or (together is not None and together.is_initialized())


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
    from growprune.demo import DemoConfig

    show_demo(DemoConfig(seed=seed, device=device, ratio=ratio, scope=scope, longer=longer), out, as_json)


def show_demo(config: Any, out: Path, as_json: bool) -> None:
    """Do the demo, or what is left of it, and say what came of it."""
    from growprune.demo import run
    from growprune.report import table
    from growprune.train import StoppedError

    try:
        result = run(config, out)
    except StoppedError as stopped:
        stop(out, stopped.step, stopped.signal)
    if as_json:
        print(json.dumps(result, indent=2))
        return
    show(table(result))
    print(f"Report: {out / 'report.html'}")


# -- train, prune, resume --------------------------------------------------------------------------------------------


def offered(kind: type[configs.Config]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command every field of a configuration as an option; one that is not given is None."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
        hints = get_type_hints(kind)
        more = []
        for each in fields(kind):
            name, switch = configs.flag(each.name), hints[each.name] is bool
            value = "" if each.default in ("", None) else f" [{str(each.default).lower() if switch else each.default}]"
            option = typer.Option(f"{name}/--no-{name[2:]}" if switch else name, help=each.metadata["help"] + value)
            hint: Any = Annotated[hints[each.name] | None, option]
            more.append(inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint))
        command.__signature__ = inspect.Signature([*more, *own])  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in [*more, *own]}
        return command

    return decorate


def given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


@app.command()
@offered(configs.Train)
def train(*, out: Out = None, config: File = None, as_json: Json = False, **options: Any) -> None:
    """Train a network on images.

    The folder gets the network, metrics.jsonl, result.json and report.html. Interrupted in whatever way, it goes on
    with `growprune resume OUT`, or with the same command again.
    """
    conclude(configs.resolve("train", given(options), config), out, as_json)


@app.command()
@offered(configs.Prune)
def prune(*, out: Out = None, config: File = None, as_json: Json = False, **options: Any) -> None:
    """Prune a trained network: push, remove, fine-tune, report.

    The defaults are the paper's on CIFAR. The folder gets the smaller network, metrics.jsonl, result.json and
    report.html. Interrupted in whatever way, it goes on with `growprune resume OUT`, or with the same command again.
    """
    conclude(configs.resolve("prune", given(options), config), out, as_json)


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(help="Folder of the run.")],
    as_json: Json = False,
) -> None:
    """Go on with an interrupted run, and finish it.

    The outcome is the same, bit for bit, as without the interruption (on a GPU: of a run with --deterministic).
    """
    from growprune.run import read_config

    found = read_config(run)
    if found.get("command") == "demo":
        from growprune.demo import read

        show_demo(read(found, run), run, as_json)
        return
    conclude(configs.from_json(found, run), run, as_json)


def conclude(config: configs.Config, out: Path | None, as_json: bool) -> None:
    """Do the run, then say what came of it."""
    out = out or configs.folder(config.command, config)
    from growprune.jobs import run
    from growprune.report.run import table
    from growprune.train import StoppedError

    try:
        result = run(config, out)
    except StoppedError as stopped:
        stop(out, stopped.step, stopped.signal)
    if os.environ.get("RANK", "0") != "0":  # of torchrun's processes one speaks
        return
    if as_json:
        print(json.dumps(result, indent=2))
        return
    show(table(result))
    print(f"Report: {out / 'report.html'}")


def stop(out: Path, step: int, signal: int) -> NoReturn:
    print(f"growprune: stopped at step {step}, all saved; go on with: growprune resume {out}", file=sys.stderr)
    sys.exit(128 + signal)


@app.command(name="eval")
def evaluate(
    run: Annotated[
        Path | None, typer.Argument(help="Folder of a run; its own model and data are then the default.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="resnet56, vgg19, torchvision:NAME, timm:NAME or module:function.")
    ] = None,
    weights: Annotated[str | None, typer.Option(help="A run's folder, .safetensors, or a state dict.")] = None,
    data: Annotated[str | None, typer.Option(help="cifar10, cifar100, digits, or a folder.")] = None,
    data_dir: Annotated[str, typer.Option(help="Where cifar10 and cifar100 lie, or are downloaded to.")] = "data",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Json = False,
) -> None:
    """Test a network: accuracy, parameters, MACs.

    Of a run (`growprune eval RUN`), or of weights (`growprune eval --model M --weights W --data D`).
    """
    from growprune.jobs import tested
    from growprune.report import tables

    known: dict[str, Any] = {}
    if run is not None:
        from growprune.run import read_config

        known = read_config(run)
    wanted = {
        "model": model or known.get("model"),
        "weights": weights or (str(run) if run is not None else None),
        "data": data or known.get("data"),
    }
    for name, value in wanted.items():
        if not value:
            raise GrowpruneError(f"eval: give the folder of a run, or --model, --weights and --data (no --{name} here)")
    kept: dict[str, Any] = {name: known[name] for name in ("normalize", "resolution") if name in known}
    result = tested(configs.resolve("train", {**wanted, **kept, "data_dir": data_dir, "device": device}))
    print(json.dumps(result, indent=2)) if as_json else show(tables.test_table(result))


@app.command()
def bench(
    model: Annotated[str, typer.Option(help="Networks to measure, with commas between.")] = "resnet56,vgg19",
    data: Annotated[str, typer.Option(help="cifar10, cifar100, digits, or a folder.")] = "cifar10",
    data_dir: Annotated[str, typer.Option(help="Where cifar10 and cifar100 lie, or are downloaded to.")] = "data",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    batch: Annotated[int, typer.Option(min=1, help="Images a step.")] = 256,
    parallel: Annotated[int, typer.Option(min=1, help="Runs at once on a GPU.")] = 4,
    steps: Annotated[int, typer.Option(min=0, help="Steps a measurement; 0: as many as are needed here.")] = 0,
    compile_: Annotated[Literal["auto", "on", "off"], typer.Option("--compile", help="torch.compile.")] = "on",
    images: Annotated[str | None, typer.Option(help="Also measure reading this folder of large images.")] = None,
    workers: Annotated[int, typer.Option(min=-1, help="Processes that read them; -1: one a core.")] = -1,
    as_json: Json = False,
) -> None:
    """What a training step takes on this machine.

    The step of `growprune prune` with GReg-1: alone, with and without its penalty, several at once, and after pruning.
    """
    from growprune.bench import Bench, loader
    from growprune.bench import bench as measured
    from growprune.report import tables

    names = [name.strip() for name in model.split(",") if name.strip()]
    asked = Bench(
        names, data, data_dir, device, batch, parallel, steps, compile_, lambda line: print(line, file=sys.stderr)
    )
    result = measured(asked)
    if images is not None:
        result["loader"] = loader(images, workers, result["environment"]["device"])
    print(json.dumps(result, indent=2)) if as_json else show(tables.bench_table(result))


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
    from growprune.report import tables

    shape = read_shape(input_)
    if ratios is not None and speedup is not None:
        raise GrowpruneError("measure: give --ratios SPEC or --speedup X, not both")
    result = plan(model, num_classes, shape, ratios, speedup)
    print(json.dumps(result, indent=2)) if as_json else show(tables.plan_table(result))


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


def show(what: Any) -> None:
    from rich.console import Console

    Console().print(what)
