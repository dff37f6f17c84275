"""Loads that are refused because the training would go on with other numbers. Nothing has changed then."""

from __future__ import annotations

import functools
import json
import operator
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch import Tensor, nn

import mtcompile
from mtcompile import checkpoint
from mtcompile.errors import CheckpointError


def trained(convert: Callable[[Any], Any] = lambda model: model, turned: bool = False) -> tuple[Any, torch.optim.Optimizer]:
    """Two weights of one shape; ``turned``: the optimizer has them in the other order."""
    torch.manual_seed(0)
    model = convert(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False)))
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights[::-1] if turned else weights)
    model(torch.ones(2, 4, dtype=weights[0].dtype)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def state(model: Any, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    moments = [value for entry in optimizer.state.values() for value in entry.values()]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *moments)]


def refused(path: Path, model: Any, optimizer: torch.optim.Optimizer, message: str) -> None:
    before = state(model, optimizer)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(path, model, optimizer)
    assert all(map(torch.equal, before, state(model, optimizer)))


@pytest.mark.parametrize(
    ("one", "other"), [("float32", "bfloat16"), ("float32", "float64"), ("bfloat16", "float32"), ("float64", "float32")]
)
def test_weights_of_another_dtype(one: str, other: str, tmp_path: Path) -> None:
    first, second = getattr(torch, one), getattr(torch, other)
    path = checkpoint.save(tmp_path, *trained(lambda model: model.to(first)), step=1)
    message = re.escape(f"expected 0.weight in {second}, as in this model, found {first}")
    refused(path, *trained(lambda model: model.to(second)), rf"{message}.*model.to\({first}\)")
    model, optimizer = trained(lambda model: model.to(second).to(first))
    checkpoint.load(path, model, optimizer)  # as the message says


@pytest.mark.slow
def test_masters_take_fp32_weights_and_are_not_lost(tmp_path: Path) -> None:
    """Weights in fp32 become masters as they are. A model without masters would keep their upper half."""
    plain, _ = trained()
    checkpoint.save(tmp_path / "plain", plain, step=1)
    model: Any = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    model = mtcompile.compile(model, memory="1MiB", optimizer=optimizer, precision="bf16-master32")
    checkpoint.load(tmp_path / "plain", model)
    masters = mtcompile.master_parameters(model)
    assert all(torch.equal(masters[name], value) for name, value in plain.state_dict().items())
    path = checkpoint.save(tmp_path, model, optimizer, step=1)
    refused(path, *trained(lambda model: model.bfloat16()), "holds fp32 masters of bf16 weights, and this model has none")
    refused(path, *trained(), r"expected 0.weight in torch.float32, as in this model, found torch.bfloat16")


def test_an_optimizer_with_its_parameters_in_another_order(tmp_path: Path) -> None:
    """Of like shapes, so that nothing else would tell."""
    path = checkpoint.save(tmp_path, *trained(), step=1)
    refused(path, *trained(turned=True), "expected 0.weight in group 0 of the optimizer, found 2.weight")
    model, _ = trained()
    groups = [{"params": [model[2].weight]}, {"params": [model[0].weight]}]
    one, two = torch.optim.AdamW(groups), torch.optim.AdamW(groups[::-1])
    path = checkpoint.save(tmp_path, model, one, step=2)
    refused(path, model, two, "expected 2.weight in group 0 of the optimizer, found 0.weight")
    other = torch.optim.AdamW([{"params": [nn.Parameter(torch.ones(4, 4))]}, {"params": [model[0].weight]}])
    refused(path, model, other, "expected 2.weight in group 0 of the optimizer, found a parameter of another model")
    checkpoint.load(path, model, one)


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the way to each value of a manifest; of long lists, such as the states of generators, to the first ones."""
    for key in list(value) if isinstance(value, dict) else range(min(len(value), 12)):
        yield (*above, key)
        if isinstance(value[key], (dict, list)):
            yield from places(value[key], (*above, key))


def changed(manifest: dict[str, Any], place: tuple[Any, ...], value: Any) -> str:
    """Returns a manifest with another value, or without it, and with the checksum of that."""
    content = json.loads(manifest["content"])
    holder = functools.reduce(operator.getitem, place[:-1], content)
    if value is None:
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    text = json.dumps(content)
    return json.dumps({**manifest, "content": text, "checksum": xxhash.xxh3_128_hexdigest(text.encode())})


@pytest.mark.parametrize(
    "value", [None, -1, *(pytest.param(value, marks=pytest.mark.long) for value in ("x", [], {}))], ids=repr
)
def test_a_manifest_with_a_value_of_another_type(value: Any, tmp_path: Path) -> None:
    """Its checksum is valid, as anybody can make it. It is loaded, or refused and nothing has changed."""

    def training() -> tuple[Any, torch.optim.Optimizer, dict[str, Any]]:
        model, optimizer = trained(lambda model: model.append(nn.BatchNorm1d(4)))
        return model, optimizer, {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3)}

    model, optimizer, others = training()
    path = checkpoint.save(tmp_path, model, optimizer, step=1, others=others, extra={"at": [1, "x"]})
    file = path / "manifest.json"
    manifest = json.loads(file.read_text())
    refusals = 0
    for place in places(json.loads(manifest["content"])):
        file.write_text(changed(manifest, place, value))
        before = [*state(model, optimizer), *(t.clone() for t in model.buffers())], str(others["scheduler"].state_dict())
        try:
            checkpoint.load(path, model, optimizer, others=others)
        except CheckpointError as error:
            refusals += 1
            assert "Loaded so far" not in str(error), place
            after = [*state(model, optimizer), *model.buffers()], str(others["scheduler"].state_dict())
            assert all(map(torch.equal, before[0], after[0])) and before[1] == after[1], place
        else:
            model, optimizer, others = training()
    assert refusals > 100


def test_others_that_are_not_passed_get_a_warning(tmp_path: Path) -> None:
    model, optimizer = trained()
    others = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2)}
    checkpoint.save(tmp_path, model, optimizer, step=1, others=others)
    with pytest.warns(UserWarning, match=r"also holds the state of scheduler, .* pass others=\{'scheduler': ...\}"):
        checkpoint.load(tmp_path, model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.load(tmp_path, model, optimizer, others=others)
        checkpoint.load(tmp_path, model)  # its weights, not the training
