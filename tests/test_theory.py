"""The paper's theory on quadratic losses, trained to convergence under the pruner's own penalty.

E = ½(w − w*)ᵀH(w − w*) is a loss in the weight of a linear layer. All weights carry one constant λ, as while GReg-2
picks; the converged weights must be ŵ* = (H + δλ·I)⁻¹·H·w* (equation 5).
"""

import itertools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import growprune as gp


@dataclass(frozen=True)
class Hold(gp.Schedule):
    """λ for all groups and for ever: picking that never ends."""

    penalty: float = 0.1

    @property
    def total_steps(self) -> int:
        return 10**9

    @property
    def pick_step(self) -> int:
        return 10**9

    def at(self, step: int) -> gp.Penalty:
        return gp.Penalty(gp.Phase.PICK, self.penalty, 0.0)


class Quadratic(nn.Module):
    """A linear layer whose weight is the w of the quadratic, as one row (one filter a weight) or as it is."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(1, len(start), bias=False)
        self.next = nn.Linear(len(start), 1, bias=False)  # so that the first layer's filters may go
        self.layer.weight.data = start.clone()[:, None]
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.next(self.layer(x))
        return out


def converged(
    hessian: Tensor, optimum: Tensor, penalty: float, granularity: str = "weight"
) -> tuple[Tensor, gp.Pruner]:
    """Train the quadratic from its optimum, with momentum set for the given spectrum, until nothing moves."""
    net = Quadratic(optimum)
    pruner = gp.Pruner(
        net,
        torch.ones(1, 1, dtype=torch.double),
        Hold(penalty=penalty),
        ratios={"layer": 0.5},
        granularity=granularity,  # type: ignore[arg-type]
    )
    # Polyak's rates for a quadratic with eigenvalues in [low, high]: some hundred steps to the last digit.
    spectrum = torch.linalg.eigvalsh(hessian) + penalty
    low, high = float(spectrum.min().sqrt()), float(spectrum.max().sqrt())
    optimizer = torch.optim.SGD(
        [net.layer.weight], lr=4 / (high + low) ** 2, momentum=((high - low) / (high + low)) ** 2
    )
    pruner.attach(optimizer)
    weight = net.layer.weight
    for _ in range(2000):
        weight.grad = (hessian @ (weight.detach().flatten() - optimum))[:, None]
        before = weight.detach().clone()
        optimizer.step()
        if float((weight.detach() - before).abs().max()) < 1e-15:
            break
    return weight.detach().flatten().clone(), pruner


def predicted(hessian: Tensor, optimum: Tensor, penalty: float) -> Tensor:
    """Equation 5."""
    return torch.linalg.solve(hessian + penalty * torch.eye(len(optimum), dtype=torch.double), hessian @ optimum)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


curvatures = st.floats(0.05, 5.0)
penalties = st.floats(0.02, 1.0)


@settings(max_examples=15, deadline=None)
@given(st.lists(curvatures, min_size=2, max_size=6), penalties, st.sampled_from(["weight", "filter"]))
def test_independent_weights_shrink_by_their_curvature(
    curvature: list[float], penalty: float, granularity: str
) -> None:
    """Equation 6: r = h / (h + δλ), so the larger the curvature the less a weight moves."""
    h = torch.tensor(curvature, dtype=torch.double)
    optimum = torch.linspace(-1.5, 2.0, len(h), dtype=torch.double)
    found, _ = converged(torch.diag(h), optimum, penalty, granularity)
    close(found, h / (h + penalty) * optimum)
    ratio = found / optimum
    assert bool(((ratio >= 0) & (ratio < 1)).all())
    order = torch.argsort(h)
    assert bool((ratio[order].diff() >= -1e-9).all())


def two_by_two(h11: float, h22: float, correlation: float) -> Tensor:
    h12 = correlation * (h11 * h22) ** 0.5
    return torch.tensor([[h11, h12], [h12, h22]], dtype=torch.double)


pairs = st.tuples(curvatures, curvatures, st.floats(-0.95, 0.95))


@settings(max_examples=15, deadline=None)
@given(pairs, st.tuples(st.floats(0.3, 2), st.floats(-2, -0.3)), penalties)
def test_two_coupled_weights_follow_the_papers_formula(
    entries: tuple[float, float, float], start: tuple[float, float], penalty: float
) -> None:
    """Equation 7, before its approximation."""
    hessian, optimum = two_by_two(*entries), torch.tensor(start, dtype=torch.double)
    found, _ = converged(hessian, optimum, penalty)
    (h11, h12), (_, h22) = hessian.tolist()
    w1, w2 = start
    determinant = (h11 + penalty) * (h22 + penalty) - h12**2
    first = (h11 * h22 + h11 * penalty - h12**2) * w1 + penalty * h12 * w2
    second = (h11 * h22 + h22 * penalty - h12**2) * w2 + penalty * h12 * w1
    close(found, torch.tensor([first, second], dtype=torch.double) / determinant)
    close(found, predicted(hessian, optimum, penalty))


@settings(max_examples=15, deadline=None)
@given(pairs, penalties, st.floats(0.3, 2))
def test_the_coupled_weight_of_larger_curvature_moves_less(
    entries: tuple[float, float, float], penalty: float, w: float
) -> None:
    """r1 > r2 iff h11 > h22, whatever the coupling.

    The paper leaves out the term δλ·h12 times the other weight. It vanishes where the other weight is zero, so
    that r1 and r2 are exactly the paper's; and it is the same for both where the weights are equal.
    """
    hessian = two_by_two(*entries)
    determinant = float(torch.linalg.det(hessian + penalty * torch.eye(2, dtype=torch.double)))
    one, two, both = (torch.tensor(v, dtype=torch.double) * w for v in ([1.0, 0.0], [0.0, 1.0], [1.0, 1.0]))
    r1 = float(converged(hessian, one, penalty)[0][0]) / w
    r2 = float(converged(hessian, two, penalty)[0][1]) / w
    together = converged(hessian, both, penalty)[0] / w
    for lead in (r1 - r2, float(together[0] - together[1])):
        assert lead == pytest.approx(penalty * (entries[0] - entries[1]) / determinant, rel=1e-6, abs=1e-10)
        if abs(entries[0] - entries[1]) > 1e-6:
            assert (lead > 0) == (entries[0] > entries[1])


@settings(max_examples=15, deadline=None)
@given(st.integers(3, 10), st.integers(0, 10**6), penalties)
def test_many_coupled_weights_follow_the_new_equilibrium(size: int, seed: int, penalty: float) -> None:
    """A random p.s.d. Hessian of deficient rank: flat directions go to zero, the others shrink."""
    generator = torch.Generator().manual_seed(seed)
    factor = torch.randn(size, size - 1, generator=generator, dtype=torch.double) / size**0.5
    optimum = torch.randn(size, generator=generator, dtype=torch.double)
    found, _ = converged(factor @ factor.T, optimum, penalty)
    close(found, predicted(factor @ factor.T, optimum, penalty))


@settings(max_examples=10, deadline=None)
@given(
    st.lists(curvatures, min_size=3, max_size=6, unique_by=lambda h: round(h, 2)), st.sampled_from(["weight", "filter"])
)
def test_magnitudes_separate_as_the_penalty_grows(curvature: list[float], granularity: str) -> None:
    """Weights of one magnitude come apart: their normalised spread grows with λ, from zero (figure 1)."""
    h = torch.tensor(curvature, dtype=torch.double)
    optimum = torch.ones(len(h), dtype=torch.double)
    spreads = [0.0]
    for penalty in (0.02, 0.1, 0.4, 1.6):
        found, pruner = converged(torch.diag(h), optimum, penalty, granularity)
        separation = pruner.separation()["layer"]
        torch.testing.assert_close(separation.norms.double(), found.abs())
        assert float(separation.spread) == pytest.approx(float(found.abs().std(correction=0) / found.abs().mean()))
        spreads.append(float(separation.spread))
    assert all(b > a for a, b in itertools.pairwise(spreads)), spreads


def test_greg_2_picks_the_flat_weights_where_l1_alone_would_not() -> None:
    """The point of GReg-2: magnitudes say nothing at first (the flat ones are even larger), curvature decides at τ'."""
    h = torch.tensor([0.05, 4.0, 0.1, 3.0, 0.08, 2.0], dtype=torch.double)
    optimum = torch.tensor([1.2, 1.0, 1.1, 1.0, 1.3, 1.0], dtype=torch.double)
    net = Quadratic(optimum)
    example = torch.ones(1, 1, dtype=torch.double)
    at_once = gp.Pruner(net, example, gp.OneShot(), ratios={"layer": 0.5})
    assert at_once.masks()["layer"].tolist() == [True, False, True, False, True, False]
    schedule = gp.GReg2(delta_lambda=0.1, delta_lambda_pick=0.01, tau=1.0, tau_pick=0.3, ku=10, ks=0, gamma=0.0)
    pruner = gp.Pruner(net, example, schedule, ratios={"layer": 0.5})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    pruner.attach(optimizer)
    weight = net.layer.weight
    while not pruner.done:
        weight.grad = (h * (weight.detach().flatten() - optimum))[:, None]
        optimizer.step()
    assert pruner.masks()["layer"].tolist() == [False, True, False, True, False, True]
    # The kept ones have recovered: λ = 0 lets them go back to their optimum.
    torch.testing.assert_close(weight.detach().flatten()[1::2], optimum[1::2], rtol=1e-6, atol=0)
