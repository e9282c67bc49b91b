"""Networks by name: the paper's CIFAR networks, and any torchvision, timm or user-written model.

Commands and recipes say which network they mean with one string; `create` turns that string into a module.
Nothing in the method depends on this file: the pruner takes any `nn.Module`.
"""

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import PurePath
from types import ModuleType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from growprune.errors import GrowpruneError, line, nearest

# Convolution widths of the VGG family; "M" halves the image.
VGG_PLANS: dict[int, tuple[int | str, ...]] = {
    11: (64, "M", 128, "M", *[256] * 2, "M", *[512] * 2, "M", *[512] * 2),
    13: (*[64] * 2, "M", *[128] * 2, "M", *[256] * 2, "M", *[512] * 2, "M", *[512] * 2),
    16: (*[64] * 2, "M", *[128] * 2, "M", *[256] * 3, "M", *[512] * 3, "M", *[512] * 3),
    19: (*[64] * 2, "M", *[128] * 2, "M", *[256] * 4, "M", *[512] * 4, "M", *[512] * 4),
}


class BasicBlock(nn.Module):
    """Two 3×3 convolutions around a shortcut that has no parameters.

    Where the block widens, the shortcut takes every second pixel and pads the new channels with zeros
    (option A of the ResNet paper), evenly on both sides.
    """

    def __init__(self, in_planes: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.stride = stride
        self.new_planes = planes - in_planes

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.shortcut(x))

    def shortcut(self, x: Tensor) -> Tensor:
        if self.stride > 1:
            x = x[:, :, :: self.stride, :: self.stride]
        if self.new_planes:
            before = self.new_planes // 2
            x = F.pad(x, (0, 0, 0, 0, before, self.new_planes - before))
        return x


class CifarResNet(nn.Module):
    """ResNet of 6n + 2 layers for small images: three stages of n blocks, `width` planes in the first."""

    def __init__(self, depth: int, num_classes: int = 10, in_channels: int = 3, width: int = 16) -> None:
        super().__init__()
        if depth < 8 or depth % 6 != 2:
            raise GrowpruneError(f"a CIFAR ResNet has 6n + 2 layers (8, 14, 20, ...), not {depth}")
        blocks = depth // 6
        self.conv1 = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = _stage(width, width, blocks, stride=1)
        self.layer2 = _stage(width, 2 * width, blocks, stride=2)
        self.layer3 = _stage(2 * width, 4 * width, blocks, stride=2)
        self.linear = nn.Linear(4 * width, num_classes)
        _kaiming(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        out: Tensor = self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return out


class VGG(nn.Module):
    """Batch-normalised VGG for small images (16 pixels a side or more), with one linear layer.

    The convolutions carry no bias: batch norm would cancel it. The last pooling is an average, so an image of
    any size ends in one vector of 512.
    """

    def __init__(self, depth: int, num_classes: int = 10, in_channels: int = 3) -> None:
        super().__init__()
        if depth not in VGG_PLANS:
            raise GrowpruneError(f"VGG comes in depths {', '.join(map(str, VGG_PLANS))}, not {depth}")
        layers: list[nn.Module] = []
        channels = in_channels
        for width in VGG_PLANS[depth]:
            if isinstance(width, str):
                layers.append(nn.MaxPool2d(2))
                continue
            conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
            layers += [conv, nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            channels = width
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, num_classes)
        _kaiming(self)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.pool(self.features(x)).flatten(1))
        return out


def _stage(in_planes: int, planes: int, blocks: int, stride: int) -> nn.Sequential:
    first = BasicBlock(in_planes, planes, stride)
    return nn.Sequential(first, *(BasicBlock(planes, planes, 1) for _ in range(blocks - 1)))


def _kaiming(model: nn.Module) -> None:
    """He initialisation, Var(w) = 2 / fan_in; biases start at zero."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


BUILT_IN: dict[str, Callable[..., nn.Module]] = {
    **{f"resnet{depth}": partial(CifarResNet, depth) for depth in (20, 32, 44, 56, 110)},
    **{f"vgg{depth}": partial(VGG, depth) for depth in VGG_PLANS},
}


def known(name: str) -> None:
    """Refuse, in one line, a name that `create` cannot follow, or a function that cannot be called. Makes nothing."""
    with in_one_line(name):
        maker = _maker(name)
    source, colon, _ = name.partition(":")
    if not colon or source in ("torchvision", "timm"):
        return
    try:
        parameters = inspect.signature(maker).parameters.values()
    except (TypeError, ValueError):  # written in C
        return
    for each in parameters:
        wanted = each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        if wanted and (each.name != "num_classes" or each.kind is each.POSITIONAL_ONLY):
            raise GrowpruneError(f"model '{name}' needs '{each.name}'; name a function that needs num_classes at most")


def fresh(name: str, num_classes: int | None) -> nn.Module:
    """`create`, for a function of the user's that may take no `num_classes`, and may fail."""
    with in_one_line(name):
        try:
            return create(name, num_classes)
        except TypeError as error:
            if "num_classes" not in str(error):
                raise
            return create(name)


@contextmanager
def in_one_line(name: str) -> Iterator[None]:
    """What goes wrong in a user's own function or module, and where, for those who gave its name to a command."""
    try:
        yield
    except (GrowpruneError, OSError, torch.cuda.OutOfMemoryError):  # which say what is the matter
        raise
    except Exception as error:
        ours = os.path.dirname(__file__)
        frames = [f for f in traceback.extract_tb(error.__traceback__) if os.path.isfile(f.filename)]
        theirs = [f for f in frames if not f.filename.startswith(ours) and "site-packages" not in f.filename]
        last = theirs[-1] if theirs and not isinstance(error, SyntaxError) else None
        where = f" ({os.path.relpath(last.filename)}:{last.lineno})" if last else ""
        raise GrowpruneError(f"model '{name}': {type(error).__name__}: {line(error)}{where}") from error


def create(name: str, num_classes: int | None = None, **kwargs: Any) -> nn.Module:
    """Make the network called `name`, with fresh weights.

    `resnet56`, `vgg19` and their sisters are ours; `torchvision:NAME` and `timm:NAME` come from those
    packages; `package.module:function` is any function that returns a module. `num_classes` is passed on only
    when given, so each source keeps its own default (ours is 10); other keywords go on as they are.

    >>> create("resnet20", num_classes=100).linear.out_features
    100
    """
    if num_classes is not None:
        kwargs["num_classes"] = num_classes
    model = _maker(name)(**kwargs)
    if not isinstance(model, nn.Module):
        raise GrowpruneError(f"model '{name}' gave a {type(model).__name__}, not a torch.nn.Module")
    return model


def _maker(name: str) -> Callable[..., Any]:
    """What makes the network called `name`."""
    source, colon, inner = name.partition(":")
    if not colon:
        return _built_in(name)
    if source == "torchvision":
        return _from_torchvision(inner)
    return _from_timm(inner) if source == "timm" else _from_function(source, inner)


def _built_in(name: str) -> Callable[..., nn.Module]:
    if name not in BUILT_IN:
        hint = nearest(name, BUILT_IN) or f"; there are {', '.join(BUILT_IN)}"
        others = "torchvision:NAME, timm:NAME and package.module:function work too"
        raise GrowpruneError(f"unknown model '{name}'{hint} ({others})")
    return BUILT_IN[name]


def _from_torchvision(name: str) -> Callable[..., Any]:
    library = package("torchvision").models
    names = library.list_models()
    if name not in names:
        raise GrowpruneError(f"torchvision has no model '{name}'{nearest(name, names)}")
    return partial(library.get_model, name)


def _from_timm(name: str) -> Callable[..., Any]:
    library = package("timm")
    if not library.is_model(name):
        raise GrowpruneError(f"timm has no model '{name}'{nearest(name, library.list_models())}")
    return partial(library.create_model, name)


def package(name: str) -> ModuleType:
    """Import torchvision or timm only when a model of theirs is asked for: both are optional and slow."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        what = f"{name}:NAME needs the package {name}, which is not installed; run: pip install {name}"
        raise GrowpruneError(what) from None


def _from_function(module_name: str, function_name: str) -> Callable[..., Any]:
    target = f"{module_name}:{function_name}"
    if not all(part.isidentifier() for part in [*module_name.split("."), function_name]):
        raise GrowpruneError(f"model '{target}' is not of the form package.module:function{as_module(target)}")
    module = _user_module(module_name, target)
    function: Any = getattr(module, function_name, None)
    if not callable(function):
        callables = [key for key, value in vars(module).items() if callable(value)]
        hint = nearest(function_name, callables)
        raise GrowpruneError(f"model '{target}': {module_name} has no function '{function_name}'{hint}")
    return cast(Callable[..., Any], function)


def _user_module(name: str, target: str) -> ModuleType:
    # A console script, unlike `python -m`, does not look in the working folder, where a user's model lives.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A module missing inside the user's own is their bug, and its traceback says where.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise GrowpruneError(
            f"model '{target}': no module '{error.name}' on the Python path or in this folder{as_module(target)}"
        ) from None


def as_module(target: str) -> str:
    """'; write it ...' for a function that was named by its file.

    >>> as_module("mynet.py:Res"), as_module("./nets/mine.py:Res"), as_module("mine:Res")
    ("; write it 'mynet:Res'", "; write it 'nets.mine:Res'", '')
    """
    file, _, function = target.partition(":")
    parts = PurePath(file.removesuffix(".py")).parts
    found = file.endswith(".py") and all(part.isidentifier() for part in (*parts, function))
    return f"; write it '{'.'.join(parts)}:{function}'" if found else ""
