"""The command line: `growprune demo | train | prune | resume | report | eval | measure | export | bench | reproduce`.

Commands say what they do here and import what they need when called: torch takes seconds to load, `--help` must not.
Results go to stdout, progress to stderr. An error that a user can cause is one line on stderr and exit code 2.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from growprune import asking
from growprune import config as configs
from growprune.console import BESIDE, Given, Plain, fail, heard, itself, offered, read_file, usage
from growprune.errors import ElsewhereError, EndedError, GrowpruneError, StoppedError, told
from growprune.options import flag

if TYPE_CHECKING:
    from growprune.distributed import World
    from growprune.paper.comparison import Comparison

REFUSED: type[Exception] = typer.BadParameter.__mro__[2]
"""ClickException, the parent of every usage error; typer keeps its own copy of click out of sight."""

app = typer.Typer(
    name="growprune",
    help="Prune PyTorch networks by growing regularization (GReg-1 and GReg-2, ICLR 2021).",
    epilog="growprune COMMAND --help says more of each.",
    add_completion=False,
    rich_markup_mode=None,  # plain help: the styled one takes as long again to load
    context_settings={"help_option_names": ["-h", "--help"]},
)

Out = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Folder of the run, to make or to go on with. [runs/COMMAND-MODEL-DATA]"),
]
File = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="TOML file with any of these options, or a run's config.json."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of a table.")]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs a command, turns what a user can cause into one line, exits."""
    command = typer.main.get_command(app)
    try:
        code = command.main(arguments, prog_name="growprune", standalone_mode=False)
    except REFUSED as error:
        fail(usage(error))
    except EndedError as ended:
        code = 128 + ended.signal
    except (typer.Abort, KeyboardInterrupt):
        code = 130
    except Exception as error:
        if (line := told(error)) is None:
            raise
        fail(line)
    if code in (130, 143) and heard():
        print("growprune: interrupted", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


def show_version(wanted: bool) -> None:
    if wanted:
        from growprune import __version__

        print(f"growprune {__version__}")
        raise typer.Exit


def show_help(context: typer.Context, wanted: bool) -> None:
    if wanted:
        print(context.get_help())
        raise typer.Exit


@app.callback(invoke_without_command=True)
def top(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=show_version, help="Print the version and exit.")
    ] = False,
    # typer's own option would load pydantic, which takes as long as all else.
    help_: Annotated[
        bool,
        typer.Option("-h", "--help", is_eager=True, callback=show_help, help="Show this message and exit."),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@offered(app, asking.Demo)
def demo(given: Given, *, as_json: Json = False) -> None:
    """Train, prune, fine-tune and compare: no download, no GPU.

    A small residual network learns scikit-learn's handwritten digits; GReg-1 and one-shot pruning then take the same
    filters from it, in about a minute. The folder gets the figures, report.html, result.json and the smaller network.
    """
    asked = asking.Demo(**given)
    from growprune.demo import DemoConfig

    own: dict[str, Any] = {name: value for name, value in vars(asked).items() if name != "out"}
    show_demo(DemoConfig(**own), Path(asked.out), as_json)


def show_demo(config: Any, out: Path, as_json: bool) -> None:
    """Do the demo, or what is left of it, and say what came of it."""
    from growprune import demo, report

    tell(lambda: demo.run(config, out), report.table, out, as_json)


# -- train, prune, resume --------------------------------------------------------------------------------------------


@offered(app, configs.Train)
def train(given: Given, *, out: Out = None, config: File = None, as_json: Json = False) -> None:
    """Train a network on images.

    The folder gets the network, metrics.jsonl, result.json and report.html. Interrupted in whatever way, it goes on
    with `growprune resume OUT`, or with the same command again.
    """
    begin("train", given, out, config, as_json)


@offered(app, configs.Prune)
def prune(given: Given, *, out: Out = None, config: File = None, as_json: Json = False) -> None:
    """Prune a trained network: push, remove, fine-tune, report.

    The defaults are the paper's on CIFAR. The folder gets the smaller network, metrics.jsonl, result.json and
    report.html. Interrupted in whatever way, it goes on with `growprune resume OUT`, or with the same command again.
    """
    begin("prune", given, out, config, as_json)


@app.command(cls=Plain)
def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")],
    as_json: Json = False,
) -> None:
    """Go on with an interrupted run, and finish it.

    The outcome is the same, bit for bit, as without the interruption (on a GPU: of a run with --deterministic).
    """
    from growprune.run import RESULT, read_config, read_json

    found = read_config(run)
    try:
        go_on(found, run, as_json)
    except ElsewhereError as error:
        if not (run / RESULT).is_file():
            raise GrowpruneError(error.kept) from error
        tell(lambda: read_json(run / RESULT), outcome_table(found), run, as_json)  # there is nothing to write


def go_on(found: dict[str, Any], run: Path, as_json: bool) -> None:
    """With the run, or the demo, that a folder's config.json describes."""
    if found.get("command") == "demo":
        from growprune.demo import read

        show_demo(read(found, run), run, as_json)
        return
    conclude(configs.from_json(found, run), run, as_json)


def outcome_table(found: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
    from growprune import report
    from growprune.report import run

    return report.table if found.get("command") == "demo" else run.table


def together(device: str) -> World:
    """This process's place among all; alone it is known at once, and a refusal comes without what a run needs."""
    from growprune.distributed import World, several

    if not several():
        return World()
    from growprune.jobs import gathered

    return gathered(device)


def begin(command: str, given: Given, out: Path | None, file: Path | None, as_json: bool) -> None:
    """A run from its options: those given, those of the file, the defaults."""
    base = read_file(file, command) if file is not None else {}
    beside = {name: base.pop(name, None) for name in BESIDE}
    config = configs.resolve(command, given, base)
    out = out or Path(beside["out"] or configs.folder(command, config))
    from growprune.distributed import foremost, meet, one_voice
    from growprune.origin import foresee, sensible

    sensible(config)
    for remark in configs.idle(config) if foremost() else ():
        print(f"growprune: {remark}", file=sys.stderr)
    world = together(config.device)
    with one_voice(world):
        if not (out / "config.json").exists():  # a run that has begun has all it needs
            foresee(config)
        meet(world)
    conclude(config, out, as_json or bool(beside["json"]))


def conclude(config: configs.Config, out: Path, as_json: bool) -> None:
    """Do the run, then say what came of it."""
    from growprune import jobs
    from growprune.report.run import table

    tell(lambda: jobs.run(config, out), table, out, as_json)


def tell(run: Callable[[], dict[str, Any]], table: Callable[[dict[str, Any]], Any], out: Path, as_json: bool) -> None:
    from growprune.distributed import foremost

    try:
        result = run()
    except StoppedError as stopped:
        print(f"growprune: {stopped}; go on with: {itself()} resume {out}", file=sys.stderr)
        sys.exit(128 + stopped.signal)
    if not foremost():
        return
    show(result, table, as_json)
    if not as_json:
        print(f"Report: {out / 'report.html'}")


@app.command(cls=Plain)
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Folders of finished runs, or files that reproduce has kept.")
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page, .html. [comparison.html; of one run its report.html]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Runs beside each other, or one's page anew.

    What sets them apart and what each came to, as a table and as a page with pictures. Runs that differ in nothing but
    their seed are one row; one that is not finished is named and left out. Of one folder its own page is made anew.
    """
    from growprune import finished
    from growprune.report import runs as beside
    from growprune.storage import write_whole

    if out is not None and out.suffix != ".html":
        raise GrowpruneError(f"--out: '{out}' must end in .html")
    if len(runs) == 1 and runs[0].is_dir():
        result, page, table = alone(runs[0])
        place = out or runs[0] / "report.html"
    else:
        lots = beside.lots(finished.collected(runs, lambda line: print(f"growprune: {line}", file=sys.stderr)))
        result, page, table = beside.to_json(lots), beside.page(lots), lambda _: beside.table(lots)
        place = out or Path("comparison.html")
    write_whole(place, page.encode())
    show(result, table, as_json)
    if not as_json:
        print(f"Report: {place}")


def alone(run: Path) -> tuple[dict[str, Any], str, Callable[[dict[str, Any]], Any]]:
    """What came of one run, its page, and how it is shown."""
    from growprune import report
    from growprune.report.run import page
    from growprune.run import RESULT, read_config, read_json, read_notes

    found = read_config(run)
    if not (run / RESULT).is_file():
        raise GrowpruneError(f"{run}: not finished; go on with: growprune resume {run}")
    result, notes = read_json(run / RESULT), read_notes(run)
    demo = found.get("command") == "demo"
    return (
        result,
        report.page(result, report.draw(result, notes)) if demo else page(result, notes),
        outcome_table(found),
    )


# -- eval, measure, export, bench ------------------------------------------------------------------------------------


@offered(app, asking.Eval, "eval")
def evaluate(
    given: Given,
    *,
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="Folder of a run; what is not given is as it was there.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Test a network: accuracy, parameters, MACs.

    Of a run (`growprune eval RUN`), or of weights (`growprune eval --model M --weights W --data D`).
    """
    from growprune.run import as_tested

    asked = {name: value for name, value in vars(asking.Eval(**given)).items() if value is not None}
    wanted = {**(as_tested(run) if run is not None else {}), **asked}
    for name in ("model", "weights", "data"):
        if name not in wanted:
            raise GrowpruneError(f"eval: give the folder of a run, or --model, --weights and --data (no --{name} here)")
    from growprune import jobs, models
    from growprune.origin import classes
    from growprune.report.tables import eval_table
    from growprune.weights import weights_file

    models.known(wanted["model"])
    weights_file(wanted["weights"], wanted["model"], classes(wanted["data"]))
    config = configs.resolve("train", {**wanted, "batch": 1})  # of the training images none are needed
    show(jobs.tested(config), eval_table, as_json)


@offered(app, asking.Measure)
def measure(given: Given, *, as_json: Json = False) -> None:
    """What a network costs, or a plan would give.

    Before any training: parameters and MACs before and after, the speed-up, and how many filters each layer would keep.
    """
    asked = asking.Measure(**given)
    from growprune.planning import plan
    from growprune.report.tables import plan_table

    show(plan(asked), plan_table, as_json)


@offered(app, asking.Export)
def export(
    given: Given,
    *,
    run: Annotated[Path | None, typer.Argument(metavar="RUN", help="Folder of a run, whose network it is.")] = None,
    as_json: Json = False,
) -> None:
    """Write a network for use elsewhere, as ONNX or for torch.export.

    Of a run (`growprune export RUN`), or of weights (`--model M --weights W --input 3x32x32 --out FILE`). The file is
    read again and run beside the network, and kept only if both compute the same.
    """
    asked = asking.Export(**given)
    from growprune import exporting
    from growprune.report.tables import export_table

    show(exporting.export(asked, run), export_table, as_json)


@offered(app, asking.Bench)
def bench(given: Given, *, as_json: Json = False) -> None:
    """What a training step takes on this machine.

    The step of `growprune prune` with GReg-1: alone, with and without its penalty, several at once, and after pruning.
    With --images: what it takes on a batch that is there, what the loader brings, and both together.
    """
    asked = asking.Bench(**given)
    for name in ("data", "data_dir", "parallel") if asked.images is not None else ():
        if name in given:
            raise GrowpruneError(f"{flag(name)}: not with --images, of which one run at a time is fed; leave one out")
    model, batch = ("resnet56,vgg19", 256) if asked.images is None else ("torchvision:resnet50", 64)
    names = list(dict.fromkeys(name.strip() for name in (asked.model or model).split(",") if name.strip()))
    if not names:
        raise GrowpruneError("--model: no network is named")
    from growprune import bench as benches
    from growprune import models
    from growprune.jobs import usable
    from growprune.report.tables import bench_table

    for name in names:
        models.known(name)
    device = usable(asked.device)
    compiled = ("on" if device.startswith("cuda") else "off") if asked.compile == "auto" else asked.compile
    figures = benches.bench if asked.images is None else benches.fed
    result = figures(
        benches.Bench(names, asked.images or asked.data, asked.data_dir, device, asked.batch or batch, asked.parallel,
                      asked.steps, compiled, asked.workers, lambda line: print(line, file=sys.stderr))
    )  # fmt: skip
    show(result, bench_table, as_json)


@offered(app, asking.Reproduce)
def reproduce(
    given: Given,
    *,
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME", help="table1 to table4, obd, random, ku, figure1; scopes and causes are not the paper's."
        ),
    ],
    as_json: Json = False,
) -> None:
    """Tables and figures of the paper, run and set beside it.

    What was run before is not run again, and what was interrupted goes on: give the same command. --no-run shows what
    there is so far.
    """
    from rich.console import Group

    from growprune.distributed import World, foremost, one_voice
    from growprune.paper.comparison import compared
    from growprune.paper.lab import commissioned
    from growprune.paper.reproduce import reproduce as fulfil
    from growprune.several import SomeFailedError

    asked = asking.Reproduce(**given)
    world = together(asked.device) if asked.run else World()
    failed: SomeFailedError | None = None
    with one_voice(world):
        lab, experiments, only = commissioned(asked, names, world)
        try:
            if asked.run:
                fulfil(lab, *experiments, only=only)
        except SomeFailedError as error:
            failed = error  # and the tables of all that did not
        except StoppedError as stopped:
            how = "at once, what was done since the last save is lost" if stopped.lost else "all saved"
            print(f"growprune: stopped, {how}; the same command goes on with it", file=sys.stderr)
            sys.exit(128 + stopped.signal)
    if foremost():
        comparisons = [compared(lab, experiment) for experiment in experiments]
        parts = [comparison.of(only) for comparison in comparisons]
        facts = [part.to_json() for part in parts]
        tables = Group(parts[0].shown(), *(each for part in parts[1:] for each in ("", part.shown())))
        show(facts[0] if len(facts) == 1 else facts, lambda _: tables, as_json)
        for comparison in comparisons if asked.run else ():
            keep(comparison, lab.out / "tables", failed, as_json)
        if failed is not None:
            raise failed


def keep(comparison: Comparison, place: Path, failed: GrowpruneError | None, as_json: bool) -> None:
    """Write what was shown; where runs have failed, they are what counts, and that it cannot be written is told."""
    from growprune.paper.comparison import publish

    try:
        page = publish(comparison, place)
    except (GrowpruneError, OSError) as error:
        if failed is None:
            raise
        print(f"growprune: {told(error) or error}", file=sys.stderr)
    else:
        if not as_json:
            print(f"Report: {page}")


def show(result: Any, table: Callable[[Any], Any], as_json: bool) -> None:
    """One JSON document, or a table."""
    if as_json:
        print(json.dumps(result, indent=2))
        return
    from rich.console import Console

    Console().print(table(result), crop=False)  # what is no terminal takes lines of any length
