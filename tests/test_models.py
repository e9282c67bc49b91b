import hashlib
import importlib
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import growprune as gp
from growprune.errors import GrowpruneError
from growprune.models import BUILT_IN, VGG, BasicBlock, CifarResNet, create, fresh, known
from growprune.planning import network as planned
from growprune.weights import HASH, digest, restore


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "classes", "expected"),
    [
        ("resnet56", 10, 853_018),
        ("vgg19", 100, 20_081_188),
        # He et al. (2015), table 6, in millions: 0.27, 0.46, 0.66, 1.7.
        ("resnet20", 10, 269_722),
        ("resnet32", 10, 464_154),
        ("resnet44", 10, 658_586),
        ("resnet110", 10, 1_727_962),
    ],
)
def test_parameter_counts(name: str, classes: int, expected: int) -> None:
    assert parameters(create(name, classes)) == expected


@pytest.mark.parametrize(("depth", "convolutions"), [(11, 8), (13, 10), (16, 13), (19, 16)])
def test_vgg_has_one_linear_layer_after_its_convolutions(depth: int, convolutions: int) -> None:
    modules = list(VGG(depth).modules())
    assert sum(isinstance(m, nn.Conv2d) for m in modules) == convolutions
    assert sum(isinstance(m, nn.BatchNorm2d) for m in modules) == convolutions
    assert sum(isinstance(m, nn.Linear) for m in modules) == 1


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_network_runs_and_learns_from_every_parameter(name: str) -> None:
    model = create(name, num_classes=7, in_channels=1)
    out = model(torch.randn(2, 1, 16, 16))
    assert out.shape == (2, 7)
    out.square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_the_shortcut_takes_every_second_pixel_and_pads_with_zeros_on_both_sides() -> None:
    block = BasicBlock(2, 4, stride=2).eval()
    nn.init.zeros_(block.conv2.weight)  # leaves the shortcut alone
    x = torch.arange(1.0, 33.0).reshape(1, 2, 4, 4)
    empty = torch.zeros(2, 2)
    expected = torch.stack(
        [empty, torch.tensor([[1.0, 3.0], [9.0, 11.0]]), torch.tensor([[17.0, 19.0], [25.0, 27.0]]), empty]
    )
    assert torch.equal(block(x)[0], expected)


def test_a_block_of_equal_width_passes_its_input_on() -> None:
    block = BasicBlock(3, 3, stride=1).eval()
    nn.init.zeros_(block.conv2.weight)
    x = torch.rand(2, 3, 5, 5)
    assert torch.equal(block(x), x)


def test_weights_start_with_the_variance_of_he() -> None:
    torch.manual_seed(0)
    model = create("vgg19", num_classes=1000)
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear) and module.weight.numel() > 100_000:
            fan_in = module.weight[0].numel()
            assert float(module.weight.detach().std()) == pytest.approx(math.sqrt(2 / fan_in), rel=0.02)


def test_width_scales_every_stage() -> None:
    model = CifarResNet(8, width=4)
    assert [m.out_channels for m in model.modules() if isinstance(m, nn.Conv2d)] == [4, 4, 4, 8, 8, 16, 16]


@pytest.mark.parametrize("depth", [2, 18, 57])
def test_impossible_depths_are_refused(depth: int) -> None:
    with pytest.raises(GrowpruneError, match=f"6n \\+ 2 .* not {depth}"):
        CifarResNet(depth)
    with pytest.raises(GrowpruneError, match=f"depths 11, 13, 16, 19, not {depth}"):
        VGG(depth)


def test_torchvision_by_name() -> None:
    pytest.importorskip("torchvision")
    assert parameters(create("torchvision:resnet18")) == 11_689_512
    model = create("torchvision:resnet18", num_classes=3)
    assert isinstance(model.fc, nn.Linear)
    assert model.fc.out_features == 3


def test_timm_by_name() -> None:
    pytest.importorskip("timm")
    model = create("timm:resnet18", num_classes=3, in_chans=1)
    assert model(torch.randn(1, 1, 64, 64)).shape == (1, 3)


def test_a_users_function_in_the_working_folder(tmp_path, monkeypatch) -> None:
    (tmp_path / "my_models.py").write_text(
        "from torch import nn\n"
        "def tiny(num_classes=2, width=4):\n    return nn.Linear(width, num_classes)\n"
        "def tuples():\n    return ()\n"
    )
    (tmp_path / "my_broken_models.py").write_text("import no_such_package_inside\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    importlib.invalidate_caches()
    assert create("my_models:tiny").out_features == 2
    assert create("my_models:tiny", num_classes=5, width=3).weight.shape == (5, 3)
    with pytest.raises(GrowpruneError, match=r"has no function 'tinny', did you mean 'tiny'\?$"):
        create("my_models:tinny")
    with pytest.raises(GrowpruneError, match=r"gave a tuple, not a torch\.nn\.Module$"):
        create("my_models:tuples")
    # The user's own bug keeps its own traceback.
    with pytest.raises(ModuleNotFoundError, match="no_such_package_inside"):
        create("my_broken_models:tiny")


def test_a_command_tells_what_goes_wrong_in_a_users_own_code_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "failing.py").write_text("def f(num_classes=3):\n    raise KeyError('x')\n")
    (tmp_path / "deep.py").write_text(
        "from torch import nn\n\n\ndef f(num_classes=3):\n    return nn.Conv2d(3, 16, 3, groups=2)\n"
    )
    (tmp_path / "unloaded.py").write_text("raise RuntimeError('at import')\n")
    (tmp_path / "unread.py").write_text("def f(:\n")
    importlib.invalidate_caches()
    for name, told in (
        ("failing:f", r"^model 'failing:f': KeyError: 'x' \(failing\.py:2\)$"),
        ("deep:f", r"^model 'deep:f': ValueError: in_channels must be divisible by groups \(deep\.py:5\)$"),
        ("unloaded:f", r"^model 'unloaded:f': RuntimeError: at import \(unloaded\.py:1\)$"),
        ("unread:f", r"^model 'unread:f': SyntaxError: invalid syntax \(unread\.py, line 1\)$"),
        ("os:getcwd", r"^model 'os:getcwd': TypeError: .* no keyword arguments$"),
    ):
        for way in (lambda name: fresh(name, 10), lambda name: planned(name, 10, None)):
            with pytest.raises(GrowpruneError, match=told):
                way(name)
    with pytest.raises(KeyError):  # who calls the function has its own traceback
        create("failing:f")


BAD_NAMES = [
    ("resnet65", r"^unknown model 'resnet65', did you mean 'resnet56'\? "),
    ("elephant", r"^unknown model 'elephant'; there are resnet20, .*vgg19 "),
    ("torchvision:resnet5", r"^torchvision has no model 'resnet5', did you mean 'resnet50'\?$"),
    ("timm:resnet5", r"^timm has no model 'resnet5', did you mean 'resnet50'\?$"),
    ("no_such_package.nets:f", r"^model 'no_such_package.nets:f': no module 'no_such_package' "),
    ("torch.no_such_part:f", r"^model 'torch.no_such_part:f': no module 'torch.no_such_part' "),
    (
        "test_models.py:wider",
        r"^model 'test_models.py:wider': no module .* in this folder; write it 'test_models:wider'$",
    ),
    ("no_such/nets.py:f", r"^model 'no_such/nets.py:f' is not of the form .*; write it 'no_such.nets:f'$"),
    ("/no_such/nets.py:f", r"^model '/no_such/nets.py:f' is not of the form package.module:function$"),
    ("test_models:wide", r"^model 'test_models:wide': test_models has no function 'wide', did you mean 'wider'\?$"),
    (":f", r"^model ':f' is not of the form package.module:function$"),
    ("torch:", r"^model 'torch:' is not of the form package.module:function$"),
    (".nets:f", r"^model '.nets:f' is not of the form package.module:function$"),
]


@pytest.mark.parametrize("call", [create, known])
@pytest.mark.parametrize(("name", "line"), BAD_NAMES)
def test_a_bad_name_gives_one_line_with_the_way_out(call: Callable[[str], object], name: str, line: str) -> None:
    if name.startswith(("torchvision", "timm")):
        pytest.importorskip(name.partition(":")[0])
    with pytest.raises(GrowpruneError, match=line) as caught:
        call(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("package", ["torchvision", "timm"])
def test_a_missing_package_is_named(package: str, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # Python's own way to make an import fail
    with pytest.raises(GrowpruneError, match=f"^{package}:NAME needs .* pip install {package}$"):
        create(f"{package}:resnet50")


def test_an_installed_but_broken_package_is_not_called_missing(tmp_path, monkeypatch) -> None:
    (tmp_path / "timm.py").write_text("import no_such_package_inside\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    with pytest.raises(ModuleNotFoundError, match="no_such_package_inside"):
        create("timm:resnet18")


def test_the_optional_packages_are_not_imported_for_our_own_networks() -> None:
    code = (
        "import sys, growprune.models as m; m.create('resnet20');"
        "assert not {'torchvision', 'timm'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- names, looked up without making anything ------------------------------------------------------------------------


def wider(num_classes: int, *rest: Any, width: int = 8, **more: Any) -> nn.Module:
    """A user's model that must be told the number of classes."""
    raise AssertionError("nothing should be made")


def narrow() -> nn.Module:
    """One that takes no argument."""
    return nn.Linear(3, 10)


def demanding(width: int) -> nn.Module:
    return nn.Linear(width, 1)


def secretive(num_classes: int, /) -> nn.Module:
    return nn.Linear(3, num_classes)


@pytest.mark.parametrize("name", ["resnet56", "torchvision:vit_h_14", "timm:resnet18", "test_models:wider"])
def test_a_good_name_is_known_and_nothing_is_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.startswith(("torchvision", "timm")):
        pytest.importorskip(name.partition(":")[0])
    monkeypatch.setattr(nn.Module, "__init__", lambda self: pytest.fail("a module was made"))
    known(name)


@pytest.mark.parametrize(
    ("name", "lacks"),
    [("torch.nn:Conv2d", "in_channels"), ("test_models:demanding", "width"), ("test_models:secretive", "num_classes")],
)
def test_a_function_that_needs_more_than_the_classes_is_refused(name: str, lacks: str) -> None:
    with pytest.raises(GrowpruneError, match=f"^model '{name}' needs '{lacks}'; name a function that needs num_class"):
        known(name)


def test_a_function_without_classes_is_called_without() -> None:
    assert fresh("test_models:narrow", 7).out_features == 10
    assert fresh("resnet20", 7).linear.out_features == 7


# -- trained weights -------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, width: int = 4, inner: str = "body") -> None:
        super().__init__()
        self.add_module(inner, nn.Sequential(nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.Conv2d(width, width, 3)))
        self.inner = inner
        self.head = nn.Linear(width, 10) if inner == "body" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.get_submodule(self.inner)(x).mean((2, 3)))
        return out


def net() -> nn.Module:
    return Net()


def wrapped() -> nn.Module:
    """Its own names begin as DataParallel's do."""
    return Net(inner="module")


@pytest.fixture
def trained() -> dict[str, Tensor]:
    torch.manual_seed(5)
    return {
        key: torch.rand_like(value) if value.is_floating_point() else value for key, value in net().state_dict().items()
    }


def below(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{key}": value for key, value in state.items()}


FORMS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "a state dict": lambda state: state,
    "an epoch's checkpoint": lambda state: {"state_dict": state, "epoch": 3, "optimizer": {"lr": [0.1]}},
    "model_state_dict": lambda state: {"model_state_dict": state},
    "model": lambda state: {"model": state, "best": 93.4},
    "net": lambda state: {"net": state},
    "of DataParallel": lambda state: below("module.", state),
    "of torch.compile": lambda state: below("_orig_mod.", state),
    "of both, in a checkpoint": lambda state: {"state_dict": below("module._orig_mod.", state)},
    "in double precision": lambda state: {k: v.double() if v.is_floating_point() else v for k, v in state.items()},
}


@pytest.mark.parametrize("form", FORMS)
def test_the_usual_state_dicts_are_read(form: str, trained: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save(FORMS[form](trained), tmp_path / "weights.pth")
    same(restore("test_models:net", 10, tmp_path / "weights.pth"), trained)


def same(model: nn.Module, state: dict[str, Tensor]) -> None:
    found = model.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[key], state[key]) for key in state)


@pytest.mark.parametrize("name", ["plain.safetensors", "plain.bin"])
@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_plain_safetensors_are_read_whatever_they_are_called(
    name: str, metadata: Any, trained: dict[str, Tensor], tmp_path: Path
) -> None:
    safetensors.torch.save_file(below("module.", trained), tmp_path / name, metadata)
    same(restore("test_models:net", 10, tmp_path / name), trained)


def test_a_network_whose_own_names_begin_like_a_wrapper_keeps_them(tmp_path: Path) -> None:
    state = {key: value + 1 for key, value in wrapped().state_dict().items()}
    assert all(key.startswith("module.") for key in state)
    for each in (state, below("module.", state)):
        torch.save(each, tmp_path / "weights.pth")
        same(restore("test_models:wrapped", 10, tmp_path / "weights.pth"), state)


@pytest.mark.parametrize("granularity", ["filter", "weight"])
def test_our_own_files_come_back_smaller_or_sparse(granularity: Any, tmp_path: Path) -> None:
    pruner = gp.Pruner(net(), torch.rand(1, 1, 8, 8), gp.OneShot(), ratios=0.5, granularity=granularity)
    small = pruner.compact()
    (tmp_path / "run").mkdir()
    for place in (tmp_path / "run" / "model.safetensors", tmp_path / "small.bin"):
        gp.save(small, place)
    for weights in (tmp_path / "run", tmp_path / "small.bin"):
        found = restore("test_models:net", 10, weights)
        same(found, small.state_dict())
        assert gp.sparsity(found) == gp.sparsity(small)
        assert parameters(found) == parameters(small)


class Trap:
    """What a pickle can do to those who open it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("form", ["torch.save", "in a state dict", "pickle", "as safetensors"])
def test_no_code_in_a_file_is_ever_run(form: str, trained: dict[str, Tensor], tmp_path: Path) -> None:
    trap, path = Trap(str(tmp_path / "sprung")), tmp_path / ("w.safetensors" if form == "as safetensors" else "w.pth")
    if form in ("pickle", "as safetensors"):
        path.write_bytes(pickle.dumps(trap))
    else:
        torch.save(trap if form == "torch.save" else {**trained, "head.bias": trap}, path)
    assert refusal(path) == f"{path}: {UNREADABLE}"
    assert not (tmp_path / "sprung").exists()
    pickle.loads(pickle.dumps(trap))  # it would have
    assert (tmp_path / "sprung").exists()


UNREADABLE = (
    "damaged, or no state dict that can be read without running code in it; save model.state_dict(), or use "
    "growprune.save"
)
OTHER = "of another network than test_models:net:"
NO_DICT = "not a state dict: save model.state_dict(), or use growprune.save"


def refusal(path: Path, name: str = "test_models:net") -> str:
    with pytest.raises(GrowpruneError) as caught:
        restore(name, 10, path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda s: net(), UNREADABLE),  # a whole model
        (lambda s: list(s.values()), NO_DICT),
        (lambda s: {}, NO_DICT),
        (lambda s: {"state_dict": {}}, NO_DICT),
        (lambda s: {**s, "head.bias": [1.0] * 10}, NO_DICT),
        (lambda s: {**s, "head.bias": s["head.bias"].to_sparse()}, NO_DICT),
        (lambda s: {**s, "head.bias": torch.empty(10, device="meta")}, NO_DICT),
        (lambda s: {k: v for k, v in s.items() if k != "head.bias"}, f"{OTHER} it lacks 'head.bias'"),
        (lambda s: {**s, "tail.bias": s["head.bias"]}, f"{OTHER} it has 'tail.bias'"),
        (lambda s: {**s, "head.bias": s["head.bias"][:7]}, f"{OTHER} 'head.bias' is (7,), not (10,)"),
        (lambda s: {**s, "head.bias": s["head.bias"] / 0}, "'head.bias' holds numbers that are not finite"),
        (lambda s: create("resnet20").state_dict(), f"{OTHER} it lacks 'body.0.bias'"),
    ],
)  # fmt: skip
def test_other_weights_are_refused_in_one_line(
    made: Any, said: str, trained: dict[str, Tensor], tmp_path: Path
) -> None:
    path = tmp_path / "weights.pth"
    torch.save(made(trained), path)
    assert refusal(path) == f"{path}: {said}"
    if said.startswith("of another"):
        safetensors.torch.save_file({k: v.clone() for k, v in made(trained).items()}, path)
        assert refusal(path) == f"{path}: {said}"


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("kind", ["torch", "ours"])
def test_statistics_that_are_no_numbers_are_refused(tmp_path: Path, kind: str, value: float) -> None:
    path, net = tmp_path / "weights", create("resnet20")
    net.get_buffer("bn1.running_var")[3] = value
    gp.save(net, path) if kind == "ours" else torch.save(net.state_dict(), path)
    assert refusal(path, "resnet20") == f"{path}: 'bn1.running_var' holds numbers that are not finite"


def test_what_does_not_fit_into_float32_is_refused(tmp_path: Path, trained: dict[str, Tensor]) -> None:
    torch.save({**trained, "head.bias": torch.full((10,), 1e300, dtype=torch.double)}, path := tmp_path / "weights.pth")
    assert refusal(path) == f"{path}: 'head.bias' holds numbers that are not finite"


def test_a_file_is_known_by_its_hash(tmp_path: Path) -> None:
    (path := tmp_path / "it").write_bytes(b"abc")
    assert digest(path) == hashlib.sha256(b"abc").hexdigest()


def test_published_files_have_the_beginning_of_their_hash_in_their_names() -> None:
    library = pytest.importorskip("torchvision").models
    every = {kind.url for name in library.list_models() for kind in library.get_model_weights(name)}
    assert len(every) > 100
    assert {len("".join(HASH.findall(Path(url).stem))) for url in every} == {8, 10}


@pytest.mark.parametrize("kind", ["torch", "safetensors", "ours"])
def test_a_file_cut_short_at_any_length_is_refused(kind: str, trained: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / "weights"
    if kind == "torch":
        torch.save(trained, path)
    elif kind == "safetensors":
        safetensors.torch.save_file(trained, path)
    else:
        gp.save(net(), path)
    blob = path.read_bytes()
    for size in [*range(0, 40), *range(40, len(blob) - 1, 97), len(blob) - 1]:
        path.write_bytes(blob[:size])
        assert refusal(path).startswith(f"{path}: ")


@pytest.mark.parametrize("blob", [b"", b"hello", b"{}", b"\x80", b"PK\x03\x04", b"\x08" + bytes(7) + b"{", bytes(1000)])
def test_garbage_is_refused(blob: bytes, tmp_path: Path) -> None:
    for name in ("weights.pth", "weights.safetensors"):
        (tmp_path / name).write_bytes(blob)
        assert refusal(tmp_path / name) == f"{tmp_path / name}: {UNREADABLE}"


def test_where_there_are_no_weights_the_way_to_them_is_said(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none").startswith(f"weights '{tmp_path}/none': no such file, or a folder without model")
    (tmp_path / "config.json").write_text("{}")
    assert refusal(tmp_path) == f"weights '{tmp_path}': a run that is not finished: growprune resume {tmp_path}"
