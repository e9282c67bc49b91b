import importlib
import math
import subprocess
import sys

import pytest
import torch
from torch import nn

from growprune.errors import GrowpruneError
from growprune.models import BUILT_IN, VGG, BasicBlock, CifarResNet, create


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


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("resnet65", r"^unknown model 'resnet65', did you mean 'resnet56'\? "),
        ("elephant", r"^unknown model 'elephant'; there are resnet20, .*vgg19 "),
        ("torchvision:resnet5", r"^torchvision has no model 'resnet5', did you mean 'resnet50'\?$"),
        ("no_such_package.nets:f", r"^model 'no_such_package.nets:f': no module 'no_such_package' "),
        ("torch.no_such_part:f", r"^model 'torch.no_such_part:f': no module 'torch.no_such_part' "),
        (":f", r"^model ':f' is not of the form package.module:function$"),
        ("torch:", r"^model 'torch:' is not of the form package.module:function$"),
        (".nets:f", r"^model '.nets:f' is not of the form package.module:function$"),
    ],
)
def test_a_bad_name_gives_one_line_with_the_way_out(name: str, line: str) -> None:
    if name.startswith("torchvision"):
        pytest.importorskip("torchvision")
    with pytest.raises(GrowpruneError, match=line) as caught:
        create(name)
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
