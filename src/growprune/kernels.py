"""3×3 convolutions of few channels, in Triton: what cuDNN is slow at, and small or pruned networks are made of.

cuDNN's kernels want many channels, in multiples of eight; 16 of them, and the widths left by pruning (1, 3, 6), are not
what they are made for (benchmarks/convolutions.py sets the two side by side). Here a program takes a run of columns of
pixels, across images, and goes down their rows: a row of the input is read once for the three rows of the output that
it touches, and nothing but the addresses of rows is computed on the way.

In memory the three horizontal neighbours of a pixel lie side by side, 3C numbers: they are read together where that
fits a power of two better (PIECES 1), else one by one (PIECES 3). `convolve` gives the output and, with the weight
mirrored, the input's gradient; `correlate` gives sums of the weight's gradient, one a program, that `collect` adds up
in a fixed order, so the result is deterministic.

Activations are bfloat16 with channels last; weights stay float32 and are rounded when read; sums are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def convolve(x, w, y, images, height, width, w_start, w_out, w_in, w_row, w_col,
             C: tl.constexpr, K: tl.constexpr, PIECES: tl.constexpr,
             BM: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """y[m, k] = Σ over the nine neighbours of pixel m and its channels c: x · w, for ROWS rows of BM columns."""
    span: tl.constexpr = 3 * C // PIECES
    at = tl.program_id(0) * BM + tl.arange(0, BM)
    col = at % width
    pixel = at // width * height * width + col
    first = tl.program_id(1) * ROWS
    q = tl.arange(0, BQ)
    k = tl.arange(0, BK)
    kept = (at < images * width)[:, None] & (k < K)[None, :]
    weights = ()
    inside = ()
    for part in tl.static_range(PIECES):
        right = (part * span + q) // C
        for down in tl.static_range(3):
            place = w_start + down * w_row + right * w_col + (part * span + q) % C * w_in
            weight = tl.load(w + place[:, None] + k[None, :] * w_out,
                             mask=(q < span)[:, None] & (k < K)[None, :], other=0.0)  # fmt: skip
            weights = weights + (weight.to(x.dtype.element_ty),)  # noqa: RUF005 -- Triton knows no stars
        column = col[:, None] + right[None, :]
        mask = (at < images * width)[:, None] & (q < span)[None, :] & (column >= 1) & (column <= width)
        inside = inside + (mask,)  # noqa: RUF005
    near = (pixel - 1)[:, None] * C + q[None, :]
    to = pixel[:, None] * K + k[None, :]
    above = tl.zeros((BM, BK), tl.float32)  # sums of the output's row above the one being read
    here = tl.zeros((BM, BK), tl.float32)
    for row in range(tl.maximum(first - 1, 0), tl.minimum(first + ROWS + 1, height)):
        below = tl.zeros((BM, BK), tl.float32)
        tiles = ()
        for part in tl.static_range(PIECES):
            tile = tl.load(x + row * width * C + near + part * span, mask=inside[part], other=0.0)
            tiles = tiles + (tile,)  # noqa: RUF005
        for part in tl.static_range(PIECES):
            above = tl.dot(tiles[part], weights[3 * part + 2], above)
            here = tl.dot(tiles[part], weights[3 * part + 1], here)
            below = tl.dot(tiles[part], weights[3 * part], below)
        if row > first:
            tl.store(y + (row - 1) * width * K + to, above.to(y.dtype.element_ty), mask=kept)
        above = here
        here = below
    if first + ROWS >= height:
        tl.store(y + (height - 1) * width * K + to, above.to(y.dtype.element_ty), mask=kept)


@triton.jit
def correlate(a, b, out, images, height, width, tiles, across, size, w_start, w_a, w_b, w_row, w_col,
              A: tl.constexpr, B: tl.constexpr, BM: tl.constexpr, BQ: tl.constexpr, BB: tl.constexpr,
              ROWS: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """out[part, weight] = Σ over this part's pixels m: a[neighbour of m] · b[m]; q counts right and channel of a.
    A row of a meets three of b: STEP rows of a are taken at once, with STEP + 2 of b."""
    q = tl.program_id(1) * BQ + tl.arange(0, BQ)
    k = tl.arange(0, BB)
    right = q // A
    low = tl.zeros((BQ, BB), tl.float32)
    mid = tl.zeros((BQ, BB), tl.float32)
    top = tl.zeros((BQ, BB), tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        at = tile % across * BM + tl.arange(0, BM)
        col = at % width
        pixel = at // width * height * width + col
        first = tile // across * ROWS
        column = col[:, None] + right[None, :]
        inside = (at < images * width)[:, None] & (q < 3 * A)[None, :] & (column >= 1) & (column <= width)
        there = (at < images * width)[:, None] & (k < B)[None, :]
        near = (pixel - 1)[:, None] * A + q[None, :]
        straight = pixel[:, None] * B + k[None, :]
        for row in range(first, tl.minimum(first + ROWS, height), STEP):
            others = ()
            for i in tl.static_range(STEP + 2):
                mask = there & (row + i >= 1) & (row + i <= height)
                others = others + (tl.load(b + (row + i - 1) * width * B + straight, mask=mask, other=0.0),)  # noqa: RUF005
            for i in tl.static_range(STEP):
                mask = inside if STEP == 1 else inside & (row + i < height)
                turned = tl.trans(tl.load(a + (row + i) * width * A + near, mask=mask, other=0.0))
                low = tl.dot(turned, others[i], low)
                mid = tl.dot(turned, others[i + 1], mid)
                top = tl.dot(turned, others[i + 2], top)
    place = w_start + right * w_col + q % A * w_a
    to = out + tl.program_id(0) * size + place[:, None] + k[None, :] * w_b
    mask = (q < 3 * A)[:, None] & (k < B)[None, :]
    tl.store(to, top, mask=mask)
    tl.store(to + w_row, mid, mask=mask)
    tl.store(to + 2 * w_row, low, mask=mask)


@triton.jit
def collect(parts, out, count, size, BP: tl.constexpr, BS: tl.constexpr):
    """out[i] = Σ over the parts, in an order that is always the same."""
    i = tl.program_id(0) * BS + tl.arange(0, BS)
    total = tl.zeros((BP, BS), tl.float32)
    for first in range(0, count, BP):
        p = first + tl.arange(0, BP)
        mask = (p < count)[:, None] & (i < size)[None, :]
        total += tl.load(parts + p[:, None] * size + i[None, :], mask=mask, other=0.0)
    tl.store(out + i, tl.sum(total, 0), mask=i < size)
