"""What people see of a run: progress on a terminal and in a log, the page, the figures, TensorBoard's events."""

import base64
import io
import math
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from growprune.errors import GrowpruneError
from growprune.report import Fitted, events, figures, run, text_table
from growprune.report.progress import Progress, Screen

# -- a clock, a log and a terminal of our own ----------------------------------------------------------------------


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


class Log(io.StringIO):
    """A log file that knows when each line came."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.stamps = clock, list[float]()

    def write(self, text: str) -> int:
        self.stamps += [self.clock.now] * text.count("\n")
        return super().write(text)

    @property
    def lines(self) -> list[str]:
        return self.getvalue().splitlines()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(clock: Clock) -> Log:
    return Log(clock)


@pytest.fixture
def plain(log: Log) -> Console:
    return Console(file=log, width=60, _environ={})  # narrow: lines of a log must not be folded


def terminal(width: int = 100) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=30, _environ={"TERM": "xterm"})


def seen(console: Console) -> list[str]:
    """The lines on a terminal after all that was written to it, cursor movements and erasures obeyed."""
    assert isinstance(console.file, io.StringIO)
    lines, row, column = [""], 0, 0
    for move, count, command, char in re.findall(r"(\x1b\[\??(\d*)[\d;]*([A-Za-z]))|(.|\n)", console.file.getvalue()):
        if char == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif char == "\r":
            column = 0
        elif char:
            lines[row] = lines[row][:column].ljust(column) + char + lines[row][column + 1 :]
            column += 1
        elif command == "A":
            row -= int(count or 1)
            assert row >= 0, "above the first line"
        elif command == "K":
            assert count == "2", "only whole lines are erased"
            lines[row] = ""
        else:
            assert command in "mhl", f"unknown to this terminal: {move!r}"
    return [line.rstrip() for line in lines]


# -- progress in a log ---------------------------------------------------------------------------------------------


def test_a_log_gets_a_line_every_ten_seconds_and_one_at_the_end(clock: Clock, log: Log, plain: Console) -> None:
    with Progress(console=plain, clock=clock) as progress:
        progress.begin("prune", 1_000)
        for step in range(1, 1_001):
            clock.now += 0.1
            progress.step(step, phase="push", penalty=step / 1_000, accuracy=90.0, loss=0.5, ms=99.0)
        progress.end()
    assert 9 <= len(log.lines) - 1 <= 10
    stamps = log.stamps[:-1]
    assert min(b - a for a, b in pairwise(stamps)) > 9.9
    assert log.lines[0] == (
        "prune push: 100 of 1,000 steps, λ 0.1000, accuracy 90.0 %, loss 0.5, 99.0 ms a step, 1 min 30 s left"
    )
    assert log.lines[-1] == ("prune: 1,000 steps, λ 1.0000, accuracy 90.0 %, loss 0.5, 99.0 ms a step, 1 min 40 s")


def test_a_night_does_not_fill_a_log(clock: Clock, log: Log, plain: Console) -> None:
    with Progress(console=plain, clock=clock) as progress:
        progress.begin("train", 36_000)
        for step in range(1, 36_001):
            clock.now += 1
            progress.step(step)
        progress.end()
    assert 100 < len(log.lines) < 300
    assert max(b - a for a, b in pairwise(log.stamps)) < 900


def test_runs_side_by_side_take_turns_in_a_log(clock: Clock, log: Log, plain: Console) -> None:
    with ExitStack() as stack:
        all_four = [stack.enter_context(Progress(f"seed {i}", console=plain, clock=clock)) for i in range(4)]
        for progress in all_four:
            progress.begin("train", 400)
        for step in range(1, 401):
            clock.now += 1
            for progress in all_four:
                progress.step(step)
        for progress in all_four:
            progress.end()
    assert 20 <= len(log.lines) - 4 <= 40
    assert {line.split(":")[0] for line in log.lines} == {f"seed {i}" for i in range(4)}


def test_those_that_have_ended_do_not_make_the_others_lines_rarer(clock: Clock, plain: Console) -> None:
    with ExitStack() as stack:
        for i in range(8):
            ended = stack.enter_context(Progress(f"seed {i}", console=plain, clock=clock))
            ended.begin("train", 10)
            ended.close()
        last = stack.enter_context(Progress("last", console=plain, clock=clock))
        last.begin("train", 10)
        assert last.screen is not None
        assert last.screen.users == 1
        assert last.interval(clock.now) == 10


def test_a_short_stage_is_one_line_and_leaves_nothing_to_the_next(clock: Clock, log: Log, plain: Console) -> None:
    with Progress("vgg", console=plain, clock=clock) as progress:
        progress.begin("prune", 4)
        for step in range(1, 5):
            clock.now += 0.5
            progress.step(step, phase="push", penalty=0.5, accuracy=50.0, loss=1.0)
        progress.end()
        progress.begin("finetune", 2)
        clock.now += 1
        progress.step(2, phase="finetune")
        progress.end()
        progress.begin("forgotten", 1)
        progress.begin("last", 1)
        progress.end()
        progress.say("saved [bold]to[/bold] :smile: out/model.safetensors " + "x" * 80)
    assert log.lines == [
        "vgg: prune: 4 steps, λ 0.5000, accuracy 50.0 %, loss 1, 500.0 ms a step, 2.0 s",
        "vgg: finetune: 2 steps, 500.0 ms a step, 1.0 s",
        "vgg: forgotten: 0 steps, 0.0 s",
        "vgg: last: 0 steps, 0.0 s",
        "vgg: saved [bold]to[/bold] :smile: out/model.safetensors " + "x" * 80,
    ]


def test_time_left_counts_the_steps_done_now(clock: Clock, log: Log, plain: Console) -> None:
    with Progress(total=2_000, console=plain, clock=clock) as progress:
        progress.begin("prune", 1_000, done=900)
        for step in range(901, 921):
            clock.now += 1
            progress.step(step)
        progress.end()
    assert (
        "910 of 1,000 steps, 1000.0 ms a step, 1 min 30 s left in this stage, 18 min 10 s left in all" in log.lines[0]
    )
    assert log.lines[-1] == "prune: 920 steps (20 of them now), 1000.0 ms a step, 20.0 s"


def test_time_left_of_the_whole_knows_the_stages_before(clock: Clock) -> None:
    progress = Progress(total=600, quiet=True, clock=clock)
    progress.begin("train", 100)
    progress.end()
    progress.begin("prune", 300)
    clock.now += 10
    progress.step(10)
    assert progress.left(clock.now) == (290.0, 490.0)
    progress.begin("finetune", 200)
    clock.now += 10
    progress.step(10)
    assert progress.left(clock.now) == (190.0, None)  # the last stage: the same
    resumed = Progress(total=600, quiet=True, clock=clock)
    resumed.begin("prune", 300, done=50, before=100)
    clock.now += 10
    resumed.step(60)
    assert resumed.left(clock.now) == (240.0, 440.0)


def test_a_first_step_that_compiles_does_not_count_once_there_are_others(clock: Clock) -> None:
    progress = Progress(quiet=True, clock=clock)
    progress.begin("train", 101)
    assert progress.left(clock.now) == (None, None)
    clock.now += 60
    progress.step(1)
    assert progress.left(clock.now)[0] == 6_000
    for step in range(2, 12):
        clock.now += 1
        progress.step(step)
    assert progress.left(clock.now)[0] == pytest.approx(90)


def test_a_stage_ends_with_the_mean_of_its_steps_not_of_the_last_ones(clock: Clock, log: Log, plain: Console) -> None:
    with Progress(console=plain, clock=clock) as progress:
        progress.begin("train", 1_000, done=100)
        progress.step(400, ms=2.0)
        progress.step(500)
        progress.step(1_000, ms=5.0)
        progress.end()
    assert log.lines == ["train: 1,000 steps (900 of them now), 4.0 ms a step, 0.0 s"]


def test_a_stage_that_is_left_halfway_says_so(clock: Clock, log: Log, plain: Console) -> None:
    def interrupted() -> None:
        with Progress("run", console=plain, clock=clock) as progress:
            progress.begin("train", 1_000)
            progress.step(7)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert log.lines == ["run: train: stopped after 7 of 1,000 steps"]


@pytest.mark.parametrize("console", [None, terminal()])
def test_quiet_shows_nothing(console: Console | None, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("run", quiet=True, total=9, console=console) as progress:
        progress.begin("train", 9)
        progress.step(9, accuracy=1.0)
        progress.say("hush")
        progress.end()
    assert capsys.readouterr() == ("", "")
    assert console is None or seen(console) == [""]


def test_without_a_console_it_is_stderr(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    with Progress() as progress:
        progress.begin("train", 1)
        progress.step(1)
        progress.end()
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"train: 1 steps, [\d.]+ ms a step, 0\.0 s\n", err)


@pytest.mark.parametrize("make", [terminal, lambda: Console(file=io.StringIO())])
def test_a_step_is_cheap(make: Callable[[], Console]) -> None:
    with Progress(console=make(), total=40_000) as progress:
        progress.begin("prune", 20_000)
        started = time.perf_counter()
        for step in range(20_000):
            progress.step(step, phase="push", penalty=0.1, accuracy=93.0, loss=0.1, ms=5.0)
        assert (time.perf_counter() - started) / 20_000 < 50e-6


# -- progress on a terminal ------------------------------------------------------------------------------------------


def test_a_terminal_shows_stage_phase_penalty_accuracy_time_and_what_is_left(clock: Clock) -> None:
    console, threads = terminal(), threading.active_count()
    with Progress("seed 0", total=20_000, console=console, clock=clock) as progress:
        progress.begin("prune", 1_000)
        for step in range(1, 501):
            clock.now += 1
            progress.step(step, phase="push", penalty=0.25, accuracy=92.0, ms=5.1)
        frame = seen(console)
        assert len([line for line in frame if line]) == 1
        assert re.fullmatch(r"seed 0 prune push ━+╺?━+  50% λ 0\.2500 92\.0 % 5\.1 ms left 8:20, all 5:25:00", frame[0])
        progress.end()
        over = ["seed 0: prune: 500 steps, λ 0.2500, accuracy 92.0 %, 5.1 ms a step, 8 min 20 s"]
        assert [line for line in seen(console) if line] == over
        assert threading.active_count() == threads  # none draws behind our back
    assert seen(console) == [*over, ""]
    assert Screen.of(console).bars.tasks == []


def test_runs_side_by_side_share_the_screen(clock: Clock) -> None:
    console = terminal()
    with Progress("[a]", console=console, clock=clock) as first:
        first.begin("train", 100)
        with Progress("[b]", console=console, clock=clock) as second:
            second.begin("prune", 100)
            for step in range(1, 51):
                clock.now += 1
                first.step(step, accuracy=10.0)
                second.step(2 * step, penalty=0.5)
                if step == 20:
                    first.say("half a notice")
                    second.say("the other half")
                shown = [line for line in seen(console) if line]
                notices = ["[a]: half a notice", "[b]: the other half"] if step >= 20 else []
                assert shown[:-2] == notices
                assert re.match(r"\[a\] train [━╸]", shown[-2])
                assert re.match(r"\[b\] prune [━╸]", shown[-1])
            second.end("over")
            assert [re.split(" [━╸]", line)[0] for line in seen(console) if line] == [
                *notices,
                "[b]: prune: over",
                "[a] train",
            ]
        clock.now += 1
        first.step(60)
        assert " 60% " in seen(console)[3]
        first.end("over too")
    assert seen(console) == [*notices, "[b]: prune: over", "[a]: train: over too", ""]


def test_runs_side_by_side_do_not_draw_more_often(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    console, drawn = terminal(), list[float]()
    with ExitStack() as stack:
        many = [stack.enter_context(Progress(str(i), console=console, clock=clock)) for i in range(8)]
        for progress in many:
            progress.begin("train", 1_000)
        monkeypatch.setattr(many[0].screen.bars, "refresh", lambda: drawn.append(clock.now))
        for step in range(1_000):
            clock.now += 0.01
            for progress in many:
                progress.step(step)
        assert 30 <= len(drawn) <= 41
        monkeypatch.undo()


def test_those_without_a_console_share_one() -> None:
    first, second, quiet = Progress("a"), Progress("b"), Progress("c", quiet=True)
    assert first.screen is second.screen is Screen.of(None)
    assert quiet.screen is None
    assert first.screen is not Progress("d", console=terminal()).screen
    del first, second
    assert not Screen.known.get(0)  # the next one looks at stderr anew


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal(width: int, clock: Clock) -> None:
    console = terminal(width)
    with Progress("a label of some length", total=10**6, console=console, clock=clock) as progress:
        progress.begin("prune", 100_000)
        for step in range(1, 20):
            clock.now += 1
            progress.step(step, phase="stabilize", penalty=1.0001, accuracy=100.0, ms=123.4)
        assert max(map(len, seen(console))) <= width
        if width >= 100:
            assert "left 27:46:21, all 277:46:21" in seen(console)[0]


def test_results_that_are_printed_meanwhile_stay_on_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with Progress() as progress:
        progress.begin("train", 2)
        print("a result")
    out, err = capsys.readouterr()
    assert out == "a result\n"
    assert "train" in err


# -- a run's result and notes ----------------------------------------------------------------------------------------

LAYERS = ("layer1.0.conv1", "layer1.1.conv1", "layer2.0.conv1")
ENVIRONMENT = {
    "growprune": "1.0",
    "torch": "2.9",
    "python": "3.11",
    "device": "cuda",
    "device_name": "Some GPU",
    "cores": 16,
    "threads": 8,
    "world": 1,
}


def result(**changes: Any) -> dict[str, Any]:
    """Of a GReg-2 run over filters."""
    return {
        "command": "prune",
        "accuracy": {"base": 93.41, "before_removal": 91.5, "after_removal": 88.0, "final": 93.12, "best": 93.25},
        "params": {"before": 853_018, "after": 420_000},
        "macs": {"before": 125_485_696, "after": 49_210_000},
        "speedup": 2.55,
        "sparsity": 0.5076,
        "model": "resnet56",
        "data": "cifar10",
        "images": {"train": 50_000, "test": 10_000},
        "latency": {"before": 0.0051, "after": 0.0033, "ratio": 1.545, "batch": 256},
        "steps": 1_300,
        "seconds": 1_234.5,
        "seed": 0,
        "schedule": {"name": "GReg2", "delta_lambda": 0.0001, "tau": 1.0, "ku": 10, "ks": 200, "gamma": None},
        "criterion": "l1",
        "granularity": "filter",
        "scope": "filter",
        "ratios": "[0, 0.5, 0.5]",
        "widths": {LAYERS[0]: [16, 8], LAYERS[1]: [16, 16], LAYERS[2]: [32, 12]},
        "choices": {
            "prune": {"layout": "channels_last", "precision": "bf16", "compile": False, "kernels": 0, "ms": 4.912},
            "finetune": {"layout": "contiguous", "precision": "fp32", "compile": True, "graph": None, "ms": 3.2},
        },
        "epochs": {"prune": 5.5, "finetune": 120},
        "environment": ENVIRONMENT,
    } | changes


def trained(**changes: Any) -> dict[str, Any]:
    nothing = {"schedule": None, "criterion": None, "granularity": None, "scope": None, "ratios": None}
    accuracy = {"base": None, "before_removal": None, "after_removal": None, "final": 93.41, "best": 93.5}
    same = {"params": {"before": 853_018, "after": 853_018}, "macs": {"before": 125_485_696, "after": 125_485_696}}
    choices = {"train": {"layout": "channels_last", "precision": "bf16", "compile": False, "ms": 4.9}}
    more = {"command": "train", "accuracy": accuracy, "widths": {}, "choices": choices, "epochs": {"train": 200}}
    return result(**nothing, **same, **more, speedup=1.0, sparsity=0.0, latency=None) | changes


def weights(**changes: Any) -> dict[str, Any]:
    same = {"params": {"before": 1_000, "after": 1_000}, "macs": {"before": 9_000, "after": 9_000}}
    return result(granularity="weight", widths={}, sparsity=0.9, speedup=1.0, **same) | changes


def note(stage: str, phase: str, step: int, **more: Any) -> dict[str, Any]:
    always = {"epoch": step / 100, "accuracy": 90.0, "loss": 0.5, "lr": 0.001, "seconds": step / 10, "ms": 5.0}
    return {"stage": stage, "phase": phase, "step": step} | always | more


def pruned_notes() -> list[dict[str, Any]]:
    """GReg-2: picks until 200, pushes until 800, stabilizes until 1,000, fine-tunes until 1,300."""
    notes = []
    for step in range(0, 1_001, 100):
        phase = "pick" if step <= 200 else "push" if step <= 800 else "stabilize"
        penalty = min(step, 800) / 800
        layers = {
            name: {"kept": 0.1 + 0.01 * i, "pruned": 0.1 * math.exp(-20 * penalty * (i + 1))}
            for i, name in enumerate(LAYERS)
        }
        told: dict[str, Any] = {"lambda": penalty, "layers": None if phase == "pick" else layers}
        notes.append(note("prune", phase, step, accuracy=93.4 - 2 * penalty, loss=0.01 + penalty, **told))
    notes.append(note("prune", "removal", 1_000, accuracy=88.0, before=91.5, loss=None, ms=None, layers=None))
    return notes + [note("finetune", "finetune", 1_000 + s, accuracy=90 + s / 100) for s in (100, 200, 300)]


def trained_notes() -> list[dict[str, Any]]:
    return [note("train", "train", step, accuracy=10 + step / 10, loss=2.3 / (1 + step)) for step in range(0, 800, 50)]


def without_numbers(notes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [n | dict.fromkeys(n.keys() & {"accuracy", "before", "loss", "ms", "lambda", "layers"}) for n in notes]


class Page(HTMLParser):
    """Reads a page, and insists that its tags are closed in order."""

    VOID = ("meta", "img", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.images: dict[str, bytes] = {}
        self.seen: set[str] = set()
        self.text = self.title = ""
        self.rows: list[list[str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        if tag == "img":
            found = dict(attrs)
            kind, _, data = str(found["src"]).partition(",")
            assert kind == "data:image/png;base64"
            self.images[str(found["alt"])] = base64.b64decode(data, validate=True)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
        if self.open and self.open[-1] == "title":
            self.title += data
        elif self.open and self.open[-1] != "style":
            self.text += data

    def row(self, first: str) -> list[str]:
        return next(row for row in self.rows if row[0] == first)


KINDS: dict[str, tuple[dict[str, Any], list[dict[str, Any]], set[str]]] = {
    "filters": (result(), pruned_notes(), {"history", "penalty", "widths"}),
    "weights": (weights(), pruned_notes(), {"history", "penalty"}),
    "training": (trained(), trained_notes(), {"history"}),
    "one-shot": (
        result(schedule={"name": "OneShot"}, latency=None),
        [pruned_notes()[5] | {"step": 1_000, "phase": "start", "lambda": 0.0}, *pruned_notes()[-4:]],
        {"history", "widths"},
    ),
    "a single note": (trained(), trained_notes()[:1], {"history"}),
    "a single note of pushing": (result(), pruned_notes()[5:6], {"history", "penalty", "widths"}),
    "no note": (trained(), [], set()),
    "nothing but nulls": (
        result(
            accuracy=dict.fromkeys(("base", "before_removal", "after_removal", "final", "best")),
            latency=None,
            choices={},
            epochs={},
        ),
        without_numbers(pruned_notes()),
        {"widths"},
    ),
    "not finite": (
        trained(),
        [*trained_notes(), note("train", "train", 900, accuracy=math.nan, loss=math.inf)],
        {"history"},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_has_its_page_and_its_table(kind: str) -> None:
    outcome, notes, wanted = KINDS[kind]
    page = Page(run.page(outcome, notes))
    assert set(page.images) == wanted
    for png in page.images.values():
        assert png.startswith(b"\x89PNG")
        width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))
        assert width > 800
        assert height > 200
    assert page.title == run.headline(outcome)
    assert not page.seen & {"link", "script", "iframe", "base"}
    for line in ("Some GPU", "20 min 34 s", "growprune resume RUN", "config.json", f"growprune {outcome['command']}"):
        assert line in page.text
    assert not re.search(r"\bNone\b|\bnan\b|\{|\}", page.text)
    out = io.StringIO()
    Console(file=out, width=120).print(run.table(outcome))
    assert out.getvalue().startswith(run.headline(outcome))
    assert not re.search(r"\bNone\b|\bnan\b", out.getvalue())


def test_the_headline_is_the_outcome() -> None:
    assert run.headline(result()) == "resnet56 on cifar10: 2.55× fewer MACs, 93.4 % → 93.1 %"
    assert run.headline(weights()) == "resnet56 on cifar10: 90.0 % of the weights zero, 93.4 % → 93.1 %"
    assert run.headline(trained()) == "resnet56 on cifar10: 93.4 % accuracy"


def test_the_page_holds_the_numbers_of_the_result() -> None:
    page = Page(run.page(result(), [], drawn={}))
    assert page.images == {}
    assert page.row("fine-tuned") == ["fine-tuned", "93.12 %", "−0.29"]
    assert page.row("base network") == ["base network", "93.41 %", ""]
    assert page.row("parameters") == ["parameters", "853,018", "420,000", "2.03×"]
    assert page.row("MACs an image") == ["MACs an image", "125,485,696", "49,210,000", "2.55×"]
    assert page.row("time of a forward pass")[1:] == ["5.10 ms", "3.30 ms", "1.54×"]
    assert page.row("schedule")[1] == "GReg-2: delta_lambda 0.0001, tau 1, ku 10, ks 200"
    assert page.row("images")[1] == "50,000 to train on, 10,000 to test on"
    assert page.row("epochs of prune")[1] == "5.5"
    assert page.row("device_name")[1] == "Some GPU"
    head = ["stage", "layout", "precision", "compile", "layers with own kernels", "ms a step", "graph"]
    assert page.row("stage") == head
    assert page.row("prune") == ["prune", "channels_last", "bf16", "no", "0", "4.912", "–"]
    assert page.row("finetune") == ["finetune", "contiguous", "fp32", "yes", "–", "3.2", "–"]
    assert "GReg-2 removed 28 of 64 filters in 2 layers (criterion l1, ratios [0, 0.5, 0.5]" in page.text
    assert "from 91.5 % to 88.0 %; fine-tuning for 120 epochs ended at 93.1 %, 0.29 points below the base" in page.text
    assert "10,000 test images: one of them is 0.01 points" in page.text


@pytest.mark.parametrize(
    ("change", "told"),
    [({}, False), ({"prune_norm": "batch"}, False), ({"prune_norm": "fixed"}, True),
     ({"prune_norm": "fixed", "schedule": {"name": "OneShot"}}, False)],
)  # fmt: skip
def test_batch_norm_that_was_fixed_is_told(change: dict[str, Any], told: bool) -> None:
    """Where something was pushed; older results do not know of it."""
    (first, _) = run.story(result() | change)
    assert (", batch norm fixed meanwhile)." in first) == told


def test_removal_that_costs_nothing_is_told_so() -> None:
    accuracy = {"base": 93.4, "before_removal": 93.01, "after_removal": 93.0, "final": 93.4, "best": 93.5}
    (first, _) = run.story(result(accuracy=accuracy, epochs={}))
    assert first.endswith("Removal itself left accuracy at 93.0 %; the run ended at 93.4 %, as the base network.")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, True),
        ({"scope": "path"}, False),
        ({"schedule": {"name": "OneShot"}}, False),
        ({"granularity": "weight", "widths": {}}, False),
    ],
)
def test_removal_that_costs_much_says_what_costs_less(change: dict[str, Any], told: bool) -> None:
    """If there is something: of filters that were pushed, and not their whole path."""
    accuracy = {"base": 93.4, "before_removal": 90.0, "after_removal": 84.9, "final": 93.4, "best": 93.5}
    (first, _) = run.story(result(accuracy=accuracy) | change)
    assert ("to 84.9 % (where batch norm follows, --scope path makes removal cost little); " in first) == told
    (first, _) = run.story(result(accuracy=accuracy | {"after_removal": 85.0}) | change)
    assert "--scope path" not in first


def test_one_epoch_is_one_and_a_speed_up_is_called_so() -> None:
    (first, _) = run.story(result(epochs={"finetune": 1.0}, ratios="2.55x"))
    assert "fine-tuning for 1 epoch ended" in first
    assert "criterion l1, speed-up 2.55×" in first


def test_a_base_network_has_no_before_and_after() -> None:
    page = Page(run.page(trained(), [], drawn={}))
    assert [row for row in page.rows if "before" in " ".join(row) or "removal" in " ".join(row)] == []
    assert page.row("trained") == ["trained", "93.41 %"]
    assert page.row("parameters") == ["parameters", "853,018"]


def test_single_weights_are_told_by_sparsity() -> None:
    page = Page(run.page(weights(), [], drawn={}))
    assert page.row("weights at zero") == ["weights at zero", "", "90.0 %", ""]
    assert "set to zero 90.0 % of the weights" in page.text


def test_what_nothing_is_known_of_has_no_heading() -> None:
    assert "Chosen on this machine" in run.page(result(), [], {})
    assert "Chosen on this machine" not in run.page(result(choices={}), [], {})


def test_what_a_name_holds_is_text() -> None:
    evil = '<script>alert("1")</script> & $x^2$ [bold]'
    outcome = result(
        model=evil,
        data=evil,
        criterion=evil,
        ratios=evil,
        command=evil,
        widths={evil: [4, 2], "$\\frac$": [8, 1]},
        choices={evil: {evil: evil}},
        epochs={evil: 1},
        environment={**ENVIRONMENT, "device_name": evil, "growprune": evil},
    )
    notes = [n | {"layers": {evil: {"kept": 1.0, "pruned": 0.1}}, "lambda": 0.1} for n in pruned_notes()]
    text = run.page(outcome, notes)
    page = Page(text)
    assert "script" not in page.seen
    assert "<script" not in text
    assert page.title.count(evil) == 2
    assert page.row("criterion")[1] == evil
    assert [evil, evil] in page.rows
    assert set(page.images) == {"history", "penalty", "widths"}
    out = io.StringIO()
    Console(file=out, width=400).print(run.table(outcome))
    assert out.getvalue().splitlines()[0].count(evil) == 2
    assert f"ratios {evil}" in out.getvalue()
    Console(file=out, width=400).print(text_table([("[red]head", ""), ("[bold]cell[/bold]", "[/x]")]))
    assert re.search(r"\[red\]head.*\n.*\n.*\[bold\]cell\[/bold\] +\[/x\]", out.getvalue())


@pytest.mark.parametrize("terminal", [True, False])
def test_a_folders_long_name_is_whole_beside_what_came_of_it(terminal: bool) -> None:
    name = "of_a_model_with_a_very_long_name-on_a_set_with_another"
    rows = [("", "accuracy", "fine-tuned"), *((f"from runs/{name}-{n}", "93.10 ± 0.10 (2)", "92.00") for n in (1, 2))]
    out = io.StringIO()
    console = Console(file=out, width=60, force_terminal=terminal, color_system=None, _environ={})
    console.print(Fitted(rows), crop=False)
    lines = out.getvalue().splitlines()
    assert "…" not in out.getvalue()
    assert (max(map(len, lines)) <= 60) == terminal
    for number in (1, 2):
        assert any(f"{name}-{number}" in line for line in lines) != terminal
    assert "".join(line.partition("   ")[0].strip() for line in lines).count(name) == 2


# -- what the figures draw -------------------------------------------------------------------------------------------


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Figure]:
    """The figure as matplotlib has it, instead of its PNG."""
    monkeypatch.setattr(figures, "png", lambda figure: figure)
    return lambda figure: figure


def curves(axes: Any) -> dict[str, list[tuple[float, float]]]:
    found = {}
    for index, line in enumerate(axes.get_lines()):
        label = str(line.get_label())
        label = f"line {index}" if label.startswith("_") else label
        found[label] = list(zip(*(map(float, data) for data in line.get_data()), strict=True))
    return found


def test_the_history_falls_straight_at_removal(drawn: Callable[[Any], Figure]) -> None:
    accuracy, loss, strip = drawn(figures.history(pruned_notes(), 93.41)).axes
    lines = curves(accuracy)
    assert lines["removal, 91.5 → 88.0 %"] == [(1_000, 91.5), (1_000, 88.0)]
    assert lines["accuracy"][10:14] == [(1_000, 91.4), (1_000, 91.5), (1_000, 88.0), (1_100, 91.0)]
    assert {y for _, y in lines["base network, 93.4 %"]} == {93.41}
    assert len(curves(loss)["line 0"]) == len(pruned_notes()) - 1  # removal has none
    bars = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in strip.patches]
    assert bars == [(0, 200), (200, 800), (800, 1_000), (1_000, 1_300)]
    assert [text.get_text() for text in strip.texts] == ["pick", "push", "stabilize", "finetune"]
    assert strip.get_xlabel() == "training steps"
    assert strip.get_xlim()[1] > 1_300


def test_a_phase_too_short_for_its_name_has_it_above(drawn: Callable[[Any], Figure]) -> None:
    notes = [note("prune", phase, step) for phase, step in (("push", 980), ("stabilize", 1_000))]
    *_, strip = drawn(figures.history(notes)).axes
    push, stabilize = strip.texts
    assert (push.get_text(), push.get_position()) == ("push", (490, 0))
    assert (stabilize.get_text(), stabilize.get_position()[0]) == ("stabilize", 990)
    top = strip.get_ylim()[1]
    assert top < stabilize.get_position()[1] < min(bar.get_y() for bar in strip.patches)  # the axis points down


def test_a_single_note_is_a_dot(drawn: Callable[[Any], Figure]) -> None:
    for axes in drawn(figures.history(trained_notes()[:1])).axes:
        assert [line.get_marker() for line in axes.get_lines()] == ["o"]
    for axes in drawn(figures.penalty(pruned_notes()[5:6])).axes:
        assert axes.get_xlim()[0] == 0
        ticks = [label.get_text() for label in axes.get_xticklabels()]
        assert len(set(ticks)) == len(ticks)


def test_the_history_of_a_base_network_needs_no_strip(drawn: Callable[[Any], Figure]) -> None:
    accuracy, loss = drawn(figures.history(trained_notes())).axes
    assert list(curves(accuracy)) == ["accuracy"]
    assert loss.get_yscale() == "log"
    (only,) = drawn(figures.history([n | {"loss": None} for n in trained_notes()])).axes
    assert only.get_ylabel() == "accuracy (%)"
    assert only.get_title(loc="left") == "Accuracy over the run"


def test_the_penalty_is_drawn_with_every_layer_and_the_median(drawn: Callable[[Any], Figure]) -> None:
    penalty, magnitude = drawn(figures.penalty(pruned_notes())).axes
    assert curves(penalty)["line 0"] == [(s, min(s, 800) / 800) for s in range(0, 1_001, 100)]
    lines = curves(magnitude)
    assert len(lines) == 2 * len(LAYERS) + 2
    steps = list(range(300, 1_001, 100))  # picked from there on
    assert lines["kept, median of 3 layers"] == [(s, pytest.approx(0.11)) for s in steps]
    assert [y for _, y in lines["pruned, median of 3 layers"]] == [
        pytest.approx(max(0.1 * math.exp(-40 * min(s, 800) / 800), 1e-6)) for s in steps
    ]
    assert magnitude.get_yscale() == "log"


def test_the_penalty_is_that_of_the_prune_stage(drawn: Callable[[Any], Figure]) -> None:
    later = [n | {"step": n["step"] + 800} for n in pruned_notes()]
    penalty, _ = drawn(figures.penalty([n | {"lambda": 0.0} for n in trained_notes()] + later)).axes
    assert penalty.get_xlim()[0] == 800
    assert curves(penalty)["line 0"][0] == (800, 0.0)


def test_a_layer_that_loses_nothing_has_no_pruned_line(drawn: Callable[[Any], Figure]) -> None:
    layers = {
        "a": {"kept": 0.1, "pruned": None},
        "b": {"kept": 0.3, "pruned": math.nan},
        "c": {"kept": 0.2, "pruned": 0.05},
    }
    notes = [note("prune", "push", s, layers=layers) for s in (10, 20)]
    (magnitude,) = drawn(figures.penalty(notes)).axes
    lines = curves(magnitude)
    assert lines["pruned, median of 1 layers"] == [(10, 0.05), (20, 0.05)]
    assert lines["kept, median of 3 layers"] == [(10, 0.2), (20, 0.2)]


def test_the_widths_of_a_deep_network_fit_a_page(drawn: Callable[[Any], Figure]) -> None:
    deep = drawn(figures.widths({f"layer{i}": [64, 64 - i] for i in range(54)}))
    assert deep.get_figheight() < 11
    (axes,) = deep.axes
    assert [text.get_text() for text in axes.texts][:2] == ["64 → 64", "64 → 63"]
    assert [label.get_text() for label in axes.get_yticklabels()][-1] == "layer53"


# -- TensorBoard -----------------------------------------------------------------------------------------------------


def read_back(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return {tag: [(event.step, pytest.approx(event.value)) for event in accumulator.Scalars(tag)] for tag in tags}


def test_events_hold_the_numbers_of_the_notes(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    written = events.Events(tmp_path / "events")
    layers = {"conv1": {"kept": 0.2, "pruned": math.nan}, "conv2": {"kept": 0.3, "pruned": 0.1}}
    written.note(note("prune", "push", 10, layers=layers) | {"lambda": 0.25})
    written.note(note("prune", "removal", 20, before=91.0, accuracy=89.0, loss=None, layers=None))
    written.close()
    assert read_back(tmp_path / "events") == {
        "accuracy": [(10, 90.0), (20, 89.0)],
        "accuracy/before_removal": [(20, 91.0)],
        "loss": [(10, 0.5)],
        "lr": [(10, 0.001), (20, 0.001)],
        "lambda": [(10, 0.25)],
        "ms": [(10, 5.0), (20, 5.0)],
        "separation/conv1/kept": [(10, 0.2)],
        "separation/conv2/kept": [(10, 0.3)],
        "separation/conv2/pruned": [(10, 0.1)],
    }


def test_a_note_is_in_the_file_before_the_run_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    written = events.Events(tmp_path)
    for step in range(3):
        written.note(note("prune", "push", step, layers={f"conv{i}": {"kept": 0.2, "pruned": 0.1} for i in range(50)}))
        (file,) = tmp_path.iterdir()
        size = file.stat().st_size
    written.close()
    assert file.stat().st_size == size > 3 * 100 * 20


@pytest.mark.parametrize("from_step", [0, 30])
def test_after_a_resume_no_step_is_told_twice(tmp_path: Path, from_step: int) -> None:
    pytest.importorskip("tensorboard")
    killed = events.Events(tmp_path)
    for step in (10, 20, 30, 40):
        killed.note(note("train", "train", step, accuracy=1.0))
    resumed = events.Events(tmp_path, from_step)
    for step in range(max(10, from_step), 60, 10):
        resumed.note(note("train", "train", step, accuracy=2.0))
    resumed.close()
    killed.close()
    expected = [(step, 1.0 if step < from_step else 2.0) for step in (10, 20, 30, 40, 50)]
    assert read_back(tmp_path)["accuracy"] == expected


def test_without_tensorboard_one_line_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(GrowpruneError, match=r"^[^\n]*pip install tensorboard[^\n]*$"):
        events.Events(tmp_path / "events")
    assert not (tmp_path / "events").exists()


# -- what it costs to load -------------------------------------------------------------------------------------------


def test_nothing_heavy_is_loaded_before_it_is_needed() -> None:
    code = (
        "import sys; from growprune.report import events, progress, run;"
        "assert not {'torch', 'matplotlib', 'tensorboard', 'numpy'} & set(sys.modules); print('ok')"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "ok\n"


def test_a_reader_that_goes_away_does_not_end_the_run() -> None:
    """As in `growprune train 2>&1 | head -1`: rich ends the program when the pipe breaks; a run must go on."""
    code = (
        "import sys, time\n"
        "from growprune.report.progress import Progress\n"
        "with Progress() as progress:\n"
        "    for number in range(50):\n"
        "        progress.say(f'line {number}')\n"
        "        time.sleep(0.01)\n"
        "sys.stderr.write('what is flushed at the end')\n"
        "print('finished')\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stderr.readline() == "line 0\n"
        child.stderr.close()
        assert (child.stdout.read(), child.wait()) == ("finished\n", 0)
