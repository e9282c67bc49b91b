"""Random small networks, with what ought to happen to them worked out by hand.

A network here is a stem, some blocks and a head, each a module with a forward of its own. Each block also says, in
`link`, what its layers read, channel by channel: `Links` collects that into an oracle that shares nothing with the
library's tracing. `links` is None where whose channels go together is too tangled to say in a line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

DEAD = "ignore:the model puts out the same on the example:UserWarning"
"""For networks so small that one may be dead: none of its filters shows."""
AT_ONCE_OR_NONE = "ignore:ratios. .* filters at once or none:UserWarning"
"""For any ratio of layers whose group norm has two groups or three."""

Spread = Callable[[Tensor], Tensor]


# -- the oracle ------------------------------------------------------------------------------------------------------


class TangledError(Exception):
    """Which channels go together here is not worked out by hand."""


@dataclass(frozen=True)
class Source:
    """Channels made by `layer` (None: they always stay): `spread` lays its mask, one flag a unit, over them."""

    layer: str | None
    channels: int
    spread: Spread = lambda mask: mask

    def mask(self, masks: dict[str, Tensor]) -> Tensor:
        if self.layer is None or self.layer not in masks:
            return torch.ones(self.channels, dtype=torch.bool)
        return self.spread(masks[self.layer])

    def then(self, spread: Spread, times: int) -> Source:
        return Source(self.layer, self.channels * times, lambda mask: spread(self.spread(mask)))


Sources = list[Source]


@dataclass
class Links:
    """What each layer reads; which layers' filters something keeps from going."""

    reads: dict[str, Sources] = field(default_factory=dict)
    made: list[str] = field(default_factory=list)
    pinned: set[str] = field(default_factory=set)

    def layer(self, name: str, incoming: Sources, channels: int, spread: Spread = lambda mask: mask) -> Sources:
        self.reads[name] = incoming
        self.made.append(name)
        return [Source(name, channels, spread)]

    def pin(self, sources: Sources) -> Sources:
        self.pinned |= {s.layer for s in sources if s.layer is not None}
        return [Source(None, sum(s.channels for s in sources))]

    @property
    def prunable(self) -> set[str]:
        return set(self.made) - self.pinned


def repeated(times: int, mask: Tensor) -> Tensor:
    return mask.repeat_interleave(times)


def tiled(times: int, mask: Tensor) -> Tensor:
    return mask.repeat(times)


# -- parts -----------------------------------------------------------------------------------------------------------

NORMS = ("batch", "batch", "batch", "none", "instance", "instance affine", "group", "layer")


class ChannelNorm(nn.Module):
    """Layer norm over the channels of an image, as ConvNeXt has it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def norm(kind: str, channels: int) -> nn.Module:
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    if kind == "instance":
        return nn.InstanceNorm2d(channels)
    if kind == "instance affine":
        return nn.InstanceNorm2d(channels, affine=True, track_running_stats=True)
    if kind == "group":
        return nn.GroupNorm(channels // 2 if channels % 2 == 0 else channels, channels)
    return ChannelNorm(channels) if kind == "layer" else nn.Identity()


def normed(kind: str, sources: Sources, links: Links) -> Sources:
    """What a norm does to whose channels may go: group norm takes whole groups, layer norm lets none go."""
    if kind == "layer":
        return links.pin(sources)
    if kind == "group":
        channels = sum(s.channels for s in sources)
        if len(sources) > 1 or sources[0].spread(torch.ones(channels)).shape != (channels,):
            raise TangledError
        width = 2 if channels % 2 == 0 else 1
        return [Source(sources[0].layer, channels, partial(repeated, width))]
    return sources


def conv(c_in: int, c_out: int, kernel: int = 3, bias: bool = True, **more: Any) -> nn.Conv2d:
    more.setdefault("padding", kernel // 2)
    return nn.Conv2d(c_in, c_out, kernel, bias=bias, **more)


class Gate(nn.Module):
    """Squeeze and excitation, with linear layers or 1×1 convolutions."""

    def __init__(self, channels: int, convs: bool) -> None:
        super().__init__()
        self.convs = convs
        self.down = nn.Conv2d(channels, 3, 1) if convs else nn.Linear(channels, 3)
        self.up = nn.Conv2d(3, channels, 1) if convs else nn.Linear(3, channels)

    def forward(self, x: Tensor) -> Tensor:
        if self.convs:
            return x * self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1)))).sigmoid()
        return x * self.up(F.relu(self.down(x.mean((2, 3))))).sigmoid()[:, :, None, None]

    def link(self, name: str, incoming: Sources, links: Links) -> Sources:
        hidden = links.layer(f"{name}.down", incoming, 3)
        links.reads[f"{name}.up"] = hidden  # its filters go with the channels it gates, so it is no layer of its own
        return incoming


@dataclass(frozen=True)
class Taste:
    """What the blocks of one network have in common."""

    norm: str
    bias: bool
    gate: str


class Block(nn.Module):
    out: int

    def link(self, name: str, incoming: Sources, links: Links) -> Sources:
        raise NotImplementedError


# -- blocks ----------------------------------------------------------------------------------------------------------


class Plain(Block):
    """Two convolutions, one after the other."""

    def __init__(self, c_in: int, mid: int, out: int, kernel: int, stride: int, taste: Taste) -> None:
        super().__init__()
        self.out, self.kind = out, taste.norm
        self.conv1 = conv(c_in, mid, kernel, taste.bias, stride=stride)
        self.norm1 = norm(taste.norm, mid)
        self.conv2 = conv(mid, out, 3, taste.bias)
        self.norm2 = norm(taste.norm, out)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))

    def link(self, name: str, incoming: Sources, links: Links) -> Sources:
        x = normed(self.kind, links.layer(f"{name}.conv1", incoming, self.conv1.out_channels), links)
        return normed(self.kind, links.layer(f"{name}.conv2", x, self.out), links)


class Residual(Block):
    """A basic block; the shortcut is the identity, a projection, or padded with zeros."""

    def __init__(self, c_in: int, mid: int, out: int, shortcut: str, before: bool, taste: Taste) -> None:
        super().__init__()
        out = c_in if shortcut == "identity" else max(out, c_in)
        self.out, self.kind, self.before = out, taste.norm, before
        self.norm0 = norm(taste.norm, c_in) if before else nn.Identity()
        self.conv1 = conv(c_in, mid, 3, taste.bias)
        self.norm1 = norm(taste.norm, mid)
        self.conv2 = conv(mid, out, 3, taste.bias)
        self.norm2 = nn.Identity() if before else norm(taste.norm, out)
        self.gate = Gate(out, taste.gate == "convs") if taste.gate else None
        self.shortcut = conv(c_in, out, 1, taste.bias) if shortcut == "projection" else None
        self.pads = out - c_in

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm0(x)) if self.before else x
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(y)))))
        if self.gate is not None:
            y = self.gate(y)
        y = y + self.short(x)
        return y if self.before else F.relu(y)

    def short(self, x: Tensor) -> Tensor:
        if self.shortcut is not None:
            return self.shortcut(x)
        return F.pad(x, (0, 0, 0, 0, self.pads // 2, self.pads - self.pads // 2)) if self.pads else x

    def link(self, name: str, incoming: Sources, links: Links) -> Sources:
        incoming = (
            normed(self.kind, incoming, links) if self.before else incoming
        )  # what it ties, the shortcut reads too
        x = normed(self.kind, links.layer(f"{name}.conv1", incoming, self.conv1.out_channels), links)
        x = links.layer(f"{name}.conv2", x, self.out)
        x = links.pin(x if self.before else normed(self.kind, x, links))
        if self.gate is not None:
            x = self.gate.link(f"{name}.gate", x, links)
        if self.shortcut is not None:
            links.pin(links.layer(f"{name}.shortcut", incoming, self.out))
        else:
            links.pin(incoming)
        return x


class Inception(Block):
    """Three branches side by side, concatenated."""

    def __init__(self, c_in: int, widths: Sequence[int], taste: Taste) -> None:
        super().__init__()
        a, b, c = widths
        self.out, self.kind, self.widths = a + b + c, taste.norm, widths
        self.one = conv(c_in, a, 1, taste.bias)
        self.two = conv(c_in, c + 1, 1, taste.bias)
        self.three = conv(c + 1, b, 3, taste.bias)
        self.four = conv(c_in, c, 1, taste.bias)
        self.norm = norm(taste.norm, self.out)

    def forward(self, x: Tensor) -> Tensor:
        pooled = F.max_pool2d(x, 3, stride=1, padding=1)
        return F.relu(self.norm(torch.cat([self.one(x), self.three(F.relu(self.two(x))), self.four(pooled)], 1)))

    def link(self, name: str, incoming: Sources, links: Links) -> Sources:
        a, b, c = self.widths
        x = links.layer(f"{name}.one", incoming, a)
        x = x + links.layer(f"{name}.three", links.layer(f"{name}.two", incoming, c + 1), b)
        return normed(self.kind, x + links.layer(f"{name}.four", incoming, c), links)


class Dense(Block):
    """Each layer reads all that came before it; the norm comes first, as in DenseNet."""

    def __init__(self, c_in: int, growth: int, depth: int, taste: Taste) -> None:
        super().__init__()
        self.kind = taste.norm
        self.norms, self.convs = nn.ModuleList(), nn.ModuleList()
        self.out, self.growth = c_in + growth * depth, growth
        for i in range(depth):
            self.norms.append(norm(taste.norm, c_in + growth * i))
            self.convs.append(conv(c_in + growth * i, growth, 3, taste.bias))

    def forward(self, x: Tensor) -> Tensor:
        for layer, make in zip(self.norms, self.convs, strict=True):
            x = torch.cat([x, make(F.relu(layer(x)))], 1)
        return x

    def link(self, name: str, incoming: Sources, links: Links) -> Sources:
        for i in range(len(self.convs)):
            incoming = normed(self.kind, incoming, links)  # what it ties is tied wherever it is read
            incoming = incoming + links.layer(f"{name}.convs.{i}", incoming, self.growth)
        return incoming


class Grouped(Block):
    """1×1, a grouped 3×3 and 1×1 again, as in ResNeXt."""

    def __init__(self, c_in: int, groups: int, width: int, times: int, out: int, taste: Taste) -> None:
        super().__init__()
        self.out, self.groups, self.width, self.times, self.kind = out, groups, width, times, taste.norm
        wide = groups * width
        self.conv1 = conv(c_in, wide, 1, taste.bias)
        self.norm1 = norm("batch" if taste.norm == "group" else taste.norm, wide)
        self.conv2 = conv(wide, wide * times, 3, taste.bias, groups=groups)
        self.conv3 = conv(wide * times, out, 1, taste.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        return self.conv3(F.relu(self.conv2(x)))

    def link(self, name: str, incoming: Sources, links: Links) -> Sources:
        whole = self.groups >= self.width  # whole groups go, or the same places of every group, whichever is finer
        spread = partial(repeated, self.width) if whole else partial(tiled, self.groups)
        wide = self.groups * self.width
        x = links.layer(f"{name}.conv1", incoming, wide, spread)
        if self.kind == "layer":
            x = links.pin(x)
        if whole and self.kind != "layer":
            links.reads[f"{name}.conv2"] = x
            x = [Source(f"{name}.conv1", wide * self.times, partial(repeated, self.width * self.times))]
        elif whole:
            x = links.pin(links.layer(f"{name}.conv2", x, wide * self.times))
        else:
            x = links.layer(f"{name}.conv2", x, wide * self.times, partial(tiled, self.groups))
        return links.layer(f"{name}.conv3", x, self.out)


class Depthwise(Block):
    """An inverted residual without its addition: 1×1, depthwise (`times` filters a channel), a gate, 1×1."""

    def __init__(self, c_in: int, mid: int, times: int, out: int, taste: Taste) -> None:
        super().__init__()
        self.out, self.times, self.mid = out, times, mid
        self.kind = kind = "batch" if taste.norm == "group" else taste.norm
        self.conv1 = conv(c_in, mid, 1, taste.bias)
        self.norm1 = norm(kind, mid)
        self.conv2 = conv(mid, mid * times, 3, taste.bias, groups=mid)
        self.norm2 = norm(kind, mid * times)
        self.gate = Gate(mid * times, taste.gate == "convs") if taste.gate else None
        self.conv3 = conv(mid * times, out, 1, taste.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.norm1(self.conv1(x)))
        x = F.silu(self.norm2(self.conv2(x)))
        return self.conv3(x if self.gate is None else self.gate(x))

    def link(self, name: str, incoming: Sources, links: Links) -> Sources:
        x = normed(self.kind, links.layer(f"{name}.conv1", incoming, self.mid), links)
        if self.kind == "layer":
            x = links.pin(links.layer(f"{name}.conv2", x, self.mid * self.times))
        else:
            x = [Source(f"{name}.conv1", self.mid * self.times, partial(repeated, self.times))]
        if self.gate is not None:
            x = self.gate.link(f"{name}.gate", x, links)
        return links.layer(f"{name}.conv3", x, self.out)


class Shuffle(Block):
    """Half of the channels pass, half are worked on, then both are shuffled: boundaries written into the code."""

    def __init__(self, c_in: int, mid: int, taste: Taste) -> None:
        super().__init__()
        self.left = c_in // 2
        self.right = c_in - self.left
        self.out = 2 * self.left
        self.conv1 = conv(self.right, mid, 1, taste.bias)
        self.conv2 = conv(mid, mid, 3, taste.bias, groups=mid)
        self.conv3 = conv(mid, self.left, 1, taste.bias)

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.split([self.left, self.right], 1)
        x = torch.cat([left, self.conv3(self.conv2(F.relu(self.conv1(right))))], 1)
        n, c, h, w = x.shape
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)

    def link(self, name: str, incoming: Sources, links: Links) -> Sources:
        links.pin(incoming)
        x = links.layer(f"{name}.conv1", [Source(None, self.right)], self.conv1.out_channels)
        return links.pin([Source(None, self.left), *links.layer(f"{name}.conv3", x, self.left)])


class Hourglass(Block):
    """Down by a stride, up by a transposed convolution, and what was before concatenated, as in U-Net."""

    def __init__(self, c_in: int, mid: int, up: int, taste: Taste) -> None:
        super().__init__()
        self.out, self.up_channels = c_in + up, up
        self.down = conv(c_in, mid, 2, taste.bias, stride=2, padding=0)
        self.up = nn.ConvTranspose2d(mid, up, 2, stride=2, bias=taste.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(F.relu(self.down(x)), output_size=x.shape[2:])
        return torch.cat([y, x], 1)

    def link(self, name: str, incoming: Sources, links: Links) -> Sources:
        x = links.layer(f"{name}.down", incoming, self.down.out_channels)
        return links.layer(f"{name}.up", x, self.up_channels) + incoming


class Twice(Block):
    """One convolution called twice: what it makes is what it reads, so filter i goes with channel i before it."""

    def __init__(self, c_in: int, taste: Taste) -> None:
        super().__init__()
        self.out = c_in
        self.conv = conv(c_in, c_in, 3, taste.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(F.relu(self.conv(x))))

    def link(self, name: str, incoming: Sources, links: Links) -> Sources:
        links.reads[f"{name}.conv"] = incoming
        return incoming


class Tied(Block):
    """Two convolutions that share one weight, not their biases."""

    def __init__(self, c_in: int, taste: Taste) -> None:
        super().__init__()
        self.out = c_in
        self.one = conv(c_in, c_in, 3, taste.bias)
        self.two = conv(c_in, c_in, 3, taste.bias)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.two(F.relu(self.one(x))))

    def link(self, name: str, incoming: Sources, links: Links) -> Sources:
        links.reads[f"{name}.one"] = links.reads[f"{name}.two"] = incoming
        return incoming


class Bend(Block):
    """Nothing that mixes channels: a scale and a shift as bare parameters, a PReLU, a gate over places, dropout."""

    def __init__(self, c_in: int, taste: Taste) -> None:
        super().__init__()
        self.out = c_in
        self.scale = nn.Parameter(torch.ones(c_in, 1, 1))
        self.shift = nn.Parameter(torch.zeros(1, c_in, 1, 1))
        self.bend = nn.PReLU(c_in)
        self.look = conv(c_in, 1, 3, taste.bias)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.bend(x * self.scale + self.shift))
        return x * self.look(x).sigmoid()

    def link(self, name: str, incoming: Sources, links: Links) -> Sources:
        links.reads[f"{name}.look"] = incoming  # one filter only: a layer is never emptied, so it never goes
        return incoming


# -- whole networks --------------------------------------------------------------------------------------------------


class Head(nn.Module):
    """To four numbers: pooled, flattened (so that one channel is many columns), or by a convolution."""

    def __init__(self, kind: str, c_in: int, size: int) -> None:
        super().__init__()
        self.kind, self.size = kind, size
        wide = c_in * size * size if kind == "flatten" else c_in
        self.hidden = conv(c_in, 6, 1) if kind == "conv" else nn.Linear(wide, 6)
        self.last = conv(6, 4, 1) if kind == "conv" else nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "pool":
            x = x.mean((2, 3))
        elif self.kind == "flatten":
            x = x.flatten(1)
        return self.last(F.relu(self.hidden(x)))

    def link(self, name: str, incoming: Sources, links: Links) -> None:
        if self.kind == "flatten":
            incoming = [s.then(partial(repeated, self.size**2), self.size**2) for s in incoming]
        hidden = links.layer(f"{name}.hidden", incoming, 6)
        links.pin(links.layer(f"{name}.last", hidden, 4))


class Network(nn.Module):
    def __init__(self, stem: int, bias: bool, blocks: Sequence[Block], head: Head) -> None:
        super().__init__()
        self.stem = conv(3, stem, 3, bias)
        self.blocks = nn.ModuleList(blocks)
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def links(self) -> Links | None:
        links = Links()
        x = links.pin(links.layer("stem", [Source(None, 3)], self.stem.out_channels))
        try:
            for i, block in enumerate(self.blocks):
                x = block.link(f"blocks.{i}", x, links)
        except TangledError:
            return None
        self.head.link("head", x, links)
        return links


class Sequence1d(nn.Module):
    """Convolutions along a line."""

    def __init__(self, width: int, kernel: int, bias: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(2, width, kernel, bias=bias)
        self.norm1 = nn.BatchNorm1d(width)
        self.conv2 = nn.Conv1d(width, width + 1, kernel, bias=bias)
        self.norm2 = nn.BatchNorm1d(width + 1)
        self.conv3 = nn.Conv1d(width + 1, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.avg_pool1d(F.relu(self.norm2(self.conv2(x))), 2)
        return self.conv3(x)

    def links(self) -> Links:
        links = Links()
        x = links.pin(links.layer("conv1", [Source(None, 2)], self.conv1.out_channels))
        x = links.layer("conv2", x, self.conv2.out_channels)
        links.pin(links.layer("conv3", x, 3))
        return links


class Mixer(nn.Module):
    """An MLP over places, an MLP over channels, each around a residual stream."""

    def __init__(self, width: int, tokens: int, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Linear(5, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.token1, self.token2 = nn.Linear(tokens, hidden), nn.Linear(hidden, tokens)
        self.channel1, self.channel2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.token2(F.gelu(self.token1(self.norm1(x).transpose(1, 2)))).transpose(1, 2)
        x = x + self.channel2(F.gelu(self.channel1(self.norm2(x))))
        return self.head(x.mean(1))

    def links(self) -> Links:
        links, hidden = Links(), self.token1.out_features
        for name in ("embed", "token2", "channel2", "head"):
            links.pin([Source(name, 1)])
        for kind in ("token", "channel"):
            links.made.append(f"{kind}1")
            links.reads[f"{kind}2"] = [Source(f"{kind}1", hidden)]
        return links


class Attention(nn.Module):
    """Patches, attention (torch's own or by hand, one head), an MLP."""

    def __init__(self, width: int, hidden: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.patches = nn.Conv2d(3, width, 2, stride=2)
        self.place = nn.Parameter(torch.randn(1, 9, width))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        if kind == "torch":
            self.attend = nn.MultiheadAttention(width, 2, batch_first=True)
        else:
            self.query, self.key, self.value = (nn.Linear(width, 6) for _ in range(3))
            self.out = nn.Linear(6, width)
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.place
        x = x + self.mix(self.norm1(x))
        x = x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return self.head(x[:, 0])

    def mix(self, x: Tensor) -> Tensor:
        if self.kind == "torch":
            return self.attend(x, x, x, need_weights=False)[0]
        q, k, v = self.query(x), self.key(x), self.value(x)
        if self.kind == "hand":
            return self.out((q @ k.transpose(1, 2) / 6**0.5).softmax(-1) @ v)
        q, k, v = (t.unflatten(2, (2, 3)).transpose(1, 2) for t in (q, k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def links(self) -> Links:
        links = Links()
        links.made.append("fc1")
        links.reads["fc2"] = [Source("fc1", self.fc1.out_features)]
        if self.kind == "hand":
            links.made.append("value")
            links.reads["out"] = [Source("value", 6)]
        return links


class Words(nn.Module):
    """Whole numbers in; the embedding's table is the last layer's weight."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.table = nn.Embedding(11, width)
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.last = nn.Linear(width, 11, bias=False)
        self.last.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        return self.last(x + self.fc2(F.relu(self.fc1(x))))

    def links(self) -> Links:
        links = Links()  # fc2 adds to what the table makes: a residual stream
        links.made.append("fc1")
        links.reads["fc2"] = [Source("fc1", self.fc1.out_features)]
        return links


# -- strategies ------------------------------------------------------------------------------------------------------


class Case:
    """A network, an example of its input, and the oracle. (No dataclass: hypothesis would print every number.)"""

    def __init__(self, model: nn.Module, example: Tensor, links: Links | None) -> None:
        self.model, self.example, self.links = model, example, links

    def __repr__(self) -> str:
        return f"Case({self.model}, {tuple(self.example.shape)})"


@torch.no_grad()
def randomize(model: nn.Module, generator: torch.Generator) -> nn.Module:
    """No tensor at its default: a norm of scale one, shift and mean zero hides what is cut wrongly."""
    for module in model.modules():
        for name, t in [*module._parameters.items(), *module._buffers.items()]:
            if t is None or not t.is_floating_point():
                continue
            noise = torch.rand(t.shape, generator=generator)
            if name == "running_var" or (name == "weight" and t.dim() == 1) or name == "scale":
                t.copy_(noise + 0.5)
            elif t.dim() <= 1 or name in ("shift", "place"):
                t.copy_(noise - 0.4)
            else:
                reach = t[0].numel() if t.dim() > 1 else 1
                t.copy_((noise - 0.5) * (12 / reach) ** 0.5)
    return model


@st.composite
def blocks(draw: st.DrawFn, c_in: int, taste: Taste, size: int) -> tuple[Block, int]:
    """A block that reads `c_in` channels on a side of `size`, and the size it leaves."""
    few = st.integers(2, 6)
    kind = draw(
        st.sampled_from(
            "plain residual inception dense grouped depthwise shuffle hourglass twice tied bend".split()  # noqa: SIM905
        )
    )
    if kind == "plain":
        stride = draw(st.sampled_from([1, 2])) if size > 4 else 1
        kernel = draw(st.sampled_from([1, 3]))
        return Plain(c_in, draw(few), draw(few), kernel, stride, taste), (size + stride - 1) // stride
    if kind == "residual":
        shortcut = draw(st.sampled_from(["identity", "projection", "zeros"]))
        return Residual(c_in, draw(few), draw(few), shortcut, draw(st.booleans()), taste), size
    if kind == "inception":
        return Inception(c_in, draw(st.tuples(few, few, few)), taste), size
    if kind == "dense":
        return Dense(c_in, draw(st.integers(2, 3)), draw(st.integers(1, 2)), taste), size
    if kind == "grouped":
        groups, width = draw(st.sampled_from([(2, 2), (2, 3), (3, 2), (4, 2), (2, 4), (4, 1)]))
        return Grouped(c_in, groups, width, draw(st.integers(1, 2)), draw(few), taste), size
    if kind == "depthwise":
        return Depthwise(c_in, draw(few), draw(st.integers(1, 3)), draw(few), taste), size
    if kind == "shuffle" and c_in >= 4:
        return Shuffle(c_in, draw(few), taste), size
    if kind == "hourglass":
        return Hourglass(c_in, draw(few), draw(few), taste), size
    return {"twice": Twice, "tied": Tied}.get(kind, Bend)(c_in, taste), size


@st.composite
def networks(draw: st.DrawFn, most: int = 3) -> Case:
    """A stem, one to `most` blocks of any kind, a head."""
    taste = Taste(draw(st.sampled_from(NORMS)), draw(st.booleans()), draw(st.sampled_from(["", "convs", "linear"])))
    stem, size = draw(st.integers(4, 6)), draw(st.sampled_from([5, 6]))
    width, side, chosen = stem, size, []
    for _ in range(draw(st.integers(1, most))):
        block, side = draw(blocks(width, taste, side))
        chosen.append(block)
        width = block.out
    head = Head(draw(st.sampled_from(["pool", "flatten", "conv"])), width, side)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    model = Network(stem, taste.bias, chosen, head)
    return finished(model, torch.randn(4, 3, size, size, generator=generator), generator)


@st.composite
def others(draw: st.DrawFn) -> Case:
    """Networks of other shapes: along a line, over words, mixers, attention."""
    kind = draw(st.sampled_from(["line", "mixer", "torch", "hand", "heads", "words"]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    hidden = draw(st.integers(3, 8))
    if kind == "line":
        model: nn.Module = Sequence1d(hidden, draw(st.integers(1, 3)), draw(st.booleans()))
        return finished(model, torch.randn(4, 2, 12, generator=generator), generator)
    if kind == "mixer":
        return finished(Mixer(4, 7, hidden), torch.randn(4, 7, 5, generator=generator), generator)
    if kind == "words":
        return finished(Words(5, hidden), torch.randint(0, 11, (4, 6), generator=generator), generator)
    return finished(Attention(4, hidden, kind), torch.randn(4, 3, 6, 6, generator=generator), generator)


def finished(model: Any, example: Tensor, generator: torch.Generator) -> Case:
    return Case(randomize(model, generator), example, model.links())


def cases() -> st.SearchStrategy[Case]:
    return st.one_of(networks(), networks(), networks(), others())
