"""3×3 convolutions of few channels, in Triton: what cuDNN is slow at, and small or pruned networks are made of.

cuDNN's kernels want many channels, in multiples of eight; 16 of them, and the widths left by pruning (1, 3, 6), are not
what they are made for (benchmarks/convolutions.py sets the two side by side). The kernels here give one program a run
of pixels and all channels, padded to 16 in registers: forward and input gradient are the same kernel, the weight
gradient sums a run of pixels a program and then the programs, in a fixed order, so the result is deterministic.

Activations are bfloat16 with channels last; weights stay float32 and are rounded when read; sums are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def convolve(x, w, y, height, width, pixels, w_out, w_in, w_row, w_col,
              C: tl.constexpr, K: tl.constexpr, FLIP: tl.constexpr,
              BM: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """y[m, k] = Σ over the nine neighbours of pixel m and its channels c: x · w. FLIP: with the mirrored kernel."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    row = (m // width) % height
    col = m % width
    c = tl.arange(0, BC)
    k = tl.arange(0, BK)
    total = tl.zeros((BM, BK), tl.float32)
    for tap in tl.static_range(9):
        down = tap // 3 - 1
        right = tap % 3 - 1
        inside = (m < pixels) & (row + down >= 0) & (row + down < height)
        inside = inside & (col + right >= 0) & (col + right < width)
        near = tl.load(x + (m + down * width + right)[:, None] * C + c[None, :],
                       mask=inside[:, None] & (c < C)[None, :], other=0.0)  # fmt: skip
        at = (1 - down) * w_row + (1 - right) * w_col if FLIP else (1 + down) * w_row + (1 + right) * w_col
        weight = tl.load(w + c[:, None] * w_in + k[None, :] * w_out + at,
                         mask=(c < C)[:, None] & (k < K)[None, :], other=0.0)  # fmt: skip
        total = tl.dot(near, weight.to(near.dtype), total)
    tl.store(y + m[:, None] * K + k[None, :], total.to(y.dtype.element_ty),
             mask=(m < pixels)[:, None] & (k < K)[None, :])  # fmt: skip


@triton.jit
def correlate(x, g, out, height, width, pixels, chunk, size, w_out, w_in, w_row, w_col,
               C: tl.constexpr, K: tl.constexpr,
               BM: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """out[part, weight] = Σ over this part's pixels m: x[neighbour of m] · g[m]; q counts tap and channel."""
    part = tl.program_id(0)
    q = tl.program_id(1) * BQ + tl.arange(0, BQ)
    tap = q // C
    c = q % C
    down = tap // 3 - 1
    right = tap % 3 - 1
    k = tl.arange(0, BK)
    total = tl.zeros((BQ, BK), tl.float32)
    for start in range(part * chunk, part * chunk + chunk, BM):
        m = start + tl.arange(0, BM)
        row = (m // width) % height
        col = m % width
        inside = (m < pixels)[:, None] & (q < 9 * C)[None, :]
        inside = inside & (row[:, None] + down[None, :] >= 0) & (row[:, None] + down[None, :] < height)
        inside = inside & (col[:, None] + right[None, :] >= 0) & (col[:, None] + right[None, :] < width)
        near = tl.load(x + (m[:, None] + (down * width + right)[None, :]) * C + c[None, :], mask=inside, other=0.0)
        grad = tl.load(g + m[:, None] * K + k[None, :], mask=(m < pixels)[:, None] & (k < K)[None, :], other=0.0)
        total = tl.dot(tl.trans(near), grad, total)
    at = out + part * size + k[None, :] * w_out + (c * w_in + (tap // 3) * w_row + (tap % 3) * w_col)[:, None]
    tl.store(at, total, mask=(q < 9 * C)[:, None] & (k < K)[None, :])
