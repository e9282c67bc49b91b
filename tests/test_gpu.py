"""Where a GPU is: the penalty never waits for it, replays in a CUDA graph, and gives what the CPU gives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import growprune as gp
from growprune import models, proof

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SHORT = {
    "greg1": gp.GReg1(delta_lambda=0.1, ku=3, ks=6),
    "greg2": gp.GReg2(delta_lambda=0.1, delta_lambda_pick=0.01, tau_pick=0.05, ku=3, ks=6),
}


def prepared(schedule: gp.Schedule, scope: str = "filter", granularity: str = "filter") -> tuple[nn.Module, gp.Pruner]:
    torch.manual_seed(0)
    net = models.create("resnet20").cuda()
    pruner = gp.Pruner(
        net,
        torch.ones(1, 3, 32, 32, device="cuda"),
        schedule,
        scope=scope,
        granularity=granularity,  # type: ignore[arg-type]
    )
    return net, pruner


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 3, 32, 32, generator=generator)
    return x.cuda(), torch.arange(16).remainder(10).cuda()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("scope", ["filter", "path"])
@pytest.mark.parametrize("name", SHORT)
def test_no_step_waits_for_the_device(name: str, scope: str) -> None:
    """Steps and λ's growth under PyTorch's own watch for synchronisation; only the one pick may wait."""
    net, pruner = prepared(SHORT[name], scope)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3, momentum=0.9, weight_decay=5e-4)
    pruner.attach(optimizer)
    x, y = batch()
    while not pruner.done:
        F.cross_entropy(net(x), y).backward()
        picks = pruner.step_count + 1 == pruner.schedule.pick_step
        torch.cuda.set_sync_debug_mode("default" if picks else "error")
        try:
            optimizer.step()
            pruner.separation()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        optimizer.zero_grad()
    assert pruner.step_count == pruner.total_steps


@pytest.mark.parametrize("granularity", ["filter", "weight"])
@pytest.mark.parametrize("name", SHORT)
def test_a_captured_step_replays_what_eager_steps_do(name: str, granularity: str) -> None:
    """The whole step as one CUDA graph, `advance` after each replay: weights and masks as in an eager loop."""
    torch.backends.cudnn.deterministic = True
    x, y = batch()
    results = []
    for graphed in (False, True):
        net, pruner = prepared(SHORT[name], granularity=granularity)
        optimizer = torch.optim.SGD(net.parameters(), 1e-3, momentum=0.9, weight_decay=5e-4)
        net.eval()  # batch statistics would see the warm-up steps

        def step(net: nn.Module = net, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad(set_to_none=False)
            F.cross_entropy(net(x), y).backward()
            optimizer.step()

        start = {k: v.clone() for k, v in net.state_dict().items()}
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        net.load_state_dict(start)
        for state in optimizer.state.values():
            state["momentum_buffer"].zero_()
        pruner.attach(optimizer)
        if graphed:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            assert pruner.step_count == 0
            while not pruner.done:
                graph.replay()
                pruner.advance()
        else:
            while not pruner.done:
                step()
        results.append((torch.cat([p.detach().flatten() for p in net.parameters()]), pruner.masks()))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=1e-6)
    assert all(torch.equal(results[0][1][layer], mask) for layer, mask in results[1][1].items())


@pytest.mark.parametrize("granularity", ["filter", "weight"])
def test_the_same_units_go_on_both_devices(granularity: str) -> None:
    """CPU and GPU pick alike, and the compacted network on the GPU is proved there."""
    net, pruner = prepared(gp.OneShot(), granularity=granularity)
    masks = pruner.masks()
    host = gp.Pruner(net.cpu(), torch.ones(1, 3, 32, 32), gp.OneShot(), granularity=granularity)  # type: ignore[arg-type]
    assert all(torch.equal(masks[layer].cpu(), mask) for layer, mask in host.masks().items())
    small = gp.Pruner(net.cuda(), torch.ones(1, 3, 32, 32).cuda(), gp.OneShot(), granularity=granularity).compact()  # type: ignore[arg-type]
    assert {p.device.type for p in small.parameters()} == {"cuda"}


def test_a_proof_is_not_blurred_by_tf32() -> None:
    """Torch allows it to convolutions: the whole network is then rounded, the one with odd widths is not."""
    assert torch.backends.cudnn.allow_tf32
    torch.manual_seed(0)
    net = models.create("resnet56").cuda()
    for norm in net.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias)
    example = torch.randn(2, 3, 32, 32, device="cuda")
    pruner = gp.Pruner(net, example, gp.OneShot(), ratios=0.7)
    small = pruner.compact(fold=False)
    assert proof.difference(small, proof.masked(net, pruner.groups, pruner._state.pruned), example) < 1e-4


@pytest.mark.filterwarnings("ignore:compact. the push has ended")  # so short a one does not push far
def test_the_model_may_move_after_the_pruner_is_made() -> None:
    """Made on the CPU, trained on the GPU: the penalty follows the weights, and the example too."""
    net = models.create("resnet20")
    pruner = gp.Pruner(net, torch.ones(1, 3, 32, 32), SHORT["greg2"])
    net.cuda()
    optimizer = torch.optim.SGD(net.parameters(), 1e-3, momentum=0.9)
    pruner.attach(optimizer)
    x, y = batch()
    while not pruner.done:
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert gp.measure(pruner.compact(), x[:1]).macs < gp.measure(net, x[:1]).macs
