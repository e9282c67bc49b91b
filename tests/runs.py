"""Runs of growprune in processes of their own, to be killed, starved and compared.

`Shop.start` is `python -m growprune ...`. `Shop.fork` has it done by a process that has loaded torch once, this file
run as a script, and forks for each command: a process of its own all the same, without the seconds of loading.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-m", "growprune"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "0"}
PATIENCE, ALIVE = 120.0, 1000
LOGS = itertools.count()

NETS = '''
import os
import signal
import time

import torch
from torch import nn


class Pause(nn.Module):
    """Takes as long in training as the environment says; at a test that it names, it asks its own process to end.

    The order of the rows is drawn when it is made, and in no state dict.
    """

    tests = 0

    def __init__(self):
        super().__init__()
        self.rows = torch.randperm(8)

    def forward(self, x):
        x = x[:, :, self.rows]
        if self.training:
            time.sleep(float(os.environ.get("SLOW", "0")))
            return x
        Pause.tests += 1
        if Pause.tests == int(os.environ.get("KNOCK", "0")):
            os.kill(os.getpid(), signal.SIGTERM)
        return x


def small(num_classes=10):
    """Batch norm, before and after random numbers while it trains."""
    time.sleep(float(os.environ.get("SLOW_START", "0")))
    return nn.Sequential(
        Pause(), nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 12, 3, stride=2, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.Dropout(0.2),
        nn.Conv2d(12, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, num_classes),
    )


def coloured(num_classes=10):
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Dropout(0.2), nn.Linear(6, num_classes),
    )


def linear(num_classes=10):
    return nn.Sequential(Pause(), nn.Flatten(), nn.Linear(64, num_classes))


def deep(num_classes=10):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, num_classes))


class Bad(nn.Module):
    """Its outputs, or its gradients only, turn NaN in the sixth training step."""

    def __init__(self, num_classes, forward):
        super().__init__()
        self.net, self.steps, self.in_forward = linear(num_classes), 0, forward

    def forward(self, x):
        out = self.net(x)
        self.steps += self.training
        if self.steps == 6 and self.training:
            if self.in_forward:
                return out * torch.nan
            out.register_hook(lambda grad: grad * torch.nan)
        return out


def bad(num_classes=10):
    return Bad(num_classes, forward=True)


def bad_gradient(num_classes=10):
    return Bad(num_classes, forward=False)


def broken(num_classes=10):
    raise RuntimeError("a bug of the user's")
'''
"""Networks for grey images of 8×8, in a module such as a user has in the working folder."""


@dataclass(frozen=True)
class Done:
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The one line that it ended with."""
        assert "Traceback" not in self.err, self.err
        found = [line for line in self.err.splitlines() if line.startswith("growprune: ")]
        assert len(found) == 1, self.err
        assert self.err.endswith(f"{found[0]}\n"), self.err
        return found[0]


class Shop:
    """A folder with images and networks, where commands are run. What forks loads `modules` too beforehand; without
    `figures` no fork's run draws any for its page, which takes about as long as a small run's steps."""

    def __init__(self, path: Path, *modules: str, figures: bool = True) -> None:
        self.path, self.asking, self.figures = path, threading.Lock(), figures
        (path / "mynets.py").write_text(NETS)
        write_digits(path / "images")
        self.server = subprocess.Popen(
            [sys.executable, __file__, *modules], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=ENVIRONMENT,
        )  # fmt: skip

    def close(self) -> None:
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.close()
        self.server.wait(PATIENCE)
        self.server.stdout.close()

    # -- a process of its own ----------------------------------------------------------------------------------------

    def start(self, *arguments: object, **environment: str) -> Process:
        return Process([*COMMAND, *map(str, arguments)], self.path, environment)

    # -- a fork ------------------------------------------------------------------------------------------------------

    def ask(self, **what: Any) -> int:
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        with self.asking:
            self.server.stdin.write(json.dumps(what) + "\n")
            self.server.stdin.flush()
            return int(self.server.stdout.readline())

    def fork(self, *arguments: object, cwd: Path | None = None, limit: int | None = None, **environment: str) -> Fork:
        """`limit`: the longest file it may write."""
        out, err = log(self.path), log(self.path)
        pid = self.ask(
            arguments=[str(each) for each in arguments], cwd=str(cwd or self.path), limit=limit, out=str(out),
            err=str(err), environment=environment, figures=self.figures,
        )  # fmt: skip
        return Fork(self, pid, out, err)

    def run(self, *arguments: object, cwd: Path | None = None, limit: int | None = None, **environment: str) -> Done:
        return self.fork(*arguments, cwd=cwd, limit=limit, **environment).wait()

    def done(self, *arguments: object, **more: Any) -> Done:
        """One that must succeed."""
        found = self.run(*arguments, **more)
        assert found.code == 0, found
        return found

    def refused(self, *arguments: object, **more: Any) -> str:
        """One that must be refused: its line."""
        found = self.run(*arguments, **more)
        assert found.code == 2, found
        assert not found.out
        return found.line


class Process:
    """`python -m growprune ...`"""

    def __init__(self, command: list[str], cwd: Path, environment: dict[str, str]) -> None:
        self.stderr = log(cwd)
        with self.stderr.open("wb") as err:
            self.popen = subprocess.Popen(
                command, cwd=cwd, env={**ENVIRONMENT, **environment}, stdout=subprocess.PIPE, stderr=err, text=True
            )
        self.pid = self.popen.pid

    def alive(self) -> bool:
        return self.popen.poll() is None

    def wait(self) -> Done:
        out, _ = self.popen.communicate(timeout=PATIENCE)
        return Done(self.popen.returncode, out, self.said())

    def said(self) -> str:
        return self.stderr.read_text()

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.popen.send_signal(number)


class Fork:
    """The same, of the process that forks."""

    def __init__(self, shop: Shop, pid: int, out: Path, err: Path) -> None:
        self.shop, self.pid, self.stdout, self.stderr = shop, pid, out, err
        self.code: int | None = None

    def alive(self) -> bool:
        if self.code is None:
            code = self.shop.ask(poll=self.pid)
            self.code = code if code != ALIVE else None
        return self.code is None

    def wait(self) -> Done:
        until(lambda: not self.alive(), pause=0.01)
        assert self.code is not None
        return Done(self.code, self.stdout.read_text(), self.said())

    def said(self) -> str:
        return self.stderr.read_text()

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)


def log(folder: Path) -> Path:
    return folder / f"log-{next(LOGS)}"


def until(what: Callable[[], Any], alive: Callable[[], bool] = lambda: True, pause: float = 0.002) -> bool:
    """Wait for something, or for the process's end; did it come?"""
    end = time.monotonic() + PATIENCE
    while not what():
        if not alive():
            return bool(what())
        assert time.monotonic() < end, "it never came"
        time.sleep(pause)
    return True


# -- what came of a run ----------------------------------------------------------------------------------------------


def outcome(run: Path) -> dict[str, Any]:
    """Everything of a finished run but what a clock says."""
    return {
        "files": sorted(path.name for path in run.iterdir()),
        "network": hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest(),
        "notes": [timeless(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()],
        "result": timeless(json.loads((run / "result.json").read_text())),
    }


def timeless(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: timeless(value) for key, value in found.items() if key not in ("seconds", "ms", "latency")}
    return [timeless(value) for value in found] if isinstance(found, list) else found


def steps(run: Path) -> list[int]:
    """Of the checkpoints that bear a finished name."""
    folder = run / "checkpoints"
    return sorted(int(path.name[5:]) for path in folder.glob("step-*")) if folder.is_dir() else []


def newest(run: Path) -> Path:
    return run / "checkpoints" / f"step-{steps(run)[-1]:09d}"


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Bytes and time of every file below a folder."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def write_digits(folder: Path) -> None:
    """scikit-learn's digits as an .npz pair, which loads faster than scikit-learn does."""
    import numpy as np
    from sklearn.datasets import load_digits

    found = load_digits()
    x, y = found.images.astype(np.uint8)[..., None], found.target.astype(np.int64)
    folder.mkdir()
    for name, part in (("train", slice(0, 1200)), ("test", slice(1200, None))):
        np.savez(folder / f"{name}.npz", x=x[part], y=y[part], classes=np.array([str(i) for i in range(10)]))


# -- the process that forks ------------------------------------------------------------------------------------------


def child(asked: dict[str, Any]) -> int:
    from growprune import report
    from growprune.cli import main

    for number in (signal.SIGHUP, signal.SIGTERM):  # whatever started the tests may have had them ignored
        signal.signal(number, signal.SIG_DFL)
    os.chdir(asked["cwd"])
    sys.path[0] = asked["cwd"]
    os.environ |= asked["environment"]
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(asked[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    if asked["limit"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (asked["limit"], resource.RLIM_INFINITY))
    if not asked["figures"]:
        report.run.figures = lambda *_: {}
    try:
        main(asked["arguments"])
    except SystemExit as leaving:
        sys.stdout.flush()
        return int(leaving.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1


def serve() -> None:
    import torch

    import growprune.cli
    import growprune.jobs
    import growprune.report.figures
    import growprune.report.run  # noqa: F401

    for name in sys.argv[1:]:
        importlib.import_module(name)
    torch.set_num_threads(1)
    for line in sys.stdin:
        asked = json.loads(line)
        if "poll" in asked:
            pid, status = os.waitpid(asked["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else ALIVE
        elif (answer := os.fork()) == 0:
            os._exit(child(asked))
        print(answer, flush=True)


if __name__ == "__main__":
    serve()
