"""The public door: ``mtcompile.compile`` as function and decorator, and what a compiled module can be asked."""

from __future__ import annotations

import copyreg
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from mtcompile.errors import MtcompileError
from mtcompile.execution.calibration import Calibration
from mtcompile.execution.model import CompiledModel
from mtcompile.machine.device import choose
from mtcompile.machine.presets import named
from mtcompile.optim.precision import precision_named
from mtcompile.optim.update_options import update_options
from mtcompile.options import FASTEST, Options, Size, parse_bytes
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.plan import Plan
from mtcompile.report.live_timeline import Viewable, timelines, view
from mtcompile.runtime.devices.protocol import Device
from mtcompile.runtime.trace import Trace

if TYPE_CHECKING:
    from mtcompile.report.explanation import Explanation


class CompiledModule(nn.Module):
    """Mixed into the class of a compiled model: same parameters, same ``state_dict``, same calls, planned memory.

    The model itself is changed (its class gains this one), so whatever holds it holds the compiled model.
    """

    _mt_model: CompiledModel

    @property
    def plan(self) -> Plan | None:
        """The plan of the program that last trained (or ran, before any training); None before the first call."""
        last = self._mt_model.session.last
        return last.plan if last else None

    @property
    def schedule(self) -> Viewable | None:
        """Its schedule: print it to read it, ``.show()`` it to see when each instruction runs and what memory it holds."""
        session = self._mt_model.session
        if (last := session.last) is None:
            return None
        measured = session.last_step[1] if session.last_step and session.last_step[0] is last.schedule else None
        return view(last, measured, session.title)

    @property
    def last_trace(self) -> Trace | None:
        """The trace of the last phase that ran: when each of its instructions started and ended."""
        return self._mt_model.session.last_trace

    def explain(self, name: str) -> Explanation:
        """Explains where and when the values of a parameter, module or block (``"layers.3.mlp"``) live, which decisions put
        them there, and what others would cost; after two steps, also what was predicted against what was measured. Print it,
        or call ``.to_json()``.

        Raises ValueError with the names that come close, and StepError before the first call.
        """
        from mtcompile.report.explain import explain_program

        session = self._mt_model.session
        return explain_program(session.last, session.calibrator.phases, name)

    def memory_report(self) -> dict[str, Any]:
        """Bytes: budget, planned and measured peak per tier, and the training state.

        ``peak_device_bytes`` is measured from the allocator's events over the first step of each program (every step
        under MT_CHECK=1).
        """
        return self._mt_model.report()

    def calibrate(self) -> Calibration:
        """Keep what the kernels and copies of the last steps took, so that programs compiled from now on, on this machine,
        are planned by it. Print it for a summary. Raises StepError before the second step."""
        return self._mt_model.session.calibrator.calibrate(self._mt_model.session.last)

    def bind(self, optimizer: torch.optim.Optimizer) -> CompiledModule:
        """Tell the planner which optimizer will step this model, when it was made after ``compile``."""
        self._mt_model.door.bind(optimizer)
        return self

    @property
    def grad_norm(self) -> float | None:
        """The norm (with ``max_grad_norm`` or ``nonfinite="skip"``) of the last step's gradients, before they were scaled."""
        updates = self._mt_model.door.updates
        return None if updates is None else updates.grad_norm

    def synchronize(self) -> None:
        """Wait for updates that run behind a forward. Raises what stopped them."""
        self._mt_model.session.drain()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and (compiled := getattr(self, "_mt_model", None)) is not None:
            compiled.session.drain()  # who asks may look at them
        return super().named_parameters(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # while the model's own forward is being captured
            return super().__call__(*args, **kwargs)
        return self._mt_model(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> NoReturn:
        raise MtcompileError(
            "a compiled model's parameters live where its plan says; expected no .to(), .cuda(), .half() and the like "
            "after compile. Convert the model first, then compile it"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy (deepcopy, save) is the plain model: plans and memory stay with this one."""
        state = {k: v for k, v in self.__dict__.items() if k != "_mt_model"}
        return copyreg.__newobj__, (_plain_class(type(self)),), state  # type: ignore[attr-defined]


def master_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Name -> fp32 master of each parameter of a model compiled with ``precision="bf16-master32"``: copies, exact.

    Raises TypeError for any other model.
    """
    compiled: CompiledModel | None = getattr(model, "_mt_model", None)
    if compiled is None or compiled.door.masters is None:
        raise TypeError('expected a model compiled with precision="bf16-master32", found one without fp32 masters')
    return compiled.door.masters.tensors()


def compile(
    model: Any = None,
    *,
    memory: Size = None,
    host: Size = None,
    optimizer: torch.optim.Optimizer | None = None,
    kernels: str = "eager",
    loss_chunks: int | str = 1,
    device: str | torch.device | None = None,
    policy: str = FASTEST,
    throttle: str | Machine | None = None,
    precision: str = "model",
    accumulate: int = 1,
    update: str = "step",
    max_grad_norm: float | None = None,
    run_ahead: bool = False,
    nonfinite: str = "stop",
    viz: str | Path | None = None,
) -> Any:
    """Train ``model`` inside a device-memory budget, with the bits of plain PyTorch.

    model      an ``nn.Module`` (returned, now compiled), or a class of modules (a subclass is returned whose instances
               are compiled); without it, a decorator
    memory     bytes of device memory for everything mtcompile holds there: ``"16GiB"``, ``"16GB"`` or a number;
               default nine tenths of what is free on a GPU, half of it on the emulated device
    host       bytes of host memory; default unlimited
    device     where it computes: ``"cuda"``, ``"cuda:1"``, or ``"cpu"``, which emulates a device in host memory; default
               the GPU if there is one. The model's parameters and buffers go home, to host memory (and back to the device
               where the plan keeps them there); tensors passed to it are sent to the device
    optimizer  the optimizer that will step the model (or ``model.bind(optimizer)`` later): its state is planned for
    kernels    ``"eager"``: the kernels of plain PyTorch, bit for bit; ``"inductor"``: compiled by Inductor, within
               rounding of them, and the same bits at every budget where the same is recomputed
    loss_chunks  compute a linear layer followed by a mean cross-entropy in that many chunks of tokens, so that whole-batch
               logits never exist; the order of summation over tokens then differs from the plain run's, and the plan's
               numerics say so. CaptureError where there is no such head, or where somebody else reads its logits.
               ``"auto"``: the plan chooses, and leaves the head whole where that is as fast or where it has none

    policy     ``"fastest"``: the plan is searched for; or a fixed one to compare it with: ``"resident"``,
               ``"checkpoint-all"``, ``"megatrain"``, ``"zero3-offload"``, ``"offload-all"``
    precision  ``"model"``: dtypes as the module's; ``"fp32"`` and ``"bf16"``: its parameters are cast to that (buffers are
               not); ``"bf16-master32"``: they become bf16, each with a 16-bit remainder that makes it an exact fp32 master, and
               AdamW, Adam or SGD update the masters with fp32 state (12 bytes a parameter with AdamW, and 2 for the gradient);
               they are resident on a GPU only where its update kernels gave the host's bits
    accumulate  run each training batch as so many micro-batches, region by region: parameters come in once for all of them,
               gradients (added up in their order) leave once. Tensors are cut along their first dimension; the loss is the mean
               over the tokens that count
    update     ``"step"``: gradients wait in ``p.grad`` for ``optimizer.step()``. ``"backward"``: parameters are updated as
               their gradients arrive, by the optimizer's own arithmetic, and ``p.grad`` stays None; ``optimizer.step()`` is
               still called, and ends the step. Gradients take host memory of two regions only, and updates run beside the
               backward. Clipping by hand, gradient scalers and hooks of parameters raise
    max_grad_norm  with it: gradients are scaled as ``clip_grad_norm_`` would, so all are kept until their norm is known
               (``model.grad_norm``), and updates start then
    run_ahead  with it: updates go on behind the next forward, whose prefetches wait for their own. Who looks at parameters
               while they do calls ``model.synchronize()`` first; ``state_dict`` and evaluation do so themselves
    nonfinite  with it, for a loss or gradient that is not finite: ``"stop"`` raises StepError, ``"skip"`` leaves out the whole
               update (and keeps all gradients until their norm is known), ``"continue"`` warns
    viz        write each training program's timeline there, an HTML file: after its first step as predicted, after its second
               with what was measured beside it; of a second program to ``<name>-2.html``, and so on
    throttle   on the emulated device, a machine whose speeds it keeps to (a preset, a JSON file or a ``Machine``): plans are
               for that machine, and every copy and kernel takes at least the time they say. Numbers are the same

    The first call captures and plans; ``BudgetError`` (with ``.minimum_bytes``) when no plan fits, ``CaptureError``
    when the model cannot be captured. Raises ValueError and TypeError for options that cannot be honoured.
    """
    options = Options(
        memory=parse_bytes(memory),
        host=parse_bytes(host),
        kernels=kernels,
        loss_chunks=loss_chunks,
        policy=policy,
        precision=precision_named(precision),
        updates=update_options(update, max_grad_norm, run_ahead, nonfinite),
        accumulate=accumulate,
        throttle=None if throttle is None else named(throttle),
        viz=viz,
    )
    if model is None:
        return lambda target: _compiled(target, options, choose(device), optimizer)
    return _compiled(model, options, choose(device), optimizer)


def _compiled(model: Any, options: Options, device: Device, optimizer: torch.optim.Optimizer | None) -> Any:
    if options.throttle is not None and device.where.type != "cpu":
        raise ValueError(f'expected throttle= with device="cpu" only, found {device.where}')
    if isinstance(model, type) and issubclass(model, nn.Module):
        if optimizer is not None:
            raise TypeError("expected no optimizer= when compiling a class; call model.bind(optimizer) on the instance")
        return _compiling_subclass(model, options, device)
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected an nn.Module or a class of modules, found {type(model).__name__}")
    if isinstance(model, CompiledModule):
        raise TypeError("the model is compiled already; expected a plain nn.Module")
    model.__class__ = _compiled_class(type(model))
    _attach(model, options, device, optimizer)
    return model


def _compiling_subclass(cls: type[nn.Module], options: Options, device: Device) -> type[nn.Module]:
    """A subclass whose instances are compiled when they have been made."""
    subclass = _compiled_class(cls)

    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, *args, **kwargs)
        _attach(self, options, device, None)

    subclass.__init__ = __init__  # type: ignore[method-assign]
    subclass.__name__, subclass.__qualname__ = cls.__name__, cls.__qualname__
    return subclass


def _compiled_class(cls: type[nn.Module]) -> type[nn.Module]:
    return type(f"Compiled{cls.__name__}", (CompiledModule, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def _plain_class(cls: type) -> type:
    return next(base for base in cls.__mro__ if not issubclass(base, CompiledModule))


def _attach(model: nn.Module, options: Options, device: Device, optimizer: torch.optim.Optimizer | None) -> None:
    plain = _plain_class(type(model))

    def call(*args: Any, **kwargs: Any) -> Any:
        return plain.__call__(model, *args, **kwargs)

    if any(t.device.type != "cpu" for t in (*model.parameters(), *model.buffers())):
        plain._apply(model, lambda tensor: tensor.cpu())  # type: ignore[attr-defined]
    compiled = CompiledModel(model, call, options, device, optimizer)
    compiled.session.listeners += timelines(options.viz, compiled.session.title)
    object.__setattr__(model, "_mt_model", compiled)
