"""Changes through ``.data`` between a forward and its backward: plain PyTorch's gradients, or an error."""

import pytest
import torch
from torch import nn

import mtcompile

X = torch.linspace(-1, 1, 512).reshape(64, 8)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x):
        hidden = self.second(self.first(x).tanh()).sigmoid()
        return self.last(hidden).pow(2).mean(), hidden


def gradients(model, change):
    loss, hidden = model(X)
    change(model, hidden)
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def halve(model, hidden):
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


def halve_output(model, hidden):
    hidden.data.mul_(0.5)


def replace_output(model, hidden):
    hidden.data = hidden.data * 0.5


def read(model, hidden):
    [tensor.data.norm() for tensor in (*model.parameters(), hidden)]


def put_back(model, hidden):
    before = model.second.weight.data.clone()
    model.second.weight.data.zero_()
    model.second.weight.data.copy_(before)


@pytest.fixture(scope="module")
def least():
    with pytest.raises(mtcompile.BudgetError) as caught:
        mtcompile.compile(Net(), memory=1)(X)
    return caught.value.minimum_bytes


@pytest.mark.parametrize("change", [halve, halve_output, replace_output])
def test_a_change_is_refused_where_a_plan_computes_otherwise(change, least):
    with pytest.raises(mtcompile.StepError, match=r"changed through \.data"):
        gradients(mtcompile.compile(Net(), memory=least), change)


@pytest.mark.parametrize("change", [halve, halve_output])
def test_a_plan_that_keeps_everything_in_place_follows_plain(change):
    compiled = mtcompile.compile(Net(), memory="64MiB", policy="resident")
    assert all(map(torch.equal, gradients(Net(), change), gradients(compiled, change)))


@pytest.mark.parametrize("change", [read, put_back])
def test_reading_is_no_change(change, least):
    assert all(map(torch.equal, gradients(Net(), change), gradients(mtcompile.compile(Net(), memory=least), change)))


@pytest.mark.parametrize("policy", ["fastest", "checkpoint-all"])
def test_a_cast_weight_is_not_changed_unseen(policy):
    results = []
    for model in (Net(), mtcompile.compile(Net(), memory="64MiB", policy=policy)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss, _ = model(X)
        halve(model, None)
        try:
            loss.backward()
        except mtcompile.StepError as error:
            assert "changed through .data" in str(error)
            return
        results.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *results))
