"""ImageNet's networks: torchvision's, with the weights it publishes; or trained here, on another set in its layout.

`--images FOLDER` says where the images are. With ImageNet's 1,000 classes the paper's base networks are taken; a folder
of other classes (Imagenette) gets base networks of its own first, and tables that say whose they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor, nn

from growprune.models import BasicBlock
from growprune.paper.results import Found
from growprune.paper.setting import IMAGENET, Base, Setting, called
from growprune.reading import subfolders

CLASSES = 1000
PUBLISHED = {
    "resnet34": ("ResNet34_Weights.IMAGENET1K_V1", 73.31),
    "resnet50": ("ResNet50_Weights.IMAGENET1K_V1", 76.13),
}
SMALL = "growprune.paper.imagenet:small_resnet"


def base(network: str, images: str) -> Base:
    """ResNet34 or ResNet50 for this folder of images."""
    weights, accuracy = PUBLISHED[network]
    return Base(
        f"torchvision:{network}",
        images,
        100,
        accuracy,
        SMALL,
        IMAGENET,
        weights if classes(images) == CLASSES else None,
    )


def classes(images: str) -> int:
    """Of a folder; a table can be shown without it: then its name tells ImageNet from other sets."""
    return len(subfolders(Path(images) / "train")) or (CLASSES if called(images) == "imagenet" else 0)


def on_imagenet(setting: Setting, found: Found) -> bool:
    """Are the paper's accuracies meant for this? By what was run, for the folder may be gone."""
    if found:
        return all(about_as_many(run["images"]["train"], IMAGES) for run in found.runs)
    return setting.base.weights is not None


IMAGES = 1_281_167
"""To train on, in ImageNet."""
ROOM = 0.01
"""By how much a set may have changed and still be the same: a few files more or fewer."""


def about_as_many(some: int, others: int) -> bool:
    return abs(some - others) <= ROOM * others


def title(found: Iterable[Found]) -> str:
    """On what it was run, for a table's head: by the runs, for the folder may be gone, or another."""
    sets = sorted({(run["config"]["data"], run["images"]["train"]) for each in found for run in each.runs})
    if not sets:
        return "not run here"
    if all(about_as_many(number, IMAGES) for _, number in sets):
        return "here on ImageNet"
    return f"here on {' or '.join(f'{name} ({n:,} training images)' for name, n in sets)}, not ImageNet"


class SmallResNet(nn.Module):
    """Four stages of two blocks, for grey images of 8×8 pixels."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(8), nn.ReLU()
        self.layer1 = nn.Sequential(BasicBlock(8, 8, 1), BasicBlock(8, 8, 1))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16, 1))
        self.layer3 = nn.Sequential(BasicBlock(16, 24, 2), BasicBlock(24, 24, 1))
        self.layer4 = nn.Sequential(BasicBlock(24, 32, 2), BasicBlock(32, 32, 1))
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(32, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        out: Tensor = self.fc(self.pool(x).flatten(1))
        return out


def small_resnet(num_classes: int = 10) -> nn.Module:
    return SmallResNet(num_classes)
