"""What Dynamo does not guard: hooks of all modules, methods of classes, limits of deques; and modes that no plan follows."""

import collections
from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.overrides import TorchFunctionMode

import mtcompile
from mtcompile.capture.methods import TracedMethods


class Helper:
    def scaled(self, x):
        return x * 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.helper = nn.Linear(4, 4), Helper()
        self.seen = collections.deque([1.0], maxlen=2)

    def act(self, x):
        return x.tanh()

    def forward(self, x):
        self.seen.appendleft(float(len(x)))
        return self.helper.scaled(self.act(self.linear(x))).sum() * self.seen[-1] * len(self.seen)


def results(model, change, x):
    """The loss and the weight's gradient of some calls; ``change(step, stack)`` comes before each of them."""
    found = []
    for step in range(4):
        with ExitStack() as stack:
            change(step, stack)
            model.zero_grad()
            loss = model(x[: step % 3 + 1])
            loss.backward()
        found += [loss.detach(), model.linear.weight.grad.clone(), torch.tensor(model.seen)]
    return found


def compare(change):
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    with pytest.MonkeyPatch.context() as patch:
        plain = results(Model(), lambda step, stack: change(step, stack, patch), x)
    with pytest.MonkeyPatch.context() as patch:
        model = mtcompile.compile(Model(), memory="1MiB")
        compiled = results(model, lambda step, stack: change(step, stack, patch), x)
    assert all(map(torch.equal, plain, compiled))


def test_methods_hooks_and_limits_that_change_are_followed():
    def change(step, stack, patch):
        if step == 1:
            patch.setattr(Model, "act", lambda self, x: x.sin())
            handle = modules.register_module_forward_hook(lambda module, args, output: output * 0.5)
            stack.callback(handle.remove)
        if step == 2:
            patch.setattr(Helper, "scaled", lambda self, x: x * 3)

    compare(change)


def test_a_limit_of_a_deque_that_changes_is_followed():
    class Limited(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.seen = nn.Linear(4, 4), collections.deque(maxlen=3)

        def forward(self, x):
            return self.linear(x).sum() * self.seen.maxlen

    model = mtcompile.compile(Limited(), memory="1MiB")
    first = model(torch.ones(2, 4))
    model.seen = collections.deque(maxlen=6)
    assert torch.equal(model(torch.ones(2, 4)), first * 2)


def test_traced_methods_tell_a_change_once():
    class Changing(nn.Module):
        @property
        def scale(self):
            return 1.0

        def forward(self, x):
            return x * self.scale

    methods = TracedMethods()
    methods.note({Changing.forward.__code__, Changing.scale.fget.__code__}, [Changing()])
    assert not methods.changed()
    Changing.scale = property(lambda self: 2.0)
    assert methods.changed() and not methods.changed()


def test_a_function_mode_is_refused_and_a_default_device_is_not():
    class Counting(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    model = mtcompile.compile(Model(), memory="1MiB")
    with Counting(), pytest.raises(mtcompile.StepError, match="Counting, a TorchFunctionMode"):
        model(torch.ones(2, 4))
    with torch.device("cpu"):
        assert torch.isfinite(model(torch.ones(2, 4)))
