"""The public interface: ``mtcompile.compile`` as function and decorator, and the methods of a compiled module."""

from __future__ import annotations

import contextlib
import copy
import copyreg
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mtcompile import knobs, torch_private
from mtcompile.distributed.joining import check_distributable, ranks_of
from mtcompile.errors import MtcompileError, StepError
from mtcompile.execution.calibration import Calibration
from mtcompile.execution.memory.movable import changes_of, check_movable
from mtcompile.execution.model import CompiledModel
from mtcompile.machine.device import choose
from mtcompile.machine.presets import named
from mtcompile.optim.master_weights import Masters
from mtcompile.optim.precision import precision_named
from mtcompile.optim.update_options import update_options
from mtcompile.options import FASTEST, Options, parse_disk
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.plan import Plan
from mtcompile.references import is_weak
from mtcompile.report.live_timeline import Viewable, timelines, view
from mtcompile.runtime.devices.protocol import Device
from mtcompile.runtime.trace import Trace
from mtcompile.sizes import Size, parse_bytes

if TYPE_CHECKING:
    from mtcompile.report.explanation import Explanation


class CompiledModule(nn.Module):
    """Mixed into the class of a compiled model: same parameters, same ``state_dict``, same calls, planned memory.

    ``compile`` changes the model in place (its class gains this one), so existing references see the compiled model.
    """

    # As comments: torch.jit.script reads the annotations of the first class that has some.
    _mt_model = None  # type: CompiledModel | None
    _mt_masters = None  # type: Masters | None  # of a model that was closed, as is its ``_mt_wholeness``

    @property
    def _mt_open(self) -> CompiledModel:
        """Its plans and memory. Raises StepError if it was closed."""
        if self._mt_model is None:
            raise StepError("expected a compiled model, found one that was closed; mtcompile.compile compiles it again")
        return self._mt_model

    @property
    def plan(self) -> Plan | None:
        """The plan of the program that last trained; None before the first training call. For a forward that is compiled in
        parts: the plan of one part, with the ``numerics`` of all parts."""
        return self._mt_open.plan

    @property
    def schedule(self) -> Viewable | None:
        """The schedule of that program. Print it to read it; ``.show()`` opens its timeline. None before the first
        training call."""
        session = self._mt_open.session
        if (last := session.last) is None:
            return None
        measured = session.last_step[1] if session.last_step and session.last_step[0] is last.schedule else None
        return view(last, measured, session.title)

    @property
    def last_trace(self) -> Trace | None:
        """The trace of the last step, or of its forward until the backward has run: when each instruction started and ended."""
        return self._mt_open.session.last_trace

    def explain(self, name: str) -> Explanation:
        """Explains where and when the values of a parameter, module or block (``"layers.3.mlp"``) live, which decisions put
        them there, and what the alternatives would cost. From the second step on, also compares predicted and measured times.
        Print the result, or call its ``.to_json()``.

        Raises ValueError with similar names for an unknown name, and StepError before the first training call.
        """
        from mtcompile.report.explain import explain_program, first_name

        session, parts = self._mt_open.session, self._mt_open.parts
        return explain_program(session.last, session.calibrator.phases, first_name(self, name), parts)

    def memory_report(self) -> dict[str, Any]:
        """Returns bytes by name: budget, planned peak and measured peak per tier, the training state, and what the last step
        copied to the device.
        A model that was called with several shapes has several programs. ``programs`` is a list with the inputs, the planned
        peaks and the step time of each. All peaks beside it are the highest of all programs.
        ``peak_device_bytes`` is measured from the allocator's events in the first step of each program (in every step
        under MT_CHECK=1).
        """
        from mtcompile.report.programs import MemoryReport, rows

        session = self._mt_open.session
        programs = rows(self._mt_open.programs, session.last)
        return MemoryReport({**self._mt_open.report(), **session.fetched_nbytes()}, programs=programs)

    def calibrate(self) -> Calibration:
        """Stores how long the kernels and copies of the last steps took. Programs compiled later on this machine are planned
        with these times. Print the result for a summary. Raises StepError before the second step."""
        return self._mt_open.session.calibrator.calibrate(self._mt_open.session.last)

    def bind(self, optimizer: torch.optim.Optimizer) -> CompiledModule:
        """Tells the planner which optimizer will step this model, if you created it after ``compile``. Returns the model."""
        _check_optimizer(optimizer)
        self._mt_open.door.bind(optimizer)
        return self

    @property
    def grad_norm(self) -> float | None:
        """The norm of the last step's gradients before clipping, with ``max_grad_norm`` or ``nonfinite="skip"``; else None."""
        updates = self._mt_open.door.updates
        if updates is None:
            return None
        self.synchronize()  # the last norm may still be computed
        return updates.grad_norm

    def synchronize(self) -> None:
        """Waits for updates that ``run_ahead`` left running. Raises the error that stopped them, if any."""
        if self._mt_model is not None:
            self._mt_model.session.drain()

    def close(self) -> None:
        """Ends compilation: waits for updates, gives the weights back to plain memory, and frees all that mtcompile holds: on
        the device, in pinned memory and on disk. May be called again.

        The model goes on as plain PyTorch on the CPU, with the same weights, class and optimizer; fp32 masters stay with the
        optimizer. ``with mtcompile.compile(...) as model:`` closes it at the end. Raises the error that stopped updates, if
        any; and BudgetError, before anything changes, if host memory has no room for what is on disk.
        """
        if self._mt_model is not None:
            self._mt_model.close()
            object.__setattr__(self, "_mt_masters", self._mt_model.door.masters)
            object.__setattr__(self, "_mt_wholeness", self._mt_model.door.wholeness)  # whose hooks go on
            object.__setattr__(self, "_mt_model", None)

    def __enter__(self) -> CompiledModule:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            self.close()
        else:  # which matters more than one of closing
            with contextlib.suppress(MtcompileError, OSError):
                self.close()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        if not torch_private.in_capture() and self._mt_model is not None:
            self._mt_model.session.drain()  # the caller may read them
        return super().named_parameters(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._mt_model is not None:
            if not torch_private.in_capture():
                return self._mt_model(*args, **kwargs)
            if torch_private.in_foreign_capture():
                return self._mt_uncaptured(*args, **kwargs)
        return super().__call__(*args, **kwargs)  # also while its own forward is being captured

    @torch_private.never_captured
    def _mt_uncaptured(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a call of a function that ``torch.compile`` compiles: this model's part of it stays planned."""
        return self(*args, **kwargs)

    def _infer_parameters(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        """Initializes a lazy model, whose class then is the one that it becomes, compiled."""
        super()._infer_parameters(module, args, kwargs)  # type: ignore[misc]
        if not isinstance(module, CompiledModule):
            module.__class__ = _compiled_class(type(module))

    def _apply(self, fn: Any, recurse: bool = True) -> CompiledModule:
        """Does nothing for ``.to(device)``, ``.cuda()`` and ``.cpu()``, which training libraries call: parameters stay where
        the plan says. Raises MtcompileError for what would change dtypes, strides or values."""
        if self._mt_model is None:
            return super()._apply(fn, recurse)  # type: ignore[no-any-return,no-untyped-call]
        if changes := changes_of(fn, {t.dtype for t in (*self.parameters(), *self.buffers())}):
            raise MtcompileError(
                f"expected only a device in .to() of a compiled model, found a change of {changes}. Convert the model first, "
                "then compile it"
            )
        self._mt_model.follow_trainer()  # which sends the model to its device before it loads the state of its optimizer
        return self

    def __copy__(self) -> nn.Module:
        """Returns a plain model with the same parameters."""
        return self._plain_copy(self._plain_state())

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Returns a plain copy: plans and memory stay with this model."""
        copied = memo[id(self)] = self._plain_copy(None)
        copied.__setstate__(copy.deepcopy(self._plain_state(), memo))
        return copied

    def _plain_state(self) -> Any:
        """Returns the state that a copy of the plain model takes. Raises StepError for a model between two steps."""
        if self._mt_model is not None:
            self._mt_model.session.drain()
            self._mt_model.door.wholeness.check()
            self._mt_model.door.before_copy()
        state = super().__reduce_ex__(4)[2]  # of the class's own __getstate__, if it has one
        if not isinstance(state, dict):
            return state
        state = {name: value for name, value in state.items() if not name.startswith("_mt_")}
        for name in ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"):
            if name in state:  # without those of this model
                state[name] = type(state[name])((key, hook) for key, hook in state[name].items() if not is_weak(hook))
        return state

    def _plain_copy(self, state: Any) -> nn.Module:
        plain: Any = plain_class(type(self))
        copied: Any = plain.__new__(plain)
        if state is not None:
            copied.__setstate__(state)
        return copied  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saves (pickle, torch.save) as a plain model, which loads without mtcompile, also with ``weights_only=True``."""
        make, arguments, *state = copy.deepcopy(self).__reduce_ex__(protocol)
        if make is copyreg.__newobj__:  # type: ignore[attr-defined]  # whose class must be that of the object itself
            return make, arguments, *state[:1], _PlainWhileAsked(self, arguments[0])
        return (make, arguments, *state)


class _PlainWhileAsked:
    """An iterator without items, which pickle reads after it has compared the model's class. From its creation until pickle
    reads it, or until saving has failed, the model has its plain class."""

    def __init__(self, model: nn.Module, plain: type) -> None:
        self._compiled = [(model, type(model))]
        model.__class__ = plain

    def __iter__(self) -> _PlainWhileAsked:
        return self

    def __next__(self) -> Any:
        self.__del__()
        raise StopIteration

    def __del__(self) -> None:
        for model, compiled in self._compiled:
            model.__class__ = compiled
        self._compiled.clear()


def master_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns exact copies of the fp32 masters, by parameter name, of a model compiled with ``precision="bf16-master32"``.

    Raises TypeError for any other model.
    """
    compiled: CompiledModel | None = getattr(model, "_mt_model", None)
    masters: Masters | None = getattr(model, "_mt_masters", None) if compiled is None else compiled.door.masters
    if masters is None:
        raise TypeError('expected a model compiled with precision="bf16-master32", found one without fp32 masters')
    if compiled is not None:
        compiled.session.drain()
    return masters.tensors()


def compile(
    model: Any = None,
    *,
    memory: Size = None,
    host: Size = None,
    disk: str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    kernels: str = "auto",
    loss_chunks: int | str = 1,
    device: str | torch.device | None = None,
    policy: str = FASTEST,
    throttle: str | Machine | None = None,
    precision: str = "model",
    accumulate: int | str = 1,
    update: str = "step",
    max_grad_norm: float | None = None,
    run_ahead: bool = False,
    nonfinite: str = "stop",
    experts: str = "auto",
    embeddings: str = "auto",
    elastic: bool = False,
    fragments: str | None = "auto",
    tiles: int | str = 1,
    effort: str | None = None,
    viz: str | Path | None = None,
    process_group: Any = None,
) -> Any:
    """Makes ``model`` train within a device-memory budget, with results bit-identical to plain PyTorch.

    model      an ``nn.Module``, compiled in place; or a module class: returns a subclass whose instances are compiled; without
               it, a decorator is returned
    memory     bytes of device memory for all that mtcompile holds there, as ``"16GiB"``, ``"16GB"`` or a number; default: nine
               tenths of the free memory of a GPU, half of it on the emulated device
    host       bytes of host memory, for all ranks of this host; default: what is available there, less a reserve of 5%
    disk       a folder on a fast local disk and the bytes that may be taken there, ``"/mnt/nvme:400GiB"``, for what ``host``
               has no room for: frozen weights, activations, and with ``update="backward"`` weights that train, with their state
    optimizer  the optimizer that steps the model; its state is planned for. Or call ``model.bind(optimizer)`` later
    kernels    ``"eager"``: the kernels of plain PyTorch, bit for bit; ``"exact"``: elementwise operations fused by Inductor
               where tests give the same bits; ``"auto"``: eager, until exact kernels are measured on a GPU; ``"inductor"``: all
               compiled by Inductor, within rounding of plain PyTorch; budgets at which the same parts are recomputed give the
               same bits
    loss_chunks  computes a linear layer and its mean cross-entropy in that many chunks of tokens, so that whole-batch logits
               never exist unless the model returns them; sums over tokens change. ``"auto"``: whatever is fastest.
               CaptureError where there is no such head
    tiles      runs the parts of blocks that work token by token (projections, norms, MLP) in at most that many tiles, whose
               temporaries the backward makes again; weight gradients are sums over tiles. Else as above
    device     where to compute: ``"cuda"``, ``"cuda:1"``, or ``"cpu"``, which emulates a device in host memory; default:
               the GPU if there is one. Parameters and buffers move to the host, except what the plan keeps on the device
    policy     ``"fastest"``: searches for a plan; or a fixed one, to compare with: ``"resident"``, ``"checkpoint-all"``,
               ``"megatrain"``, ``"zero3-offload"``, ``"offload-all"``
    throttle   slows the emulated device down to a machine's speeds (a preset, a JSON file or a ``Machine``) and plans for them
    precision  ``"model"``: the module's dtypes; ``"fp32"`` and ``"bf16"``: parameters are cast, buffers are not;
               ``"bf16-master32"``: parameters become bf16, each with a 16-bit remainder that makes it an exact fp32 master;
               AdamW, Adam or SGD update the masters with fp32 state (12 bytes per parameter with AdamW, and 2 for the
               gradient). They stay on a GPU only if its kernels have produced the same bits as the host's
    accumulate  runs each batch as that many micro-batches, cut along the first dimension, region by region: parameters are
               fetched once; gradients, added in order, leave once. The loss is the whole batch's. ``"auto"``: the fastest
    update     ``"step"``: gradients wait in ``p.grad`` for ``optimizer.step()``. Once a forward finds older gradients
               there, plans have room for these, too. ``"backward"``: parameters are updated as their gradients arrive, with
               the optimizer's own arithmetic; call ``optimizer.step()`` and ``zero_grad()`` as before. From the backward
               until ``zero_grad()``, each use of ``p.grad`` raises StepError. Gradients take the host memory of two
               regions; if the host is slower than the device, a plan uses more, within the limit that ``host`` sets.
               Gradient scalers and hooks of parameters raise StepError
    max_grad_norm  with ``update="backward"``: clips as ``clip_grad_norm_`` does. All gradients are kept until their norm
               (``model.grad_norm``) is known; then updates start
    run_ahead  with ``update="backward"``: lets updates continue during the next forward, whose prefetches wait for those of
               their own region. ``model.parameters()``, ``state_dict``, ``optimizer.state`` and calls of the model wait by
               themselves; call ``model.synchronize()`` before you read parameters in any other way
    nonfinite  with ``update="backward"``, for a loss or gradient that is not finite: ``"stop"`` raises StepError, ``"skip"``
               skips the whole update (and keeps all gradients until their norm is known), ``"continue"`` warns
    experts    of a mixture that ``grouped_mm`` computes, those that are copied to the device. ``"used"``: those that tokens
               chose, once the router has run; ``"all"``, ahead of the router; ``"auto"``: the used ones if that spares much
    embeddings  which rows of embeddings are on the device: ``"used"``: those that a batch names; or as above
    elastic    True: plans again in the background when the last steps show other speeds, and goes on by the new plan, with
               the same bits, where it is 3 % faster. ``memory_report()["plan_changes"]`` says why
    fragments  cuts weights into fragments of rows, each copied, used and updated by itself. ``"exact"``: if that is faster,
               where it splits no sum; ``"auto"``: as that, if nothing fits whole; ``"split"``: any linear weight; None: none
    effort     what planning may cost: ``"quick"``, for experiments: a first step soon, slower plans, without a bound;
               ``"normal"``; ``"thorough"``, for long runs: ten times as many plans are compared. Default: MT_EFFORT, or normal
    viz        writes the timelines of training programs to this HTML file (of the second, to ``<name>-2.html``, ...)
    process_group  the ranks that train the model together; default: all, once ``torch.distributed`` is initialised. Weights
               start as those of rank 0; each gradient is the mean over the ranks

    The first training call plans. It raises ``BudgetError`` (with ``.minimum_bytes``) if no plan fits, and ``CaptureError`` if
    the model cannot be captured. Calls without gradients run the plain forward, and are measured against the same budget.
    ``compile`` itself raises ValueError or TypeError for options that it cannot honour.
    """
    options = Options(
        memory=parse_bytes(memory, "memory"),
        host=parse_bytes(host, "host"),
        disk=parse_disk(disk),
        kernels=kernels,
        loss_chunks=loss_chunks,
        policy=policy,
        precision=precision_named(precision),
        updates=update_options(update, max_grad_norm, run_ahead, nonfinite),
        accumulate=accumulate,
        throttle=None if throttle is None else named(throttle),
        viz=viz,
        experts=experts,
        embeddings=embeddings,
        elastic=elastic,
        fragments=fragments,
        tiles=tiles,
        effort=knobs.effort() if effort is None else effort,
    )
    computing = choose(device, options.memory)
    if options.throttle is not None and computing.where.type != "cpu":
        raise ValueError(f'expected throttle= with device="cpu" only, found {computing.where}')
    _check_optimizer(optimizer)
    if model is None:
        return lambda target: _compiled(target, options, computing, optimizer, process_group)
    return _compiled(model, options, computing, optimizer, process_group)


def _compiled(model: Any, options: Options, device: Device, optimizer: torch.optim.Optimizer | None, process_group: Any) -> Any:
    if isinstance(model, type) and issubclass(model, nn.Module):
        if optimizer is not None:
            raise TypeError("expected no optimizer= when compiling a class; call model.bind(optimizer) on the instance")
        return _compiling_subclass(model, options, device, process_group)
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected an nn.Module or a class of modules, found {type(model).__name__}")
    if isinstance(model, CompiledModule) and model._mt_model is not None:
        raise TypeError("the model is compiled already; expected a plain nn.Module")
    check_distributable(model)
    if getattr(model, "_mt_masters", None) is not None:
        raise TypeError(
            "the model was closed with fp32 masters, which its optimizer keeps; expected a new model and optimizer, into which "
            "you load a checkpoint"
        )
    if not isinstance(model, CompiledModule):
        model.__class__ = _compiled_class(type(model))
    _attach(model, options, device, optimizer, process_group)
    return model


def _check_optimizer(optimizer: Any) -> None:
    if optimizer is not None and not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "state")):
        given = repr(optimizer) if isinstance(optimizer, str) else getattr(optimizer, "__name__", type(optimizer).__name__)
        raise TypeError(
            f"expected an optimizer of this model's parameters, as in torch.optim.AdamW(model.parameters()), found {given}"
        )


def _compiling_subclass(cls: type[nn.Module], options: Options, device: Device, process_group: Any) -> type[nn.Module]:
    """Makes a subclass whose instances are compiled at the end of their constructor."""
    subclass = _compiled_class(cls)

    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, *args, **kwargs)
        check_distributable(self)
        _attach(self, options, device, None, process_group)

    subclass.__init__ = __init__  # type: ignore[method-assign]
    return subclass


def _compiled_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Returns a subclass of the same name: libraries look models up by it, and write it into their configurations."""
    attributes: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    ours = [name for name, value in vars(CompiledModule).items() if isinstance(value, property)]  # not for torch.jit.script
    attributes["__jit_unused_properties__"] = [*ours, *getattr(cls, "__jit_unused_properties__", ())]
    return type(cls.__name__, (CompiledModule, cls), attributes)


def plain_class(cls: type) -> type:
    """Returns the class that a model had before it was compiled, or its own."""
    return next(base for base in cls.__mro__ if not issubclass(base, CompiledModule))


def _attach(model: nn.Module, options: Options, device: Device, optimizer: Any, process_group: Any) -> None:
    plain = plain_class(type(model))

    def call(model: nn.Module, *args: Any, **kwargs: Any) -> Any:  # not of this very model, which it would keep
        return plain.__call__(model, *args, **kwargs)

    if any(t.device.type != "cpu" for t in (*model.parameters(), *model.buffers())):
        check_movable(model)
        plain._apply(model, lambda tensor: tensor.cpu())  # type: ignore[attr-defined]
    compiled = CompiledModel(model, call, options, device, optimizer, ranks_of(process_group, options, model))
    compiled.session.listeners += timelines(options.viz, compiled.session.title)
    object.__setattr__(model, "_mt_model", compiled)
