"""Sums of gradients over processes take little memory beside the gradients, and are those of one sum of all."""

from __future__ import annotations

import pytest
import torch
from second_device import bytes_held, peak, second_device
from torch import Tensor, nn

from posttrain.core.protocols import Alone
from posttrain.learners import gradient_sums
from posttrain.learners.gradient_sums import sum_gradients
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.models.native.decoder import new_decoder
from posttrain.models.native.decoder_shape import DecoderConfig

SECOND = second_device()


class Twins(Alone):
    """Two processes that have the same numbers."""

    size = 2

    def __init__(self) -> None:
        self.summed: list[int] = []

    def sum(self, x: Tensor) -> Tensor:
        self.summed.append(x.nbytes)
        return x.clone().mul_(2)


def test_a_sum_holds_two_buckets_beside_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_sums, "BUCKET", 1000)
    model, world = new_decoder(DecoderConfig(41, 16, 2, 2, 1, 8, 24, 64), 0).to(SECOND), Twins()
    learner = LocalLearner(model, Optimization(), world=world)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = bytes_held()
    with peak() as most:
        learner._share_gradients()
    whole = sum(p.nbytes for p in model.parameters())
    assert all((p.grad == 2).all() for p in model.parameters() if p.grad is not None)
    assert sum(world.summed) == whole + 4 and max(world.summed) == 1000 and whole > 20_000
    assert most[0] - before <= 2 * 1000 + 100, "the flag and views are all that is added"


@pytest.mark.parametrize("bucket", [4, 12, 100, 1 << 26])
def test_sums_do_not_depend_on_the_size_of_a_bucket(bucket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_sums, "BUCKET", bucket)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((3, 4), (), (0, 2), (5,), (2, 3))]
    expected = []
    for place, parameter in enumerate(parameters):
        own = torch.arange(float(parameter.numel())).view(parameter.shape) + place
        parameter.grad = own.t().contiguous().t() if own.ndim == 2 else own
        expected.append(2 * own)
    parameters[3].grad, expected[3], flag = None, torch.zeros(5), torch.ones(1)
    sum_gradients(Twins(), parameters, flag)
    assert flag.item() == 2
    for parameter, total in zip(parameters, expected, strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, total)
