"""The command line as a user meets it: help, results, and one line for every mistake."""

import inspect
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import growprune
from growprune import cli
from growprune.demo import DemoConfig

TINY = {"train_images": 256, "base_epochs": 1, "delta_lambda": 0.25, "ks": 3, "finetune_epochs": 1}


def growprune_says(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command."""
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert isinstance(left.value.code, int)
    out, err = capsys.readouterr()
    return left.value.code, out, err


# -- help ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [("--help",), ("demo", "--help"), ("measure", "-h"), ("--version",), ("dmeo",)])
def test_what_needs_no_network_loads_none(arguments: tuple[str, ...]) -> None:
    script = (
        "import sys\nfrom growprune.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: print(sorted({m.partition('.')[0] for m in sys.modules}))\n"
    )
    ran = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True)
    loaded = ran.stdout.splitlines()[-1]
    assert "'typer'" in loaded
    assert [name for name in ("torch", "numpy", "matplotlib", "sklearn", "safetensors") if f"'{name}'" in loaded] == []


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ((), ("--help",), ("-h",)):
        code, out, err = growprune_says(capsys, *arguments)
        assert (code, err) == (0, "")
        assert re.search(r"^  demo +Train, prune, fine-tune and compare: no download, no GPU\.$", out, re.MULTILINE)
        assert re.search(r"^  measure +What a network costs, or a plan would give\.$", out, re.MULTILINE)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert growprune_says(capsys, "--version") == (0, f"growprune {growprune.__version__}\n", "")


def test_it_also_runs_as_a_module() -> None:
    ran = subprocess.run([sys.executable, "-m", "growprune", "--version"], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, f"growprune {growprune.__version__}\n")


def test_the_demos_options_default_to_its_config() -> None:
    config = DemoConfig()
    for name, parameter in inspect.signature(cli.demo).parameters.items():
        if name not in ("out", "as_json"):
            assert parameter.default == getattr(config, name)


# -- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("dmeo", "No such command 'dmeo'. Did you mean 'demo'?"),
        ("demo --sed 3", "--seed"),
        ("--frob", "No such option: --frob"),
        ("demo --seed x", "'--seed'"),
        ("demo --seed -1", "'--seed'"),
        ("demo --scope pth", "'--scope'"),
        ("demo --ratio 1.5", "ratio: 1.5 is outside (0, 1)"),
        ("demo --device tpu", "device: 'tpu' cannot be used here; give auto, cpu or cuda"),
        ("demo --out FILE", "FILE: File exists; name another folder with --out"),
        ("demo --out FILE/below", "FILE/below: Not a directory; name another folder with --out"),
        ("demo --out .", "not a demo's folder; name another folder with --out"),
        ("measure", "Missing option '--model'"),
        ("measure --model resnet56 --ratios 0.5 --speedup 2", "give --ratios SPEC or --speedup X, not both"),
        ("measure --model resnet56 --ratios", "'--ratios' requires an argument"),
        ("measure --model resnet56 --speedup 2 more", "more"),
        ("measure --model resnet65 --ratios 0.5", "did you mean 'resnet56'?"),
        ("measure --model resnet20 --ratios 2", "2.0 is outside"),
        ("measure --model resnet20 --ratios half", "'half' is not a number"),
        ("measure --model resnet20 --ratios ''", "'' is not a number"),
        ("measure --model resnet20 --speedup 900", "no ratio gives 900x"),
        ("measure --model resnet20 --ratios 0.5 --input 3x", "--input: '3x' is no shape"),
        ("measure --model resnet20 --ratios 0.5 --input 3x0x8", "--input: '3x0x8' is no shape"),
        ("measure --model resnet20 --ratios 0.5 --input 1x32x32", "the model fails on the example"),
        ("measure --model test_cli:fixed --ratios 0.5 --num-classes 5", "--num-classes: test_cli:fixed takes no such"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_text("precious")
    code, out, err = growprune_says(capsys, *[a.strip("'") for a in arguments.split()])
    assert (code, out) == (2, "")
    assert re.fullmatch(r"growprune: [^\n]+\n", err)
    assert said in err
    assert [path.name for path in tmp_path.iterdir()] == ["FILE"]


def fixed() -> nn.Module:
    """A user's model that takes no argument."""
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))


def test_what_the_system_refuses_is_one_line_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", str(tmp_path))

    monkeypatch.setattr("growprune.demo.run", full)
    assert growprune_says(capsys, "demo") == (2, "", f"growprune: {tmp_path}: No space left on device\n")


def test_an_interruption_is_no_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("growprune.demo.run", interrupted)
    assert growprune_says(capsys, "demo") == (130, "", "growprune: interrupted\n")


def test_a_bug_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("growprune.demo.run", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["demo"])


# -- results ---------------------------------------------------------------------------------------------------------


def test_demo_prints_its_result_as_a_table_or_as_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("growprune.demo.DemoConfig", partial(DemoConfig, **TINY))
    arguments = ("demo", "--out", str(tmp_path / "demo"), "--device", "cpu", "--ratio", "0.75")
    code, out, err = growprune_says(capsys, *arguments, "--json")
    written = json.loads((tmp_path / "demo" / "result.json").read_text())
    assert (code, json.loads(out)) == (0, written)
    assert written["ratios"] == "0.75"
    assert err.count("\n") == 4  # train, prune, fine-tune, fine-tune

    code, table, log = growprune_says(capsys, *arguments)
    assert code == 0
    final = [way["accuracy"]["final"] for way in (written, written["baseline"])]
    assert re.search(rf"fine-tuned +{final[0]:.1f} % +{final[1]:.1f} %", table)
    assert f"{written['speedup']:.2f}×" in table
    assert "λ grows by 0.25 every 2 steps to 1, then holds for 3" in " ".join(table.split())
    assert table.endswith(f"Report: {tmp_path / 'demo' / 'report.html'}\n")
    assert all(c.isprintable() or c == "\n" for c in table + log)


def test_measure_knows_the_papers_plans(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = growprune_says(
        capsys, "measure", "--model", "resnet56", "--ratios", "[0, 0.75, 0.75, 0.32]", "--json"
    )
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["params"]["before"] == 853_018
    assert found["speedup"] == pytest.approx(2.55, abs=0.005)
    assert found["widths"]["layer1.0.conv1"] == [16, 4]
    assert found["widths"]["layer3.8.conv1"] == [64, 43]
    assert found["ratios"] == "[0.0, 0.75, 0.75, 0.32]"


def test_measure_solves_for_a_speedup_and_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("measure", "--model", "growprune.demo:network", "--input", "1x8x8", "--num-classes", "3")
    code, out, err = growprune_says(capsys, *arguments, "--speedup", "2")
    assert (code, err) == (0, "")
    assert re.search(r"MACs +410,208 .* (2\.0\d|1\.9\d)×", out)
    assert re.search(r"filters of layer3\.1\.conv1 +32 +1[5-7] ", out)
    assert all(c.isprintable() or c == "\n" for c in out)


def test_measure_leaves_the_random_numbers_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Which weights are drawn cannot change a plan: two calls say the same."""
    arguments = ("measure", "--model", "resnet20", "--ratios", "0.5", "--json")
    torch.manual_seed(1)
    first = growprune_says(capsys, *arguments)
    torch.manual_seed(2)
    assert growprune_says(capsys, *arguments) == first


def test_a_network_is_measured_without_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = growprune_says(capsys, "measure", "--model", "resnet20", "--json")
    result = json.loads(out)
    assert code == 0
    assert result["macs"]["before"] == result["macs"]["after"] > 0
