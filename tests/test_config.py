"""Options: where their values come from, what they may be, and what is said of those they may not be."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from growprune import asking
from growprune import config as configs
from growprune.config import KINDS, Prune, Train, from_json, rates, resolve
from growprune.console import read_file
from growprune.errors import GrowpruneError
from growprune.options import flag, known

EVERY = [(kind, name) for kind in KINDS.values() for name in known(kind)]
OTHERS = [asking.Demo, asking.Eval, asking.Measure, asking.Bench]


def plain(kind: type, name: str) -> Any:
    """An option's type, `| None` aside."""
    hint = known(kind)[name][0]
    return get_args(hint)[0] if type(None) in get_args(hint) else hint


def refused(call: Callable[[], Any]) -> str:
    """The one line that refuses it."""
    with pytest.raises(GrowpruneError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message


# -- random configurations -------------------------------------------------------------------------------------------

WORDS = st.text(st.characters(blacklist_categories=("Cc", "Cs", "Zl", "Zp")), min_size=1, max_size=12).filter(str.strip)
RATE = st.floats(1e-6, 10)
LEARNING_RATES = st.one_of(
    RATE.map(repr),
    RATE.map(lambda peak: f"cosine:{peak!r}"),
    st.tuples(RATE, st.dictionaries(st.integers(1, 200), RATE, max_size=4)).map(
        lambda both: ",".join(f"{start}:{value!r}" for start, value in [(0, both[0]), *sorted(both[1].items())])
    ),
)
RATIOS = st.one_of(
    st.floats(0, 0.99).map(repr),
    st.lists(st.floats(0, 0.99), min_size=1, max_size=5).map(repr),
    st.sampled_from(["[0:0, 1-15:0.7]", "{conv1: 0.5, 'layer1.0': 0.25}"]),
)
NUMBERS = st.lists(st.floats(1e-3, 1), min_size=3, max_size=3).map(lambda values: ",".join(map(repr, values)))
SCALES = st.one_of(st.sampled_from(["own", "imagenet", "none"]), st.tuples(NUMBERS, NUMBERS).map("/".join))
TEXTS = {"lr": LEARNING_RATES, "ratios": RATIOS, "normalize": SCALES}


def values_of(kind: type, name: str) -> st.SearchStrategy[Any]:
    hint, bounds = plain(kind, name), known(kind)[name][1]
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if hint is str:
        return TEXTS.get(name, WORDS)
    if hint is bool:
        return st.booleans()
    if hint is int:
        return st.integers(bounds.get("min", bounds.get("above", 0)), bounds.get("max", 10**6))
    low, high = bounds.get("above", bounds.get("min")), bounds.get("below", 1e6)
    return st.floats(low, high, exclude_min="above" in bounds, exclude_max="below" in bounds)


@st.composite
def choices(draw: st.DrawFn, command: str) -> dict[str, Any]:
    """Some options of a command, valid together."""
    kind = KINDS[command]
    found = draw(st.fixed_dictionaries({}, optional={name: values_of(kind, name) for name in known(kind)}))
    if found.get("momentum", 0.9) == 0:
        found.pop("nesterov", None)
    spare = [name for name in configs.AMOUNTS if name in found]
    for name in spare[1:]:
        del found[name]
    if "global_ratio" not in found:
        found.pop("global_stem", None)
    return found


COMMANDS = st.sampled_from(sorted(KINDS))


@settings(deadline=None)
@given(data=st.data())
def test_a_configuration_comes_back_from_its_folder_the_same(data: st.DataObject) -> None:
    command = data.draw(COMMANDS)
    config = resolve(command, data.draw(choices(command)))
    found = json.loads(json.dumps(config.to_json()))
    again = from_json(found, Path("run"))
    assert again == config
    assert type(again) is KINDS[command]
    assert repr(again) == repr(config)  # 60 is not 60.0
    assert list(configs.differences(found, again.to_json())) == []


def test_an_option_that_was_not_there_yet_had_its_default() -> None:
    """A run that an older version began can be gone on with."""
    now = Train(seed=3).to_json()
    then = {key: value for key, value in now.items() if key != "decode"}
    assert list(configs.differences(then, now)) == []
    assert list(configs.differences(then, now | {"decode": "gpu"})) == [("decode", "auto", "gpu")]


def test_a_folder_has_many_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is taken up again by any of them; a set that is known by name is not the folder of that name."""
    monkeypatch.chdir(tmp_path)
    for name in ("photographs", "others", "cifar10"):
        (tmp_path / name).mkdir()

    def differ(one: str, other: str) -> bool:
        there, here = (Train(model="resnet20", data=each).to_json() for each in (one, other))
        return bool(list(configs.differences(there, here)))

    for same in ("photographs/", "./photographs", str(tmp_path / "photographs")):
        assert not differ("photographs", same)
    assert differ("photographs", "others")
    assert differ("photographs", "nowhere")
    assert differ("cifar10", "./cifar10")


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a_file_says_what_the_command_line_says(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """All of it in TOML, under either spelling, at the top level or in the command's own table; or as config.json."""
    command = data.draw(COMMANDS)
    values = data.draw(choices(command))
    config = resolve(command, values)
    path = tmp_path_factory.mktemp("toml") / "options.toml"
    dashed, inside = data.draw(st.booleans()), data.draw(st.booleans())
    path.write_text(toml(values, f"[{command}]" if inside else "", "-" if dashed else "_"), encoding="utf-8")
    assert resolve(command, {}, read_file(path, command)) == config
    path.write_text(toml({k: v for k, v in config.to_json().items() if v is not None}), encoding="utf-8")
    assert resolve(command, {}, read_file(path, command)) == config
    path = path.with_suffix(".json")
    path.write_text(json.dumps(config.to_json()), encoding="utf-8")
    assert resolve(command, {}, read_file(path, command)) == config


def toml(values: dict[str, Any], head: str = "", dash: str = "_") -> str:
    lines = [f"{name.replace('_', dash)} = {json.dumps(v, ensure_ascii=False)}" for name, v in values.items()]
    return "\n".join([head, *lines]).replace("\x7f", "\\u007f") + "\n"


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_the_command_line_wins_over_the_file_and_its_table_over_its_top(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    command = data.draw(COMMANDS)
    top, table, typed = ({k: v for k, v in data.draw(choices(command)).items() if k != "nesterov"} for _ in range(3))
    for name in (*configs.AMOUNTS[1:], "global_stem"):  # of these there can be one
        for each in (top, table, typed):
            each.pop(name, None)
    path = tmp_path_factory.mktemp("toml") / "options.toml"
    path.write_text(toml(top) + toml(table, f"[{command}]"), encoding="utf-8")
    config = resolve(command, typed, read_file(path, command))
    assert config == resolve(command, {**top, **table, **typed})
    for name, value in typed.items():
        if name != "weights":
            assert getattr(config, name) == value


def test_without_any_option_there_is_something_to_do() -> None:
    train, prune = Train(), Prune()
    assert (train.model, train.data, train.weights) == ("resnet56", "cifar10", None)
    assert (prune.model, prune.data, prune.ratios, prune.schedule) == ("resnet56", "cifar10", "0.5", "greg1")
    assert prune.weights == str(configs.folder("train", train)) == "runs/train-resnet56-cifar10"
    assert str(configs.folder("prune", prune)) == "runs/prune-resnet56-cifar10"
    assert Prune(model="vgg19", data="cifar100", seed=3).weights == "runs/train-vgg19-cifar100-seed3"


@given(WORDS, WORDS)
def test_a_runs_default_folder_is_one_name_below_runs(model: str, data: str) -> None:
    place = configs.folder("train", Train(model=model, data=data))
    assert place.parts[:-1] == ("runs",)
    assert place.name.startswith("train-")


def test_a_speedup_typed_takes_the_place_of_the_files_ratios(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(Prune(ratios="0.7").to_json()))
    config = resolve("prune", {"speedup": 2.5}, read_file(path, "prune"))
    assert isinstance(config, Prune)
    assert (config.ratios, config.speedup) == (None, 2.5)
    path.write_text(json.dumps(Prune(global_ratio=0.7, global_stem=True).to_json()))
    for typed, left in (({"ratios": "0.5"}, (None, False)), ({"global_ratio": 0.6}, (0.6, True))):
        config = resolve("prune", typed, read_file(path, "prune"))
        assert isinstance(config, Prune)
        assert (config.global_ratio, config.global_stem) == left
    both = refused(lambda: resolve("prune", {"speedup": 2.5, "ratios": "0.5"}))
    assert both == "give one of --ratios, --speedup and --global-ratio, not --ratios and --speedup"


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("lr = 0.1", "lr", "0.1"),
        ("lr = 1", "lr", "1"),
        ("ratios = 0.5", "ratios", "0.5"),
        ("ratios = [0, 0.5, 0.75]", "ratios", "[0, 0.5, 0.75]"),
        ('ignore = ["conv1", "layer1"]', "ignore", "conv1,layer1"),
        ("save-every = 5", "save_every", 5.0),
        ("momentum = 0", "momentum", 0.0),
    ],
)
def test_what_is_natural_in_toml_is_taken(tmp_path: Path, line: str, name: str, value: Any) -> None:
    path = tmp_path / "options.toml"
    path.write_text(line)
    found = getattr(resolve("prune", {}, read_file(path, "prune")), name)
    assert (found, type(found)) == (value, type(value))


def test_one_file_serves_both_commands(tmp_path: Path) -> None:
    path = tmp_path / "options.toml"
    path.write_text(
        'data = "digits"\nout = "here"\njson = true\n[train]\nepochs = 1\n[prune]\nepochs = 2\nratios = 0.3\n'
    )
    train, prune = read_file(path, "train"), read_file(path, "prune")
    assert train == {"data": "digits", "out": "here", "json": True, "epochs": 1}
    assert prune == {"data": "digits", "out": "here", "json": True, "epochs": 2, "ratios": "0.3"}


# -- what is refused -------------------------------------------------------------------------------------------------

WRONG: dict[Any, list[Any]] = {
    int: ["ten", 1.5, True, [1], 2.0, {"a": 1}, None],
    float: ["ten", True, [1.0], math.nan, math.inf, -math.inf, 10**400, None],
    str: [1, 1.5, True, ["a", 1], {"a": "b"}, "a\nb", "a\0b", None],
    bool: ["yes", 1, 0.0, [True], None],
}


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_every_wrong_type_is_refused_by_name(kind: type, name: str) -> None:
    hint = plain(kind, name)
    optional = type(None) in get_args(known(kind)[name][0])
    wrong = ["nothing", 1, None, []] if get_origin(hint) is Literal else WRONG[hint]
    for value in wrong:
        if value is None and optional:
            kind(**{name: None})
            continue
        said = refused(lambda value=value: kind(**{name: value}))
        assert said.startswith(f"{flag(name)}: ")


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_every_wrong_type_in_a_file_is_refused_by_file_and_name(tmp_path: Path, kind: Any, name: str) -> None:
    hint = plain(kind, name)
    wrong = "[[1]]" if hint is not str or "also" not in known(kind)[name][1] else "true"
    path = tmp_path / "options.toml"
    for text in (f"{name} = {wrong}", f"[{kind.command}]\n{flag(name)[2:]} = {wrong}", f"{name} = 2020-01-01"):
        path.write_text(text)
        assert refused(lambda: read_file(path, kind.command)).startswith(f"{path}: {flag(name)}: ")


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in (*KINDS.values(), *OTHERS) for name in known(kind)]
)
def test_bounds_hold_on_both_sides(kind: type, name: str) -> None:
    hint, bounds = plain(kind, name), known(kind)[name][1]
    near = (lambda x, d: x + d) if hint is int else (lambda x, d: math.nextafter(x, d * math.inf))
    for word, outside, inside in (
        ("min", lambda b: near(b, -1), lambda b: b),
        ("above", lambda b: b, lambda b: near(b, 1)),
        ("max", lambda b: near(b, 1), lambda b: b),
        ("below", lambda b: b, lambda b: near(b, -1)),
    ):
        if word in bounds:
            assert getattr(kind(**{name: inside(bounds[word])}), name) == inside(bounds[word])
            said = refused(lambda f=outside, word=word: kind(**{name: f(bounds[word])}))
            assert re.match(rf"{flag(name)}: \S+ must be (above |below )?\S+( or more| or less)?$", said)
    if hint in (int, float):
        assert {"min", "above"} & set(bounds), "a number without a least value"


@pytest.mark.parametrize(
    ("kind", "values", "said"),
    [
        (Train, {"epochs": -1}, "--epochs: -1 must be 0 or more"),
        (Train, {"batch": 0}, "--batch: 0 must be 1 or more"),
        (Train, {"momentum": 1}, "--momentum: 1.0 must be below 1"),
        (Train, {"label_smoothing": 1}, "--label-smoothing: 1.0 must be below 1"),
        (Train, {"nesterov": True, "momentum": 0}, "--nesterov: needs a --momentum above 0"),
        (Train, {"data": " "}, "--data: is empty"),
        (Train, {"compile": "yes"}, "--compile: 'yes' is not auto, on or off"),
        (Train, {"layout": "contigous"}, "--layout: 'contigous' is not auto, channels_last or contiguous, did you mean "
         "'contiguous'?"),
        (Prune, {"schedule": "greg3"}, "--schedule: 'greg3' is not greg1, greg2 or oneshot, did you mean 'greg2'?"),
        (Prune, {"criterion": "tailor"}, "--criterion: 'tailor' is not l1, l2, taylor, obd or random, did you mean "
         "'taylor'?"),
        (Prune, {"granularity": "x"}, "--granularity: 'x' is not filter or weight"),
        (Prune, {"speedup": 1}, "--speedup: 1.0 must be above 1"),
        (Prune, {"global_ratio": 1}, "--global-ratio: 1.0 must be below 1"),
        (Prune, {"global_stem": True}, "--global-stem: only with --global-ratio; a list of ratios has one for the "
         "stem"),
        (Prune, {"seed": 2**64}, "--seed: 18446744073709551616 must be 9223372036854775807 or less"),
    ],
)  # fmt: skip
def test_what_is_said_of_a_wrong_value(kind: type, values: dict[str, Any], said: str) -> None:
    assert refused(lambda: kind(**values)) == said


def test_no_epochs_are_some_epochs() -> None:
    assert Train(epochs=0).epochs == Prune(epochs=0).epochs == 0


def test_an_option_that_is_not_there_has_a_neighbour() -> None:
    assert refused(lambda: resolve("train", {"epoch": 3})) == "train has no option 'epoch', did you mean 'epochs'?"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lr-rate = 1", "train has no option 'lr-rate'"),
        ("epoch = 3", "train has no option 'epoch', did you mean 'epochs'?"),
        ("[train]\nweight_decai = 0", "train has no option 'weight_decai', did you mean 'weight_decay'?"),
        ("ratios = 0.5", "train has no option 'ratios'; prune has: put it under [prune]"),
        ("[prune]\nratio = 0.5", "prune has no option 'ratio', did you mean 'ratios'?"),  # though it is train's turn
        ("[prune]\nspeedup = 'two'", "--speedup: needs a number, not 'two'"),
        ("[trian]\nepochs = 3", "unknown table [trian], did you mean 'train'? (there are [train] and [prune])"),
        ("[lr]\nx = 3", "unknown table [lr] (there are [train] and [prune])"),
        ("weight_decay = 0\nweight-decay = 0", "'weight-decay' is given twice"),
        ("epochs = ", "not TOML: Invalid value (at end of document)"),
        ("epochs = 1\nepochs = 2", "not TOML: Cannot overwrite a value"),
        ("lr = 'cosin:0.1'", "--lr: 'cosin:0.1' is no learning rate, did you mean 'cosine'? (write "),
        ("command = 'prune'", "is of the command 'prune', not of train"),
        ("out = 3", "--out: needs text, not 3"),
        ("json = 'yes'", "--json: needs true or false, not 'yes'"),
    ],
)
def test_what_is_said_of_a_wrong_file(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "options.toml"
    path.write_text(text)
    assert refused(lambda: read_file(path, "train")).startswith(f"{path}: {said}")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    for name, blob, said in (
        ("a.toml", b"model = '\xff'", "not TOML: 'utf-8' codec can't decode"),
        ("a.json", b"{", "not JSON: "),
        ("a.json", b"[1]", "not a table of options"),
        ("a.json", b"[" * 100_000, "not JSON: "),
        ("a.json", json.dumps({"command": "demo"}).encode(), "is of the command 'demo', not of train"),
        ("a.json", json.dumps(Prune().to_json()).encode(), "is of the command 'prune', not of train"),
    ):
        (tmp_path / name).write_bytes(blob)
        assert refused(lambda name=name: read_file(tmp_path / name, "train")).startswith(f"{tmp_path / name}: {said}")
    assert (
        refused(lambda: read_file(tmp_path / "none.toml", "train"))
        == f"{tmp_path}/none.toml: No such file or directory; give a TOML file, or a run's config.json"
    )
    assert (
        refused(lambda: read_file(tmp_path, "train"))
        == f"{tmp_path}: Is a directory; give a TOML file, or a run's config.json"
    )


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({}, "run: not a run of train or prune"),
        ({"command": ["train"]}, "run: not a run of train or prune"),
        ({"command": "train", "epochs": "3"}, "run: its config.json: --epochs: needs a whole number, not '3'"),
        ({"command": "train", "epoch": 3}, "run: its config.json: train has no option 'epoch', did you mean 'epochs'?"),
    ],
)
def test_a_folder_with_a_wrong_configuration_is_named(found: dict[str, Any], said: str) -> None:
    assert refused(lambda: from_json(found, Path("run"))) == said


# -- learning rates --------------------------------------------------------------------------------------------------

EPOCHS, STEPS = st.integers(0, 30), st.integers(1, 20)


@given(LEARNING_RATES, EPOCHS, STEPS, st.floats(0, 40))
def test_there_is_a_rate_for_every_step_and_it_is_positive(text: str, epochs: int, epoch: int, warm_up: float) -> None:
    found = rates(text, epochs, epoch, warm_up)
    assert len(found) == epochs * epoch
    assert all(0 < rate <= 10 for rate in found)


@given(RATE, EPOCHS, STEPS)
def test_one_number_holds_for_all_steps(rate: float, epochs: int, epoch: int) -> None:
    assert rates(repr(rate), epochs, epoch) == [rate] * (epochs * epoch)


@given(RATE, st.dictionaries(st.integers(1, 30), RATE, max_size=4), EPOCHS, STEPS)
def test_a_staircase_changes_at_the_first_step_of_its_epochs(
    first: float, later: dict[int, float], epochs: int, epoch: int
) -> None:
    stairs = {0: first, **later}
    found = rates(",".join(f"{start}:{stairs[start]!r}" for start in sorted(stairs)), epochs, epoch)
    current = first
    for step, rate in enumerate(found):
        if step % epoch == 0:
            current = stairs.get(step // epoch, current)
        assert rate == current


@given(RATE, st.integers(1, 30), STEPS)
def test_a_cosine_falls_from_its_peak_evenly_about_the_middle(peak: float, epochs: int, epoch: int) -> None:
    found = rates(f"cosine:{peak!r}", epochs, epoch)
    count = len(found)
    assert found[0] == peak
    assert all(a > b for a, b in pairwise(found))
    for step in range(1, count):
        assert found[step] + found[count - step] == pytest.approx(peak)


@given(LEARNING_RATES, st.integers(1, 20), STEPS, st.floats(0, 30))
def test_warm_up_rises_in_a_line_to_what_would_have_been(text: str, epochs: int, epoch: int, warm_up: float) -> None:
    for step, (warm, cold) in enumerate(
        zip(rates(text, epochs, epoch, warm_up), rates(text, epochs, epoch), strict=True)
    ):
        share = (step + 1) / (warm_up * epoch) if warm_up * epoch else 1.0
        assert warm == pytest.approx(cold * min(1.0, share))


@pytest.mark.parametrize(
    "text",
    ["", "fast", "cosine", "cosine:", "cosine:x", "cosine:0", "-0.1", "0", "nan", "inf", "1:0.1", "0:0.1,0:0.2",
     "0:0.1,9:1,5:2", "0:0.1,", "0:0.1,a:1", "0:0.1,1.5:1", "0:-1", "0:0.1:2", ":0.1", "step:0.1"],
)  # fmt: skip
def test_no_other_text_is_a_learning_rate(text: str) -> None:
    said = refused(lambda: rates(text, 3, 2))
    assert said.startswith(f"--lr: '{text}' is no learning rate")
    assert said.endswith("(write 0.1, 0:1e-2,60:1e-3 by epoch, or cosine:0.1)")
    assert said.count("cosine") <= 2 + text.count("cosine")
    assert refused(lambda: Train(lr=text)) in (said, "--lr: is empty")


def test_the_nearest_form_of_a_learning_rate_is_named() -> None:
    assert "did you mean 'cosine'?" in refused(lambda: rates("cosin:0.1", 1, 1))
