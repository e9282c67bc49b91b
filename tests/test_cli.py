"""The command line as a user meets it: help, results, files, and one line for every mistake."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
import urllib.error
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import chdir, nullcontext, redirect_stderr, redirect_stdout, suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import typer
from torch import nn

import growprune
from growprune import asking, bench, cli, console, data, jobs, models, origin
from growprune import config as configs
from growprune.demo import DemoConfig
from growprune.distributed import World
from growprune.feeds import FromFiles, Images
from growprune.measurement import weight_sparsity
from growprune.run import as_tested
from growprune.streaming import undecodable

COMMANDS = ["demo", "train", "prune", "resume", "report", "eval", "measure", "export", "bench", "reproduce"]
HEAVY = {"torch", "numpy", "matplotlib", "sklearn", "safetensors", "pydantic", "rich.table", "rich.console"}
TINY = {"base_epochs": 1, "delta_lambda": 0.25, "ks": 3, "finetune_epochs": 1}
NET = ("--data", "digits", "--model", "growprune.demo:network")
RUN = (*NET, "--device", "cpu", "--threads", "1", "--batch", "64", "--lr", "0.05", "--epochs", "1")
PUSH = ("--prune-batch", "64", "--prune-lr", "0.03", "--delta-lambda", "0.25", "--ku", "1", "--ks", "2")


def growprune_says(*arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command, in a terminal 80 characters wide."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as left:
        cli.main([str(each) for each in arguments])
    assert isinstance(left.value.code, int)
    return left.value.code, out.getvalue(), err.getvalue()


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed goes to one, which knows no colours; else it is a pipe or a file."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")


def readable(text: str) -> None:
    """Printable, and not wider than 80 characters."""
    assert all(c.isprintable() or c == "\n" for c in text)
    assert max(map(len, text.splitlines())) <= 80


# -- help ------------------------------------------------------------------------------------------------------------


def alone(*arguments: str) -> tuple[str, list[str], float]:
    """What a process of its own prints, the modules it has loaded at its end, and the seconds it worked."""
    script = (
        "import sys, time\nfrom growprune.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: print(sorted(sys.modules), time.process_time(), sep='\\n')\n"
    )
    ran = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True)
    *lines, modules, seconds = ran.stdout.splitlines()
    return "\n".join(lines), re.findall(r"'([\w.]+)'", modules), float(seconds)


@pytest.mark.parametrize(
    "arguments", [("--help",), *((name, "--help") for name in COMMANDS), ("--version",), ("dmeo",)]
)
def test_what_needs_no_network_loads_none_and_is_quick(arguments: tuple[str, ...]) -> None:
    _, loaded, seconds = alone(*arguments)
    assert "typer" in loaded
    assert HEAVY & set(loaded) == set()
    assert seconds < 0.5  # of work: waiting for a busy machine does not count; it takes 0.1


@pytest.mark.parametrize(
    "mistake",
    ["train --epochs x", "prune --schedule greg3", "measure --input 3x", "export --out net.pth", "train --config no"],
)
def test_a_mistake_that_needs_no_network_is_told_without_one(mistake: str) -> None:
    assert {"torch", "numpy"} & set(alone(*mistake.split())[1]) == set()


def test_help_names_the_commands() -> None:
    for arguments in ((), ("--help",), ("-h",)):
        code, out, err = growprune_says(*arguments)
        assert (code, err) == (0, "")
        assert re.findall(r"^  (\w+)  +[A-Z].*[.]$", out.partition("Commands:")[2], re.MULTILINE) == COMMANDS
        readable(out)


def commands() -> dict[str, Any]:
    found = typer.main.get_command(cli.app)
    return dict(found.commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_one_line_of_help_and_is_in_it(name: str) -> None:
    code, out, err = growprune_says(name, "--help")
    assert (code, err) == (0, "")
    readable(out)
    words = " ".join(out.split())
    for parameter in commands()[name].params:
        if isinstance(parameter, typer.core.TyperOption):
            assert parameter.help
            assert re.search(r"[.]$|\]$", parameter.help), parameter.help
            assert "\n" not in parameter.help
            assert " ".join(parameter.help.split()) in words
        shown = parameter.opts[0] if not parameter.secondary_opts else f"--[no-]{parameter.opts[0][2:]}"
        arguments = {("resume", "run"), ("eval", "run"), ("export", "run"), ("report", "runs"), ("reproduce", "names")}
        argument = (name, shown) in arguments
        if argument:
            shown = parameter.metavar or shown.upper()
            assert re.match(rf"Usage: growprune {name} \[OPTIONS\] \[?{shown}(\]|\.\.\.)?\n", out)
        assert re.search(rf"(?m)^  {re.escape(shown)}\b", out)
        assert not parameter.required or argument


def test_the_help_of_a_long_command_has_its_options_in_parts_aligned() -> None:
    _, out, _ = growprune_says("prune", "--help")
    parts = re.findall(r"(?m)^(\S.*):$", out)
    assert parts == ["Network and images", "Pruning", "Training", "Speed", "The run"]
    columns = {re.match(r"  -\S+( \S+)*?(  +)", line).end() for line in out.splitlines() if line.startswith("  -")}  # type: ignore[union-attr]
    assert len(columns) == 1
    assert re.search(r"(?m)^  --schedule NAME +How they go: greg1, greg2 or oneshot. \[greg1\]$", out)
    assert re.search(r"(?m)^  --\[no-\]coupled  ", out)


def test_defaults_are_shown_as_they_are() -> None:
    _, out, _ = growprune_says("prune", "--help")
    words = " ".join(out.split())
    for each in fields(configs.Prune):
        if each.default not in ("", None):
            said = (
                {True: "yes", False: "no"}.get(each.default, each.default)
                if type(each.default) is bool
                else each.default
            )
            shown = f"{said:g}" if isinstance(said, float) else str(said)
            assert re.search(rf"{re.escape(each.metadata['help'])}(: [^\[]*)? \[{re.escape(shown)}\]", words), each.name


def test_version() -> None:
    assert growprune_says("--version") == (0, f"growprune {growprune.__version__}\n", "")


def test_it_also_runs_as_a_module() -> None:
    ran = subprocess.run([sys.executable, "-m", "growprune", "--version"], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, f"growprune {growprune.__version__}\n")


def test_the_demos_options_default_to_its_config() -> None:
    config = DemoConfig()
    for each in fields(asking.Demo):
        if each.name != "out":
            assert each.default == getattr(config, each.name)


# -- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("dmeo", "No such command 'dmeo'. Did you mean 'demo'?"),
        ("--frob", "no option --frob (growprune --help"),
        ("train --precison bf16", "no option --precison, did you mean '--precision'? (growprune train --help"),
        ("train --no-augmen", "no option --no-augmen, did you mean '--no-augment'? (growprune train --help"),
        ("train --ratios 0.5", "no option --ratios; it belongs to prune or measure (growprune train --help"),
        ("--ratios 0.5", "no option --ratios; it belongs to prune or measure (growprune --help"),
        ("resume . --images there", "no option --images; it belongs to bench or reproduce (growprune resume --help"),
        ("demo --ratios 0.5", "no option --ratios, did you mean '--ratio'? (growprune demo --help"),
        ("train more", "more"),
        ("train --epochs x", "--epochs: needs a whole number, not 'x'"),
        ("train --epochs 1.5", "--epochs: needs a whole number, not '1.5'"),
        ("train --epochs -1", "--epochs: -1 must be 0 or more"),
        ("train --momentum nan", "--momentum: needs a number, not nan"),
        ("train --lr cosin:0.1", "--lr: 'cosin:0.1' is no learning rate, did you mean 'cosine'?"),
        ("train --data ''", "--data: is empty"),
        ("train --data cifr10", "data 'cifr10': no such image set, did you mean 'cifar10'?"),
        ("train --data FILE", "data 'FILE': is a file; a folder is wanted"),
        ("train --device tpu", "device: 'tpu' cannot be used here; give auto, cpu or cuda"),
        ("train --config none.toml", "none.toml: No such file or directory; give a TOML file, or a run's config.json"),
        ("train --config FILE", "FILE: not TOML: "),
        ("train --weights none", "weights 'none': no such file, or a folder without model.safetensors"),
        ("train --data digits", "resnet56 does not take images of 1x8x8 (digits): "),
        ("train --data digits", "; give another --model, such as growprune.demo:network for digits"),
        ("train --data digits --model growprune.demo:network --batch 5000", "5000"),
        (
            "prune",
            "prune: no --weights given, and no network trained in runs/train-resnet56-cifar10; train one (growprune ",
        ),
        ("prune --data cifr10", "data 'cifr10': no such image set, did you mean 'cifar10'?"),
        ("prune --data cifr10 --weights none", "data 'cifr10': no such image set"),
        ("prune --weights none", "weights 'none': no such file, or a folder without model.safetensors; give a run's"),
        ("prune --schedule greg3", "--schedule: 'greg3' is not greg1, greg2 or oneshot, did you mean 'greg2'?"),
        ("prune --weights FILE --ratios half", "'half' is not a number: give 0.5, '[0, 0.5, 0.5, 0.5]' by stage, "),
        ("prune --weights FILE --ratios 1.5", "1.5 is outside [0, 1)"),
        ("prune --ratios 0.5 --speedup 2", "give one of --ratios, --speedup and --global-ratio"),
        (
            "prune --data digits --weights FILE",
            "FILE: damaged, or no state dict that can be read without running code in it",
        ),
        ("resume", "Missing argument 'RUN'"),
        ("resume nowhere", "nowhere: no such folder; give the folder of a run: its --out, by default in runs/"),
        ("resume .", ".: not a run's folder: it has no config.json"),
        ("eval", "eval: give the folder of a run, or --model, --weights and --data (no --model here)"),
        ("eval --model vgg19 --data digits", "(no --weights here)"),
        ("eval nowhere", "nowhere: no such folder; give the folder of a run: its --out, by default in runs/"),
        ("eval --model resnet65 --weights FILE --data digits", "did you mean 'resnet56'?"),
        ("eval --model vgg19 --weights none --data digits", "weights 'none': no such file"),
        ("demo --sed 3", "no option --sed, did you mean '--seed'?"),
        ("demo --seed x", "--seed: needs a whole number, not 'x'"),
        ("demo --seed -1", "--seed: -1 must be 0 or more"),
        ("demo --scope pth", "--scope: 'pth' is not path or filter, did you mean 'path'?"),
        ("demo --ratio 1.5", "--ratio: 1.5 must be below 1"),
        ("demo --device tpu", "device: 'tpu' cannot be used here; give auto, cpu or cuda"),
        ("demo --out FILE", "FILE: is a file; name another folder with --out"),
        ("demo --out FILE/below", "FILE/below: Not a directory; name another folder with --out"),
        ("demo --out .", ".: not empty, and not a run's folder; name another folder with --out"),
        ("train --data digits --device cpu --decode gpu", "--decode gpu: needs a CUDA device; give cpu or auto"),
        ("train --decode nvjpeg", "--decode: 'nvjpeg' is not auto, cpu or gpu"),
        ("bench --model ,", "--model: no network is named"),
        ("bench --model vgg91", "did you mean 'vgg19'?"),
        ("bench --compile yes", "--compile: 'yes' is not auto, on or off"),
        ("measure --ratios 0.5 --speedup 2", "give one of --ratios, --speedup and --global-ratio, not --ratios and"),
        ("measure --global-ratio 0.5", "--global-ratio: which filters are least hangs on the weights: give --weights"),
        ("measure --global-stem", "--global-stem: only with --global-ratio"),
        ("measure --ratios 0.5 --ignore nowhere", "ignore: the model has no layer 'nowhere'"),
        ("measure --weights none", "weights 'none': no such file"),
        ("measure --ratios", "'--ratios' requires an argument"),
        ("measure --speedup 2 more", "more"),
        ("measure --speedup 0.5", "--speedup: 0.5 must be above 1"),
        ("measure --num-classes 0", "--num-classes: 0 must be 1 or more"),
        ("measure --model resnet65 --ratios 0.5", "did you mean 'resnet56'?"),
        ("measure --model resnet20 --ratios 2", "2.0 is outside"),
        ("measure --model resnet20 --ratios half", "'half' is not a number"),
        ("measure --model resnet20 --ratios ''", "--ratios: is empty"),
        ("measure --model resnet20 --speedup 900", "growprune: speedup: no ratio gives 900x"),
        ("measure --input 3x", "--input: '3x' is no shape"),
        ("measure --input 3x0x8", "--input: '3x0x8' is no shape"),
        (
            "measure --model resnet20 --input 1x32x32",
            "--model resnet20 --input 1x32x32: the model fails on the example",
        ),
        (
            "measure --model growprune.demo:network",
            "--model growprune.demo:network --input 3x32x32: the model fails on",
        ),
        ("measure --model growprune.demo:network", "; its first convolution takes 1 channel: give --input 1x32x32\n"),
        ("measure --input 3x32", "; its first convolution takes 3 channels: give --input 3x32x32\n"),
        ("measure --model test_cli:unshaped --input 3x8x8", "; give the shape of one of its inputs with --input (cha"),
        ("measure --model test_cli:fixed --num-classes 5", "--num-classes: test_cli:fixed takes no such number"),
        ("measure --model test_cli:wanting", "--num-classes: test_cli:wanting needs it"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_text("precious")
    code, out, err = growprune_says(*[a.strip("'") for a in arguments.split()])
    assert (code, out) == (2, "")
    assert re.fullmatch(r"growprune: [^\n]+\n", err)
    assert said in err
    assert (tmp_path / "FILE").read_text() == "precious"
    assert [path for path in tmp_path.rglob("*") if path.name not in ("FILE", "runs")] == []


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "--device cuda:9: no GPU that torch can use here; give auto or cpu"),
     (2, "--device cuda:9: no such GPU, there are 2 here; give cuda, auto or cpu")],
)  # fmt: skip
def test_a_gpu_that_is_not_there_is_said_to_be_missing(count: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: invalid device ordinal")

    monkeypatch.setattr(torch, "empty", missing)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(growprune.GrowpruneError, match=f"^{said}$"):
        jobs.usable("cuda:9")


def fixed() -> nn.Module:
    """A user's model that takes no argument."""
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))


def wanting(num_classes: int) -> nn.Module:
    """One that must be told."""
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, num_classes, 3))


@pytest.mark.parametrize(
    "model", ["resnet65", "torchvision:resnet5", "timm:resnet5", "nowhere:net", "test_cli:fixd", "torch.nn:Conv2d"]
)
@pytest.mark.parametrize("command", ["train", "prune", "eval", "bench"])
def test_an_unknown_model_is_refused_before_any_image_is_read(
    command: str, model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if model.startswith(("torchvision", "timm")):
        pytest.importorskip(model.partition(":")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data, "load", lambda *_, **__: pytest.fail("images were loaded"))
    more = ("--data", "cifar10", "--weights", "none") if command == "eval" else ()
    code, _, err = growprune_says(command, "--model", model, *more)
    assert code == 2
    assert model.rpartition(":")[2] in err or model in err
    assert [*tmp_path.iterdir()] == []


def test_missing_weights_and_impossible_plans_are_refused_before_any_image_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data, "load", lambda *_, **__: pytest.fail("images were loaded"))
    (tmp_path / "weights").touch()
    for more in (
        (),
        ("--weights", "weights", "--ratios", "[0, 2]"),
        ("--weights", "weights", "--schedule", "greg2", "--tau-pick", "9"),
    ):
        assert growprune_says("prune", *more)[0] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]


def test_what_the_system_refuses_is_one_line_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", str(tmp_path))

    monkeypatch.setattr("growprune.demo.run", full)
    assert growprune_says("demo") == (2, "", f"growprune: {tmp_path}: No space left on device\n")


def test_a_full_gpu_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has\na total capacity")

    monkeypatch.setattr("growprune.demo.run", full)
    said = "growprune: not enough memory on the GPU, a smaller batch needs less: CUDA out of memory\n"
    assert growprune_says("demo") == (2, "", said)


SLOW = """
import time
print("loading", flush=True)
while True:
    try:
        time.sleep(60)
    except BaseException:  # as what is loaded may do
        pass
"""


@pytest.fixture
def loading(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Begins a command that never comes to the end of loading torch."""

    def begun(ignored: int | None = None, **more: str) -> subprocess.Popen[str]:
        def heard() -> None:  # whatever started the tests may have had them ignored
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN if number == ignored else signal.SIG_DFL)

        (tmp_path / "torch.py").write_text(SLOW)
        path = os.pathsep.join((str(tmp_path), str(Path(cli.__file__).parents[1])))
        process = subprocess.Popen(
            [sys.executable, "-m", "growprune", "demo", "--out", str(tmp_path / "demo")], preexec_fn=heard, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path, **more},
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        return process

    return begun


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_while_torch_is_loaded_is_told(
    loading: Callable[..., subprocess.Popen[str]], number: int, code: int
) -> None:
    process = loading()
    process.send_signal(number)
    assert process.communicate(timeout=60) == ("", "growprune: interrupted\n")
    assert process.returncode == code


def test_what_is_ignored_stays_so_and_torchrun_speaks_for_its_processes(
    loading: Callable[..., subprocess.Popen[str]],
) -> None:
    deaf = loading(ignored=signal.SIGINT)
    deaf.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert deaf.poll() is None
    deaf.send_signal(signal.SIGTERM)
    assert deaf.communicate(timeout=60) == ("", "growprune: interrupted\n")
    one = loading(RANK="0")
    one.send_signal(signal.SIGTERM)
    assert one.communicate(timeout=60) == ("", "")
    assert one.returncode == -signal.SIGTERM


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_before_a_run_has_begun_is_told_once_all_is_put_away(number: int, code: int) -> None:
    script = f"""
import atexit, signal, sys
import growprune.demo
from growprune.__main__ import USUAL, main
for each in USUAL.items():
    signal.signal(*each)
def run(*_):
    try:
        signal.raise_signal({number})
    finally:
        print("put away")
growprune.demo.run = run
atexit.register(lambda: print(signal.getsignal({number}).name))
sys.argv[1:] = ["demo"]
main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, "put away\nSIG_DFL\n", "growprune: interrupted\n")


def test_an_interruption_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("growprune.demo.run", interrupted)
    assert growprune_says("demo") == (130, "", "growprune: interrupted\n")


def test_a_bug_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("growprune.demo.run", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["demo"])


# -- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a trained network and two pruned ones, made by commands; the tests are in it."""
    folder = tmp_path_factory.mktemp("runs")
    with chdir(folder):
        for arguments in (
            ("train", *RUN, "--tensorboard", "--json", "--out", "base"),
            ("prune", *RUN, *PUSH, "--weights", "base", "--json", "--out", "small"),
            ("prune", *RUN, *PUSH, "--weights", "base", "--json", "--granularity", "weight", "--out", "sparse"),
        ):
            code, out, err = growprune_says(*arguments)
            assert code == 0, err
            (folder / arguments[-1] / "said.json").write_text(json.dumps([out, err]))
        yield folder


RUNS = ["base", "small", "sparse"]


def document(text: str) -> dict[str, Any]:
    """The one JSON document that a text is, and no number in it that JSON does not know."""
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("run", RUNS)
def test_json_is_the_result_and_progress_is_elsewhere(place: Path, run: str) -> None:
    out, err = json.loads((place / run / "said.json").read_text())
    assert document(out) == json.loads((place / run / "result.json").read_text())
    stages = ["train"] if run == "base" else ["prune", "finetune"]
    assert re.findall(r"(?m)^(\w+): [\d,]+ steps, .*accuracy [\d.]+ %, .*ms a step, .*s$", err) == stages
    told = [line for line in err.splitlines() if line.startswith("compact: the push has ended, but what goes in '")]
    assert len(told) == (run != "base"), "so short a push does not push far, and that is said"
    assert err.count("\n") == len(stages) + len(told)


BEFORE = "finished before: nothing was done\n"


@pytest.mark.parametrize("run", RUNS)
def test_without_json_there_is_a_table_and_the_reports_place(place: Path, run: str) -> None:
    """Of a finished run, `resume` only tells."""
    result = json.loads((place / run / "result.json").read_text())
    code, out, err = growprune_says("resume", run)
    assert (code, err) == (0, BEFORE)
    readable(out)
    assert f"{result['accuracy']['final']:.1f} %" in out
    assert f"{result['params']['after']:,}" in out
    assert out.endswith(f"\nReport: {run}/report.html\n")
    assert (place / run / "report.html").stat().st_size > 1000
    code, out, err = growprune_says("resume", run, "--json")
    assert (code, document(out), err) == (0, result, BEFORE)


@pytest.mark.parametrize("run", RUNS)
def test_the_folder_holds_every_option_as_resolved(place: Path, run: str) -> None:
    found = json.loads((place / run / "config.json").read_text())
    kind = configs.Train if run == "base" else configs.Prune
    assert set(found) == {"command", *(each.name for each in fields(kind))}
    assert (found["command"], found["device"], found["batch"]) == (kind.command, "cpu", 64)
    if run != "base":
        assert (found["ratios"], found["weights"]) == ("0.5", "base")


@pytest.mark.parametrize("run", RUNS)
def test_the_result_says_how_images_were_scaled(place: Path, run: str) -> None:
    """Without it the network could not be used elsewhere."""
    found, digits = json.loads((place / run / "result.json").read_text())["normalization"], data.load("digits")
    assert found == {"mean": list(digits.mean), "std": list(digits.std)}


@pytest.mark.parametrize("run", RUNS)
def test_measure_tells_the_zeros_of_a_run_that_has_any(place: Path, run: str) -> None:
    asked, result = ("measure", "--weights", run), json.loads((place / run / "result.json").read_text())
    zeros = {"before": result["sparsity"], "after": result["sparsity"]}
    assert document(growprune_says(*asked, "--json")[1]).get("zeros") == (zeros if run == "sparse" else None)
    said = re.findall(r"(?m)^ zeros among the weights +(.+) $", growprune_says(*asked)[1])
    assert said == ([f"{100 * result['sparsity']:.1f} %"] if run == "sparse" else [])


@pytest.mark.parametrize("run", RUNS)
def test_eval_finds_the_very_accuracy_that_the_run_calls_final(place: Path, run: str) -> None:
    result = json.loads((place / run / "result.json").read_text())
    code, out, err = growprune_says("eval", run, "--json")
    found = document(out)
    assert (code, err) == (0, "")
    assert found["accuracy"] == result["accuracy"]["final"]
    assert (found["params"], found["macs"]) == (result["params"]["after"], result["macs"]["after"])
    assert found["environment"]["threads"] == 1
    assert {choice["captured"] for choice in result["choices"].values()} == {False}  # there is no GPU to record it
    assert (found["zeros"] > 0.4) == (run == "sparse")
    code, out, err = growprune_says("eval", run)
    assert (code, err) == (0, "")
    readable(out)
    assert re.search(rf"accuracy on 597 test images +{result['accuracy']['final']:.2f} %", out)
    assert re.search(rf"parameters +{result['params']['after']:,}", out)
    assert re.search(rf"zeros among the weights +{100 * found['zeros']:.1f} %", out)


def test_eval_takes_weights_in_the_usual_forms(place: Path, tmp_path: Path) -> None:
    final = json.loads((place / "base" / "result.json").read_text())["accuracy"]["final"]
    state = growprune.load(place / "base" / "model.safetensors", lambda: cli_network()).state_dict()
    forms = {"plain.pth": state, "epoch.pth": {"state_dict": {f"module.{k}": v for k, v in state.items()}, "epoch": 3}}
    for name, form in forms.items():
        torch.save(form, tmp_path / name)
    safetensors.torch.save_file(state, tmp_path / "plain.safetensors")
    for weights in (*(tmp_path / name for name in (*forms, "plain.safetensors")), "base", "base/model.safetensors"):
        code, out, err = growprune_says("eval", *NET, "--device", "cpu", "--threads", 1, "--weights", weights, "--json")
        assert code == 0, err
        assert document(out)["accuracy"] == final


def cli_network() -> nn.Module:
    from growprune.demo import network

    return network()


def test_images_that_are_scaled_otherwise_than_the_network_knows_are_asked_about(place: Path, tmp_path: Path) -> None:
    """Before anything is pruned, and when it is tested: by what the run says that trained it; of other weights by their
    batch norm, whose statistics, estimated anew, would fit these images far better. The scale they know is named, if
    it is a usual one."""
    code, _, _ = growprune_says("train", *RUN[:-1], 4, "--out", tmp_path / "long")
    state = growprune.load(tmp_path / "long" / "model.safetensors", lambda: cli_network()).state_dict()
    torch.save(state, tmp_path / "own.pt")
    torch.save({k: v + 1 if "running_mean" in k else v for k, v in state.items()}, tmp_path / "odd.pt")
    once = (*RUN[:-1], 0, "--schedule", "oneshot", "--out")
    tried = ("long", "own"), ("long", "none"), ("own.pt", "own"), ("own.pt", "none"), ("odd.pt", "own")
    for command, *options in (("prune", *once), ("eval", *NET, "--device", "cpu", "--threads")):
        found = {}
        for name, scale in tried:
            last = tmp_path / f"{name}-{scale}" if command == "prune" else 1
            code, _, err = growprune_says(command, *options, last, "--normalize", scale, "--weights", tmp_path / name)
            assert code == 0
            found[name, scale] = [line for line in err.splitlines() if "--normalize" in line]
        assert found["long", "own"] == found["own.pt", "own"] == []
        assert found["long", "none"] == ["--normalize none: the run that trained this network had own"]
        for name, scale, how in (
            ("own.pt", "none", "--normalize own"),
            ("odd.pt", "own", "batch norm's statistics estimated anew on these images"),
        ):
            shown = re.fullmatch(
                rf"the network is right on ([\d.]+) % of the test images, and on ([\d.]+) % with {how}: is --normalize "
                rf"{scale} as it was when the network was trained\?",
                *found[name, scale],
            )
            assert shown is not None
            assert float(shown[2]) > float(shown[1]) + 10


def test_weights_of_another_network_are_refused(place: Path) -> None:
    for arguments, said in (
        (
            ("eval", "base", "--model", "resnet20"),
            "base/model.safetensors: of another network: the file lacks 'layer1.2.",
        ),
        (
            ("prune", *RUN, "--model", "vgg11", "--weights", "base", "--out", "x"),
            "of another network: the file lacks 'cl",
        ),
        (("eval", "base", "--data", "cifr10"), "did you mean 'cifar10'?"),
    ):
        code, out, err = growprune_says(*arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert said in err
    assert not (place / "x").exists()


def test_eval_of_a_run_that_is_not_finished_says_how_to_finish_it(place: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((place / "base" / "config.json").read_bytes())
    said = f"growprune: weights '{tmp_path}': a run that is not finished: growprune resume {tmp_path}\n"
    assert growprune_says("eval", tmp_path) == (2, "", said)


def write_pictures(root: Path, each: int) -> None:
    """Of two classes, of several sizes: they are streamed."""
    image = pytest.importorskip("PIL.Image")
    for part in ("train", "test"):
        for kind in ("a", "b"):
            (root / part / kind).mkdir(parents=True)
            for number in range(each):
                image.new("RGB", (70 + number, 80), (99 * number, 0, 0)).save(root / part / kind / f"{number}.png")


def test_eval_needs_no_whole_batch_of_large_images(tmp_path: Path) -> None:
    write_pictures(tmp_path, 2)
    torch.save(large().state_dict(), tmp_path / "weights.pth")
    code, out, err = growprune_says(
        "eval", "--model", "test_cli:large", "--data", tmp_path, "--weights", tmp_path / "weights.pth",
        "--device", "cpu", "--threads", 1, "--resolution", 64, "--workers", 0, "--json",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert document(out)["images"] == 4


def test_eval_does_not_hang_on_the_training_images(tmp_path: Path) -> None:
    """They are read to ask about `--normalize`; that cannot be asked where one is broken."""
    write_pictures(tmp_path, 2)
    (tmp_path / "train" / "a" / "1.png").write_bytes(b"")
    torch.save(normed().state_dict(), tmp_path / "weights.pth")
    code, _, err = growprune_says(
        "eval", "--model", "test_cli:normed", "--data", tmp_path, "--weights", tmp_path / "weights.pth",
        "--device", "cpu", "--normalize", "none", "--resolution", 64, "--workers", 0, "--json",
    )  # fmt: skip
    assert (code, err) == (0, "")


def test_a_network_for_grey_images_is_told_that_pictures_are_read_in_colour(tmp_path: Path) -> None:
    write_pictures(tmp_path, 2)
    code, _, err = growprune_says("train", *NET[2:], "--data", tmp_path, "--resolution", 64, "--device", "cpu")
    assert code == 2
    assert err.endswith("or grey images as train.npz and test.npz: picture files are read in colour\n")


@pytest.mark.parametrize("keep", ["device", "files"])
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda root: (root / "test").rename(root / "other"), "{root}: has train/, but no val/ or test/ with a folder"),
        (lambda root: (root / "train").rename(root / "other"), "{root}: has test/, but no train/; train/ and val/ (or"),
        (lambda root: (root / "train" / "b").rename(root / "train" / "c"),
         "{root}: class 'b' is in test/ but not in train/; both need the same folders"),
        (lambda root: [(root / part).rename(root / f"other{part}") for part in ("train", "test")],
         "{root}: no images found; train/ and val/ (or test/) with class folders belong there"),
        (lambda root: [file.unlink() for file in (root / "test" / "a").iterdir()],
         "{root}/test/a: no images in it (.png .jpg .jpeg .webp .bmp); add some, or remove it"),
        (lambda root: (root / "train" / "a" / "1.png").write_bytes(b"\x89PNG"),
         "{root}/train/a/1.png: broken, or not an image; replace it (or remove it, before a run begins)"),
        (lambda root: (root / "test" / "b" / "0.png").write_bytes(b""),
         "{root}/test/b/0.png: broken, or not an image; replace it (or remove it, before a run begins)"),
        (lambda root: [shutil.rmtree(root / part / "b") for part in ("train", "test")],
         "data '{root}': only one class, 'a': there is nothing to tell apart; add the others"),
    ],
    ids=["no val", "no train", "classes", "neither", "empty class", "broken", "empty file", "one class"],
)  # fmt: skip
def test_a_bad_folder_is_refused_in_one_line(tmp_path: Path, keep: str, spoil: Any, said: str) -> None:
    """What is the matter, where, and what to do; nothing is left of a run that did not begin."""
    root = tmp_path / "images"
    write_pictures(root, 3)
    spoil(root)
    code, out, err = growprune_says(
        "train", "--model", "test_cli:large", "--data", root, "--device", "cpu", "--resolution", 64, "--batch", 2,
        "--epochs", 1, "--workers", 0, "--keep", keep, "--out", tmp_path / "run",
    )  # fmt: skip
    assert (code, out) == (2, "")
    *before, line = err.splitlines()
    assert line.startswith(f"growprune: {said.format(root=root)}")
    assert len(before) <= 1  # that they are being read
    assert (tmp_path / "run").exists() == (keep == "files" and "test/b/0" in said)  # met only in the first test


def test_without_a_network_it_is_said_how_to_give_weights_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any image is read; and the file is then found where it was said to belong."""

    def no_network(*_: object, **__: object) -> None:
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr(torch.hub, "download_url_to_file", no_network)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    (images := tmp_path / "images").mkdir()
    asked = ("prune", "--model", "torchvision:resnet50", "--weights", "ResNet50_Weights.IMAGENET1K_V1")
    code, out, err = growprune_says(*asked, "--data", images, "--out", tmp_path / "run")
    assert (code, out) == (2, "")
    name, place = "resnet50-0676ba61.pth", tmp_path / "checkpoints"
    assert err.startswith("growprune: weights 'ResNet50_Weights.IMAGENET1K_V1': cannot be downloaded (")
    assert err.endswith(f"); put the file {name} into {place} (prune and eval also take its path, with --weights)\n")
    assert err.count("\n") == 1
    (place / name).write_bytes(b"half of it")
    code, out, err = growprune_says(*asked, "--data", images, "--out", tmp_path / "run")
    said = (
        f"growprune: {place / name}: damaged, or another file of that name: its SHA-256 does not begin with 0676ba61\n"
    )
    assert (code, out, err) == (2, "", said)
    monkeypatch.setattr("growprune.weights.digest", lambda path: "0676ba61")  # as if it were the right one
    code, out, err = growprune_says(*asked, "--data", images, "--out", tmp_path / "run")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"growprune: {images}: no images found")


@pytest.mark.parametrize(("rank", "looks"), [("0", True), ("1", False), (None, True)])
def test_one_process_of_a_machine_downloads_weights(
    rank: str | None, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torchrun; the others wait for it when the network is made (`Job.made`)."""
    if rank is not None:
        for name, value in (("RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_RANK", rank)):
            monkeypatch.setenv(name, value)
    looked: list[str] = []
    monkeypatch.setattr("growprune.origin.weights_file", lambda weights, *_: looked.append(weights))
    origin.foresee(configs.Prune(model="torchvision:resnet50", weights="ResNet50_Weights.IMAGENET1K_V1"))
    assert bool(looked) == looks


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--data", "cifar10"), "tell 1000 classes apart; the images are of 10"),
        (("--data", "pets"), "tell 1000 classes apart; the images are of 2"),
        (("--model", "torchvision:resnet18"), "of another network than --model torchvision:resnet18"),
        (("--model", "resnet56"), "of another network than --model resnet56"),
    ],
)
@pytest.mark.parametrize("command", ["train", "prune", "eval"])
def test_published_weights_that_cannot_fit_are_not_downloaded(
    command: str, given: tuple[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.hub, "download_url_to_file", lambda *_, **__: pytest.fail("downloaded"))
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(data, "load", lambda *_, **__: pytest.fail("images were loaded"))
    monkeypatch.chdir(tmp_path)
    for name in ("cat", "dog"):
        (tmp_path / "pets" / "train" / name).mkdir(parents=True)
    asked = {"--model": "torchvision:resnet50", "--data": str(tmp_path), **dict([given])}
    name = "ResNet50_Weights.IMAGENET1K_V1"
    code, out, err = growprune_says(command, *(word for pair in asked.items() for word in pair), "--weights", name)
    assert (code, out, err) == (2, "", f"growprune: weights '{name}': {said}\n")


def test_eval_decodes_as_the_run_did_where_it_can(tmp_path: Path) -> None:
    """What a run chose stands in its result: the two decoders do not give quite the same images."""
    write_pictures(tmp_path, 2)
    run = tmp_path / "run"
    run.mkdir()
    config = configs.Train(model="test_cli:large", data=str(tmp_path), threads=1, resolution=64)
    (run / "config.json").write_text(json.dumps(config.to_json()))
    safetensors.torch.save_file(large().state_dict(), run / "model.safetensors")
    assert as_tested(run)["decode"] == "auto"
    (run / "result.json").write_text(json.dumps({"choices": {"images": {"decode": "gpu", "cpu": 1.0, "gpu": 2.0}}}))
    assert as_tested(run)["decode"] == "gpu"
    code, out, err = growprune_says("eval", run, "--device", "cpu", "--workers", 0, "--json")
    assert (code, err) == (0, "")
    assert document(out)["images"] == 4


def large(num_classes: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes))


def normed(num_classes: int = 2) -> nn.Module:
    return nn.Sequential(*large(num_classes)[:1], nn.BatchNorm2d(4), *large(num_classes)[1:])  # type: ignore[index]


def test_a_run_that_is_called_by_a_name_like_its_own_is_suggested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of torchvision:resnet50 has no colon in its name."""
    monkeypatch.chdir(tmp_path)
    for name in ("runs/prune-torchvision-resnet50-digits", "elsewhere/mine", "runs/train-vgg19-digits"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    wanted = "runs/prune-torchvision-resnet50-digits"
    for said in ("runs/prune-torchvision:resnet50-digits", "prune-torchvision-resnet50-digits"):
        assert f"no such folder, did you mean '{wanted}'?" in growprune_says("resume", said)[2]
    assert "did you mean 'elsewhere/mine'?" in growprune_says("eval", "elsewhere/mime")[2]
    (tmp_path / "elsewhere/mind").mkdir()
    said = "not a run's folder: it has no config.json, which holds a run's options; give the folder of a run"
    assert growprune_says("resume", "elsewhere/mind")[2].startswith(f"growprune: elsewhere/mind: {said}: its --out")


def test_resume_where_there_is_no_gpu_shows_what_is_finished_and_refuses_what_is_not(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object, **__: object) -> None:
        raise RuntimeError("no CUDA here")

    config = json.loads((place / "base" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "device": "cuda"}))
    monkeypatch.setattr(torch, "empty", missing)
    said = "growprune: it was begun on a GPU, and here is none that torch can use; go on where there is one\n"
    assert growprune_says("resume", tmp_path) == (2, "", said)
    result = (place / "base" / "result.json").read_text()
    (tmp_path / "result.json").write_text(result)
    code, out, err = growprune_says("resume", tmp_path, "--json")
    assert (code, document(out), err) == (0, json.loads(result), "")


def test_the_same_command_again_tells_and_another_is_refused(place: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (place / "base").iterdir() if path.name != ".lock"}
    code, out, err = growprune_says("train", *RUN, "--tensorboard", "--json", "--out", "base")
    assert (code, err) == (0, BEFORE)
    assert document(out) == json.loads((place / "base" / "result.json").read_text())
    code, out, err = growprune_says("train", *RUN, "--seed", 1, "--out", "base")
    assert (code, out) == (2, "")
    assert err.startswith("growprune: base: holds a run with --seed 0, not 1; name another folder with --out")
    _, _, err = growprune_says("train", *RUN, "--seed", 1, "--label-smoothing", 0.1, "--out", "base")
    assert err.startswith("growprune: base: holds a run with --label-smoothing 0.0, not 0.1 (--seed differs too); name")
    assert growprune_says("prune", *RUN, "--out", "base")[0] == 2
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_run_that_has_begun_needs_its_weights_no_longer(place: Path) -> None:
    (place / "base").rename(place / "elsewhere")
    try:
        code, out, _ = growprune_says("prune", *RUN, *PUSH, "--weights", "base", "--json", "--out", "small")
    finally:
        (place / "elsewhere").rename(place / "base")
    assert (code, document(out)["speedup"] > 1) == (0, True)


def test_tensorboard_finds_the_events(place: Path) -> None:
    assert len(list((place / "base").glob("events.out.tfevents.*"))) == 1
    assert not list((place / "small").glob("events.*"))


def test_a_file_holds_the_options_and_the_command_line_wins(place: Path) -> None:
    file = place / "options.toml"
    file.write_text(
        'data = "digits"\nmodel = "growprune.demo:network"\nthreads = 1\ndevice = "cpu"\nbatch = 64\njson = true\n'
        '[train]\nepochs = 0\nwarm-up = 0\nlr = 0.1\nout = "filed"\n'
        '[prune]\nepochs = 0\nweights = "base"\nprune_batch = 64\nschedule = "oneshot"\nratios = [0, 0.5, 0.5, 0.25]\n'
    )
    code, out, _ = growprune_says("train", "--config", file, "--seed", 3)
    found = json.loads((place / "filed" / "config.json").read_text())
    assert (code, document(out)["seed"]) == (0, 3)
    assert [found[key] for key in ("epochs", "warm_up", "lr", "seed", "batch")] == [0, 0.0, "0.1", 3, 64]
    code, out, err = growprune_says("prune", "--config", file, "--speedup", 2, "--out", "pruned")
    assert code == 0
    assert err.startswith("growprune: --prune-batch 64: it has no effect with --schedule oneshot\n")
    assert document(out)["speedup"] == pytest.approx(2, rel=0.02)
    code, out, _ = growprune_says("prune", "--config", file)
    assert (code, document(out)["ratios"]) == (0, "[0.0, 0.5, 0.5, 0.25]")
    assert (place / "runs" / "prune-growprune.demo-network-digits" / "result.json").is_file()


def test_a_runs_configuration_runs_again(place: Path) -> None:
    code, out, _ = growprune_says(
        "train", "--config", "base/config.json", "--out", "again", "--json", "--no-tensorboard"
    )
    assert code == 0
    assert document(out)["accuracy"] == json.loads((place / "base" / "result.json").read_text())["accuracy"]
    assert (place / "again" / "model.safetensors").read_bytes() == (place / "base" / "model.safetensors").read_bytes()
    code, _, err = growprune_says("prune", "--config", "base/config.json")
    assert (code, err) == (2, "growprune: base/config.json: is of the command 'train', not of prune\n")


def test_a_terminal_shows_how_far_it_is_and_an_interruption_is_saved_told_and_code_130(place: Path) -> None:
    command = [sys.executable, "-m", "growprune", "prune", *RUN, *PUSH[:-1], "100000", "--weights", "base", "--json"]
    terminal, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {**os.environ, "TERM": "xterm"}
    del environment["COLUMNS"]
    with subprocess.Popen(
        [*command, "--out", "long"], stdout=subprocess.PIPE, stderr=theirs, cwd=place, env=environment
    ) as process:
        os.close(theirs)
        shown, deadline = "", time.monotonic() + 90
        while " left " not in shown and time.monotonic() < deadline:
            shown += os.read(terminal, 10_000).decode(errors="replace")
        process.send_signal(signal.SIGINT)
        with suppress(OSError):  # the terminal's end
            while chunk := os.read(terminal, 10_000):
                shown += chunk.decode(errors="replace")
        out, _ = process.communicate(timeout=60)
    os.close(terminal)
    assert (process.returncode, out) == (130, b"")
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown))
    assert any(re.match(r"prune \w+ \S+ +\d+% λ \d\.\d{4} \d+\.\d % \d+\.\d ms left [\d:]+", line) for line in lines), (
        lines
    )
    assert max(map(len, lines[:-2])) <= 80
    assert re.fullmatch(r"growprune: stopped at step \d+, all saved; go on with: growprune resume long", lines[-2])
    assert (place / "long" / "checkpoints").is_dir()
    assert growprune_says("eval", "long")[0] == 2


@pytest.mark.parametrize(
    ("given", "variable", "torchrun", "threads", "beside_a_gpu"),
    [(0, None, False, 7, 1), (0, "3", False, 3, 3), (0, "3,2", False, 3, 3), (0, "many", False, 7, 1),
     (5, "3", False, 5, 5), (0, "4", True, 3, 1), (5, "4", True, 5, 5)],
)  # fmt: skip
def test_threads_are_as_asked_or_as_the_environment_says_or_all_cores(
    given: int, variable: str | None, torchrun: bool, threads: int, beside_a_gpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun sets the variable by itself, if to 1: two processes then share the cores."""
    monkeypatch.setattr(jobs, "cores", lambda: 7)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE") if torchrun else ():
        monkeypatch.setenv(name, "2")
    said, before = list[str](), torch.get_num_threads()
    with jobs.surroundings(configs.Train(device="cpu", threads=given), said.append):
        assert torch.get_num_threads() == threads
    assert (torch.get_num_threads(), said) == (before, [])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: nullcontext())
    for device in ("cuda", "cuda:1"):
        with jobs.surroundings(configs.Train(device=device, threads=given), said.append):
            assert torch.get_num_threads() == beside_a_gpu


def test_more_threads_than_cores_is_said(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "cores", lambda: 1)
    code, _, err = growprune_says("eval", "base", "--threads", 2, "--json")
    assert (code, err) == (0, "--threads 2: more than the cores there are here (1)\n")
    code, _, err = growprune_says("train", *RUN, "--threads", 2, "--epochs", 0, "--out", "two-threads")
    assert (code, err.splitlines()[0]) == (0, "--threads 2: more than the cores there are here (1)")


# -- demo, bench, measure --------------------------------------------------------------------------------------------


def test_demo_prints_its_result_as_a_table_or_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("growprune.demo.DemoConfig", partial(DemoConfig, **TINY))
    arguments = ("demo", "--out", tmp_path / "demo", "--device", "cpu", "--ratio", "0.75")
    code, out, err = growprune_says(*arguments, "--json")
    written = json.loads((tmp_path / "demo" / "result.json").read_text())
    assert (code, document(out)) == (0, written)
    assert written["ratios"] == "0.75"
    assert re.findall(r"(?m)^(\S+): \w+: [\d,]+ steps", err) == ["base", "GReg-1", "GReg-1", "one-shot", "one-shot"]

    for command in (arguments, ("resume", tmp_path / "demo")):
        code, table, log = growprune_says(*command)
        assert (code, log) == (0, "")
        final = [way["accuracy"]["final"] for way in (written, written["baseline"])]
        assert re.search(rf"fine-tuned +{final[0]:.1f} % +{final[1]:.1f} %", table)
        assert f"{written['speedup']:.2f}×" in table
        assert "λ grows by 0.25 every 2 steps to 1, then holds for 3" in " ".join(table.split())
        assert table.endswith(f"Report: {tmp_path / 'demo' / 'report.html'}\n")
        readable(table.replace(str(tmp_path), ""))
    code, out, _ = growprune_says("resume", tmp_path / "demo", "--json")
    assert (code, document(out)) == (0, written)
    code, out, _ = growprune_says("eval", tmp_path / "demo", "--json")
    assert (code, document(out)["accuracy"]) == (0, written["accuracy"]["final"])


def test_bench_measures_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("compiled, on a CPU"))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    arguments = ("bench", *NET, "--device", "cpu", "--batch", 64, "--steps", 1)
    code, out, err = growprune_says(*arguments, "--json")
    result = document(out)
    assert code == 0
    assert "growprune.demo:network: alone, with the penalty and without\n" in err
    found = result["models"]["growprune.demo:network"]
    assert found["ms"] > 0
    assert found["images_per_second"] == pytest.approx(64e3 / found["ms"])
    assert "compiled" not in found["choice"]
    assert result["environment"]["threads"] == 2  # while it measured: now it is one again

    monkeypatch.setattr("growprune.bench.bench", lambda asked: result)
    code, out, err = growprune_says(*arguments)
    assert (code, err) == (0, "")
    readable(out)
    assert re.match(r"Time of a training step\n.*, torch .*, digits, batch 64, 1 steps a measurement\n", out)
    assert re.search(rf"(?m)^ GReg-1, alone +{found['ms']:.2f} ms", out)
    assert re.search(rf"(?m)^ without the penalty +{found['ms_without_penalty']:.2f} ms", out)
    assert re.search(rf"(?m)^ pruned at 0.9, fine-tuning +{found['pruned']['ms']:.2f} ms", out)
    assert re.search(r"(?m)^ the penalty's share +too few steps to tell $", out)


@pytest.mark.usefixtures("terminal")
def test_the_table_of_a_bench_on_a_gpu_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {
        "ms": 4.812, "images_per_second": 53_200.0, "ms_without_penalty": 4.79, "penalty_share": -0.003,
        "choice": "bf16, channels_last, compiled, 27 layers with our kernels: 4.81 ms a step",
        "ms_parallel": {"4": 3.4}, "pruned": {"ms": 3.91},
    }  # fmt: skip
    result = {
        "models": {"resnet56": figures, "torchvision:mobilenet_v2": {**figures, "penalty_share": 0.0123}},
        "environment": {"device_name": "NVIDIA H200", "torch": "2.9.1+cu130", "device": "cuda"},
        "data": "cifar10", "batch": 256, "steps": 200,
    }  # fmt: skip
    monkeypatch.setattr("growprune.bench.bench", lambda asked: result)
    code, out, _ = growprune_says("bench", "--device", "cpu")
    assert code == 0
    readable(out)
    assert re.search(r"(?m)^ 4 at once, each +3.40 ms +3.40 ms $", out)
    assert re.search(r"(?m)^ the penalty's share +too little to measure +1.2 % $", out)


def test_bench_says_whether_a_folder_keeps_the_step_fed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step without loading, the loader without a step, and both; nothing of CIFAR."""
    monkeypatch.setattr("growprune.jobs.cores", lambda: 1)
    monkeypatch.setattr("growprune.bench.SECONDS", 0.1)
    monkeypatch.setattr(data, "cifar", lambda *_: pytest.fail("CIFAR is not asked for"))
    write_pictures(tmp_path, 5)
    code, out, err = growprune_says(
        "bench", "--images", tmp_path, "--model", "test_cli:wide", "--device", "cpu", "--batch", 2, "--steps", 2,
        "--workers", 1, "--json",
    )  # fmt: skip
    assert (code, err) == (0, "test_cli:wide: the step alone, the loader alone, and both; JPEGs on the CPU\n")
    result = document(out)
    assert "models" not in result
    assert (result["data"], result["batch"], result["steps"]) == (str(tmp_path), 2, 2)
    [(name, found)] = result["fed"].items()
    assert (name, found["workers"], found.keys()) == ("test_cli:wide", 1, {"cpu", "workers", "choice"})
    rates = found["cpu"]
    assert min(rates.values()) > 0
    for which in ("loader", "fed"):
        assert rates[f"{which}_share"] == pytest.approx(rates[which] / rates["step"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_bench_tries_both_decoders_and_the_device_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("growprune.bench.SECONDS", 0.1)
    write_pictures(tmp_path, 5)
    code, out, _ = growprune_says(
        "bench", "--images", tmp_path, "--model", "test_cli:wide", "--device", "cuda", "--batch", 2, "--steps", 3,
        "--workers", 1, "--compile", "off", "--json",
    )  # fmt: skip
    assert code == 0
    found = document(out)["fed"]["test_cli:wide"]
    assert found.keys() - {"workers", "choice", "kept"} == ({"cpu"} if undecodable("cuda") else {"cpu", "gpu"})
    assert all(rate > 0 for where in ("cpu", "gpu", "kept") for rate in found.get(where, {}).values())
    assert found["kept"]["step"] == found["cpu"]["step"]


def test_bench_of_images_that_are_kept(tmp_path: Path) -> None:
    write_pictures(tmp_path, 5)
    weights = tmp_path / "weights.pth"
    torch.save(wide().state_dict(), weights)
    said: list[str] = []
    asked = bench.Bench(["test_cli:wide"], str(tmp_path), "data", "cpu", 2, 1, 3, "off", 0, said.append)
    config = replace(bench.plan(asked, "test_cli:wide", weights), keep="device", resolution=64)
    found = bench.kept(asked, config, {}, 10.0)
    assert found.keys() == {"step", "loader", "fed", "loader_share", "fed_share"}
    assert found["step"] == 10.0
    assert found["fed_share"] == pytest.approx(found["fed"] / 10)
    assert min(found["fed"], found["loader"]) > 0  # of three steps, on a busy machine, either may be the faster
    assert said[0] == "test_cli:wide: batches alone, and with the step; the images kept on the device"


def wide(num_classes: int = 2) -> nn.Module:
    """With a layer that can be pruned."""
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.ReLU(), nn.Conv2d(4, 4, 3), *list(large(num_classes))[1:])


def test_bench_holds_the_batch_while_the_step_is_alone(tmp_path: Path) -> None:
    """No file is read then; afterwards the batches come again from where they are asked for."""
    write_pictures(tmp_path, 4)
    config = configs.Train(data=str(tmp_path), batch=2, workers=1, resolution=16)
    feed = Images(config, "cpu", World()).feed(2, 0)
    assert isinstance(feed, FromFiles)
    fresh = FromFiles(feed.source, 0, 0, World(), "cpu")
    feed.prepare(0)
    with bench.held(feed):
        assert feed.source._workers._all == []
        for number in range(3):
            feed.prepare(number)
        assert feed.source._workers._all == []
    for number in (0, 1, 2, 5):
        feed.prepare(number)
        fresh.prepare(number)
        for here, there in zip(feed(torch.zeros(1)), fresh(torch.zeros(1)), strict=True):
            assert torch.equal(here, there)
    feed.rest()


def test_bench_of_small_images_has_nothing_to_load(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for part in ("train", "test"):
        for kind in ("a", "b"):
            (tmp_path / part / kind).mkdir(parents=True)
            image.new("RGB", (32, 32)).save(tmp_path / part / kind / "0.png")
    code, out, err = growprune_says(
        "bench", "--images", tmp_path, "--model", "test_cli:wide", "--device", "cpu", "--batch", 2
    )
    assert (code, out) == (2, "")
    said = f"growprune: --images: those of {tmp_path} are small and kept in memory; nothing is loaded\n"
    assert err == said
    code, out, err = growprune_says("bench", "--images", tmp_path / "none", "--device", "cpu")
    said = f"growprune: --images: no folder {tmp_path / 'none'}; give one that holds train/ and val/\n"
    assert (code, out, err) == (2, "", said)


@pytest.mark.parametrize("other", [("--data", "cifar10"), ("--data-dir", "data"), ("--parallel", 4)])
def test_bench_refuses_what_images_leave_no_use_for(tmp_path: Path, other: tuple[str, object]) -> None:
    """Also where it is the default: it was said, and would not be done."""
    said = f"growprune: {other[0]}: not with --images, of which one run at a time is fed; leave one out\n"
    assert growprune_says("bench", "--images", tmp_path, *other, "--device", "cpu") == (2, "", said)


def test_the_table_of_how_a_step_is_fed_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    rates = {"step": 2500.0, "loader": 5000.0, "loader_share": 2.0, "fed": 2475.0, "fed_share": 0.99}
    slower = {**rates, "fed": 1250.0, "fed_share": 0.5}
    result = {
        "fed": {"torchvision:resnet50": {"cpu": rates, "gpu": slower, "kept": rates, "workers": 16, "choice": "bf16"}},
        "environment": {"device_name": "NVIDIA H200", "torch": "2.9.1+cu130", "device": "cuda"},
        "data": "here", "batch": 64, "steps": 200,
    }  # fmt: skip
    monkeypatch.setattr("growprune.bench.fed", lambda bench: asked.append(bench) or result)
    code, out, _ = growprune_says("bench", "--images", "here", "--device", "cpu")
    assert code == 0
    assert (asked[0].models, asked[0].batch, asked[0].data) == (["torchvision:resnet50"], 64, "here")
    readable(out)
    assert re.search(r"(?m)^NVIDIA H200, torch 2.9.1\+cu130, workers: 16, batch 64, 200 steps", out)
    assert re.search(r"(?m)^ images a second +JPEGs on the CPU +JPEGs on the GPU +kept on the GPU $", out)
    assert re.search(r"(?m)^ the step alone +2,500 +2,500 +2,500 $", out)
    assert re.search(r"(?m)^ the loader alone +5,000 +5,000 +5,000 $", out)
    assert re.search(r"(?m)^   of the step's rate +200 % +200 % +200 % $", out)
    assert re.search(r"(?m)^ the step, so fed +2,475 +1,250 +2,475 $", out)
    assert re.search(r"(?m)^   of the step's rate +99 % +50 % +99 % $", out)


def test_rates_of_too_few_steps_or_batches_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = {"step": 2.6, "loader": 63.0, "loader_share": 24.2, "fed": 2.5, "fed_share": 0.96}
    fast = {"step": 2.6, "loader": 674.8, "loader_share": 259.55, "fed": 2.5, "fed_share": 0.96}
    result = {
        "fed": {"slow": {"cpu": slow, "workers": 2}, "fast": {"cpu": fast, "workers": 2}},
        "environment": {"device_name": "CPU", "torch": "2.9.1"}, "data": "here", "batch": 64, "steps": 3,
    }  # fmt: skip
    monkeypatch.setattr("growprune.bench.fed", lambda bench: result)
    for steps, cells in ((3, ["too few to tell", "96 %", "over 1000 %", "96 %"]), (2, ["too few to tell"] * 4)):
        result["steps"] = steps
        _, out, _ = growprune_says("bench", "--images", "here", "--device", "cpu")
        assert [cell.strip() for cell in re.findall(r"(?m)^   of the step's rate +(.*)$", out)] == cells


def test_bench_names_the_option_for_a_batch_that_is_too_large(tmp_path: Path) -> None:
    write_pictures(tmp_path, 2)
    code, out, err = growprune_says("bench", "--images", tmp_path, "--model", "test_cli:wide", "--device", "cpu")
    assert (code, out, err) == (2, "", "growprune: --batch: no batch of 64 from 4 images; give a smaller one\n")


@pytest.mark.parametrize(("device", "compiled"), [("cpu", "off"), ("cuda", "on")])
def test_bench_compiles_where_there_is_a_gpu(device: str, compiled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def noted(bench: Any) -> dict[str, Any]:
        asked.append(bench)
        return {"environment": {}}

    monkeypatch.setattr("growprune.jobs.usable", lambda name: device)
    monkeypatch.setattr("growprune.bench.bench", noted)
    for more, expected in (((), compiled), (("--compile", "off"), "off"), (("--compile", "on"), "on")):
        assert growprune_says("bench", "--model", "vgg11, resnet20,vgg11", *more, "--json")[0] == 0
        assert (asked[-1].compile, asked[-1].device, asked[-1].models) == (expected, device, ["vgg11", "resnet20"])


def test_measure_knows_the_papers_plans() -> None:
    code, out, err = growprune_says("measure", "--model", "resnet56", "--ratios", "[0, 0.75, 0.75, 0.32]", "--json")
    assert (code, err) == (0, "")
    found = document(out)
    assert found["params"]["before"] == 853_018
    assert found["speedup"] == pytest.approx(2.55, abs=0.005)
    assert found["widths"]["layer1.0.conv1"] == [16, 4]
    assert found["widths"]["layer3.8.conv1"] == [64, 43]
    assert found["ratios"] == "[0.0, 0.75, 0.75, 0.32]"


def test_measure_solves_for_a_speedup_and_prints_a_table() -> None:
    arguments = ("measure", "--model", "growprune.demo:network", "--input", "1x8x8", "--num-classes", "3")
    code, out, err = growprune_says(*arguments, "--speedup", "2")
    assert (code, err) == (0, "")
    assert out.startswith("growprune.demo:network, input 1x8x8, speed-up 2.0×\n")
    assert re.search(r"MACs +410,208 .* (2\.0\d|1\.9\d)×", out)
    assert re.search(r"filters of layer3\.1\.conv1 +32 +1[5-7] ", out)
    readable(out)


def test_measure_plans_in_multiples() -> None:
    arguments = ("measure", "--model", "growprune.demo:network", "--input", "1x8x8", "--num-classes", "3")
    code, out, err = growprune_says(*arguments, "--ratios", 0.3, "--multiple", 8)
    assert (code, err) == (0, "")
    assert out.startswith("growprune.demo:network, input 1x8x8, ratios 0.3 in multiples of 8\n")
    found = document(growprune_says(*arguments, "--ratios", 0.3, "--multiple", 8, "--json")[1])
    assert (found["multiple"], {tuple(width) for width in found["widths"].values()}) == (8, {(8, 8), (16, 8), (32, 24)})
    code, _, err = growprune_says(*arguments, "--ratios", 0.3, "--multiple", 64)
    assert (code, err.count("\n"), err.startswith("growprune: multiple: no layer loses any filter")) == (2, 1, True)


def tied() -> nn.Module:
    """What two layers make is added."""
    return TiedByAddition()


class TiedByAddition(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.other, self.last = (
            nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 2, 1),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stem(x)
        out: torch.Tensor = self.last(torch.relu(self.one(h) + self.other(h)))
        return out


@pytest.mark.parametrize(
    "asked", ["--ratios 0.5", "--ratios [1:0.5]", "--speedup 2", "--ratios 0.5 --ignore one", "--ratios 0.5 --coupled"]
)
def test_measure_names_options_as_the_command_line_does(asked: str) -> None:
    """Whatever way out is told, it is none in Python."""
    *said, err = growprune_says("measure", "--model", "test_cli:tied", "--input", "3x4x4", *asked.split())
    told = str(said) + err
    assert ("the option coupled" in told) == (asked.split()[-1] not in ("one", "--coupled"))
    for python in ("=True", "Global(", "Speedup(", "ignore=", "='"):
        assert python not in told


def test_measure_leaves_the_random_numbers_alone() -> None:
    """Which weights are drawn cannot change a plan: two calls say the same."""
    arguments = ("measure", "--model", "resnet20", "--ratios", "0.5", "--json")
    torch.manual_seed(1)
    first = growprune_says(*arguments)
    torch.manual_seed(2)
    assert growprune_says(*arguments) == first


def test_a_network_is_measured_without_a_plan() -> None:
    code, out, _ = growprune_says("measure", "--model", "resnet20", "--json")
    result = document(out)
    assert code == 0
    assert result["macs"]["before"] == result["macs"]["after"] > 0
    code, out, _ = growprune_says("measure", "--model", "resnet20")
    assert code == 0
    readable(out)
    assert re.match(r"resnet20, input 3x32x32\n", out)
    assert re.search(r"(?m)^ parameters +269,722 $", out)
    assert "×" not in out


LONG = "branch_of_the_left_side", "block_number_seventeen_of_thirty", "the_second_convolution"


def deep() -> nn.Module:
    """Layers whose names do not fit into a line, and differ in their end."""
    net: nn.Module = roomy()
    for name in LONG:
        net = nn.Sequential(OrderedDict({name: net}))
    return net


def test_a_long_name_is_folded_on_a_terminal_and_one_line_in_a_pipe(
    request: pytest.FixtureRequest,
) -> None:
    asked = "measure", "--model", "test_cli:deep", "--ratios", 0.5
    name = f"{'.'.join(reversed(LONG))}.2"
    out = growprune_says(*asked)[1]
    assert re.search(rf"(?m)^ filters of {name} +8 +4 +2.00× $", out)
    request.getfixturevalue("terminal")
    out = growprune_says(*asked)[1]
    readable(out)
    assert name in re.sub(r"\s+([\d.]+ +[\d.]+ +2.00×)?", "", out.partition("stays whole")[0])
    assert "…" not in out


def test_measure_takes_functions_of_a_users_own() -> None:
    code, out, _ = growprune_says("measure", "--model", "test_cli:roomy", "--ratios", 0.5, "--json")
    assert (code, document(out)["widths"]) == (0, {"2": [8, 4]})
    assert list(document(out)["stays"]) == ["0", "4"]
    code, out, _ = growprune_says("measure", "--ratios", 0.5, "--coupled", "--json")
    assert list(document(out)["stays"]) == ["linear"]
    code, out, _ = growprune_says("measure", "--model", "test_cli:roomy", "--ratios", 0.5)
    assert "1 stays whole (it makes what the model returns): 4" in out
    assert "10 stay whole (each since it is added to what other" in growprune_says("measure", "--model", "resnet20")[1]
    assert growprune_says("measure", "--model", "test_cli:wanting", "--num-classes", 5)[0] == 0


def test_a_plan_may_go_by_weights_and_leave_layers_alone(tmp_path: Path) -> None:
    net = models.create("resnet20")
    with torch.no_grad():
        net.get_submodule("layer3.1.conv1").weight[:10].zero_()  # type: ignore[union-attr, operator, index]
    growprune.save(net, tmp_path / "net.safetensors")
    asked = "measure", "--model", "resnet20", "--weights", tmp_path / "net.safetensors", "--json"
    ours = document(growprune_says(*asked, "--global-ratio", 0.02)[1])
    once, everywhere = growprune.OneShot(), growprune.Global(0.02)
    pruner = growprune.Pruner(net, torch.zeros(1, 3, 32, 32), once, ratios=everywhere)
    assert ours["widths"] == {name: [len(kept), int(kept.sum())] for name, kept in pruner.masks().items()}
    assert ours["widths"]["layer3.1.conv1"][1] < 64
    smaller = pruner.compact()
    assert ours["zeros"] == {"before": weight_sparsity(net), "after": weight_sparsity(smaller)}
    shown = growprune_says(*asked[:-1], "--global-ratio", 0.02)[1]
    assert re.findall(r"(?m)^ zeros among the weights +(\S+ %) +(\S+ %) +$", shown) == [("2.1 %", "0.7 %")]
    left = document(growprune_says(*asked, "--ratios", 0.5, "--ignore", "layer1, layer3.1.conv1")[1])["widths"]
    assert "layer2.0.conv1" in left
    assert not [name for name in left if name.startswith("layer1") or name == "layer3.1.conv1"]
    growprune.save(smaller, tmp_path / "net.safetensors")
    assert document(growprune_says(*asked)[1])["macs"]["before"] == ours["macs"]["after"]


def test_a_run_is_measured_as_what_it_is(tmp_path: Path) -> None:
    """Whatever is said beside its folder counts; an older result tells no shape, a set that is known has one."""
    growprune.save(models.fresh("growprune.demo:network", 7), tmp_path / "model.safetensors")
    config = {"command": "train", "model": "growprune.demo:network", "data": str(tmp_path)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "result.json").write_text(json.dumps({"shape": [1, 12, 12], "classes": 7}))
    asked = "measure", "--weights", tmp_path, "--json"
    code, out, err = growprune_says(*asked)
    assert (code, err, document(out)["model"], document(out)["input"]) == (0, "", config["model"], [1, 12, 12])
    assert document(growprune_says(*asked, "--input", "1x8x8")[1])["input"] == [1, 8, 8]
    (tmp_path / "result.json").unlink()
    assert growprune_says(*asked)[0] == 2, "as 10 classes"
    assert document(growprune_says(*asked, "--num-classes", 7, "--input", "1x9x9")[1])["input"] == [1, 9, 9]
    (tmp_path / "config.json").write_text(json.dumps(config | {"data": "digits"}))
    assert document(growprune_says(*asked, "--num-classes", 7)[1])["input"] == [1, 8, 8]


def test_a_network_that_cannot_be_pruned_is_measured_all_the_same() -> None:
    code, out, _ = growprune_says("measure", "--model", "test_cli:fixed")
    assert (code, re.findall(r"parameters +(\d+)", out)) == (0, ["808"])
    assert "stays whole (" in out
    left = document(growprune_says("measure", "--model", "test_cli:fixed", "--ignore", "2", "--json")[1])["stays"]
    assert left["2"] == "it is ignored"
    code, _, err = growprune_says("measure", "--model", "test_cli:fixed", "--ratios", 0.5)
    assert (code, err.startswith("growprune: no layer of this model can be pruned")) == (2, True)


def unshaped() -> nn.Module:
    """Of whose inputs nothing is known before the first."""
    return nn.Sequential(nn.LazyConv2d(4, 9), nn.Flatten(), nn.Linear(4, 2))


def roomy() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))


@pytest.mark.parametrize("ratio", ["1.5", "abc"])
def test_a_plan_that_none_could_follow_is_told_before_the_folder_is_looked_at(ratio: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    code, _, err = growprune_says("prune", *NET, "--ratios", ratio, "--out", tmp_path)
    assert (code, err.count("\n"), err.startswith("growprune: ratios: ")) == (2, 1, True)


@pytest.mark.parametrize(
    ("script", "on_path", "called"),
    [
        ("/opt/x/growprune", True, "growprune"),
        ("/opt/x/growprune", False, "../x/growprune"),
        ("-m", False, "growprune"),
    ],
)
def test_how_it_is_called_here(
    script: str, on_path: bool, called: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("os.getcwd", lambda: "/opt/y")
    monkeypatch.setattr("sys.argv", [script])
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}" if on_path else None)
    assert console.itself() == called


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = f"{sys.executable} -m growprune measure --model resnet110 --ratios 0.5 | head -1"
    ran = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert ran.stdout.startswith("resnet110, input")
    assert ran.stderr == ""
