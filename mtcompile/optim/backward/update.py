"""``update="backward"``: the optimizer's arithmetic on each region's parameters as its gradients arrive.

The user's optimizer keeps its class, groups, state, hooks and schedulers. What it would do to a parameter in ``step()`` is
done here to a few of them at a time, by a stand-in that shares its state; its own ``step()`` then finds no gradients. That call
still ends a step: hyper-parameters are read when a backward begins. ``Loop`` handles all other events of a training loop.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from mtcompile import torch_private
from mtcompile.capture.refusals import first_line
from mtcompile.errors import StepError
from mtcompile.optim.backward.checks import check_memory, check_optimizer, check_parameters, check_step
from mtcompile.optim.backward.finite import DeviceFlags, check_loss, losses_of
from mtcompile.optim.backward.fragments import FragmentUpdates
from mtcompile.optim.backward.kernels import KERNELS, Backward, Shares, tell_what_changed, update_streamed
from mtcompile.optim.backward.loop import Loop, check_others
from mtcompile.optim.backward.waiting_state import let_wait
from mtcompile.optim.calling_trainer import CallingTrainer
from mtcompile.optim.disk_state import DiskState
from mtcompile.optim.master_weights import Masters
from mtcompile.optim.state_sizes import STATES, is_elementwise, streamed_copies, update_workspace
from mtcompile.optim.update_options import UpdateOptions
from mtcompile.optim.wholeness import Wholeness, parameters_of
from mtcompile.optim.written_update import class_name
from mtcompile.passes.analysis.state import UPDATE_SETS
from mtcompile.passes.plan import NORM_COPIES, Updates
from mtcompile.passes.step_graph import Fragment, calls, fragments_of, is_update, streamed_state, update
from mtcompile.references import weakly
from mtcompile.runtime.optim.host_kernels import library
from mtcompile.runtime.schedule import gib

Kernel = Callable[..., Any]
_ISSUING = 2  # threads that updates leave to those that issue kernels and copies


class UpdatesInBackward:
    """Updates of one model's parameters in its backward: their options, and the state of the backward that runs or ran last.

    ``wholeness``: of the model, which an error after the first update spoils. ``where``: it computes, beside updates.
    ``flags``: of a device that runs behind the threads which issue to it.
    ``trainer``: the name of the one that called last, while it trains: it clips by hand, and logs norms.
    """

    def __init__(
        self, model: nn.Module, options: UpdateOptions, masters: Masters | None, wholeness: Wholeness, where: torch.device
    ) -> None:
        self.options, self.masters, self._wholeness = options, masters, wholeness
        self._told = options  # by ``compile``
        if masters is not None:
            masters.spared = 0 if where.type == "cpu" else _ISSUING
        self.model, self._where = weakref.ref(model), where
        self.optimizer: torch.optim.Optimizer | None = None
        self.disk: DiskState | None = None
        self.shares: Shares | None = None
        self.flags: DeviceFlags | None = None
        self.loop = Loop(wholeness, self._check_step)
        self.trainer = self._limit_name = ""
        # What it clips together with the parameters that are updated here, by name.
        self._also_clipped = weakref.WeakValueDictionary[str, nn.Parameter]()
        self._backward: Backward | None = None
        self._ended: Backward | None = None
        self._threads = torch.get_num_threads()
        model.register_load_state_dict_pre_hook(weakly(self.loop.before_loading))
        model.register_state_dict_pre_hook(weakly(self.loop.before_saving))

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Update through this optimizer from now on. Raises as ``check_optimizer``, and as ``Loop.bind``."""
        check_optimizer(optimizer)
        self.loop.bind(optimizer)
        self.optimizer = optimizer

    def follow(self, trainer: CallingTrainer | None) -> bool:
        """Clips as the trainer that calls will, and notes norms for it; or as ``compile`` was told. Tells whether options have
        changed. Raises StepError if both were told, and not the same."""
        limit, limit_name = self._told.max_grad_norm, ""
        self.trainer = self._limit_name = ""
        self._also_clipped.clear()
        if trainer is not None:
            if limit is not None and trainer.max_grad_norm not in (None, limit):
                raise StepError(
                    f"expected one limit of the gradients' norm, found max_grad_norm={limit:g} in compile and "
                    f"{trainer.max_grad_norm:g}, the {trainer.limit_name}; leave it out of compile"
                )
            self.trainer, self._limit_name = trainer.name, trainer.limit_name
            if trainer.max_grad_norm is not None:
                ours = set(map(id, self._parameters().values()))
                self._also_clipped.update((n, p) for n, p in trainer.clipped().items() if p.requires_grad and id(p) not in ours)
            if limit is None:
                limit, limit_name = trainer.max_grad_norm, trainer.limit_name
        if (limit, limit_name) == (self.options.max_grad_norm, self.options.limit_name):
            return False
        self.options = replace(self._told, max_grad_norm=limit, limit_name=limit_name)
        return True

    def release(self) -> None:
        """Forgets the last backward."""
        self.settle()
        self.loop.release()
        self.disk = self.shares = self._backward = self._ended = None

    # ---------------------------------------------------------------------------------------------------- for the plan

    def parameter_ids(self) -> frozenset[int] | None:
        """The ids of the parameters that the optimizer updates, which change whenever ``updated_names`` may change."""
        if self.optimizer is None:
            return None
        return frozenset(map(id, parameters_of(self.optimizer)))

    def updated_names(self) -> frozenset[str]:
        """The names of the parameters that the optimizer updates. Raises StepError without an optimizer."""
        return frozenset(self._parameters())

    def _parameters(self) -> dict[str, nn.Parameter]:
        model, updated = self._updated()
        # nn.Module's method: the model's own waits for updates
        return {name: p for name, p in nn.Module.named_parameters(model) if id(p) in updated}

    def _updated(self) -> tuple[nn.Module, frozenset[int]]:
        """The model, and the ids of the parameters that the optimizer updates."""
        updated, model = self.parameter_ids(), self.model()
        if updated is None or model is None:
            raise StepError('update="backward" needs an optimizer: pass optimizer= to compile, or call model.bind(optimizer)')
        return model, updated

    def plan_updates(self, state_copies: float) -> Updates:
        """The updates as a plan has them."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        keeps_state = all(group.get("momentum", 1) for group in groups)
        workspace = update_workspace(self.masters is not None, keeps_state, library() is not None)
        held, norm_copies = self.options.needs_all_gradients, 1.0 if self.masters is None else NORM_COPIES
        streams, states = self.masters is not None and self.masters.may_be_on(self._where, self.optimizer), 0
        if streams and keeps_state and self.optimizer is not None and library() is not None:
            states = len(STATES[class_name(self.optimizer)])
        updates = Updates(state_copies, workspace, held, self.options.run_ahead, checked=not held, norm_copies=norm_copies)
        return replace(updates, streamed=streamed_copies(streams, states))

    def kernels(self, step: fx.GraphModule) -> dict[str, Callable[..., Sequence[Tensor]]]:
        """The kernels of a schedule's update instructions, by name."""
        parts = fragments_of(step)
        if parts and not is_elementwise(self.optimizer):
            raise StepError(
                f'fragments= with update="backward" updates rows of a weight by themselves; {type(self.optimizer).__name__} '
                f'may look at all of it. Expected one of torch.optim.{", ".join(STATES)}, or update="step"'
            )
        nodes = [node for node in calls(step) if is_update(node)]
        on_host = [node for node in nodes if node.target is update and node.meta["tier"] == "host"]  # in the order of one queue
        coming = {
            node: tuple(name for later in on_host[place : place + UPDATE_SETS] for name in later.meta["names"])
            for place, node in enumerate(on_host, 1)
        }
        return {
            node.name: functools.partial(
                self._run, _kernel_of(node), parts, coming.get(node), node.meta["tier"] == "host", node.meta["names"]
            )
            for node in nodes
        }

    def _run(
        self,
        kernel: Kernel,
        parts: Mapping[str, Fragment],
        coming: tuple[str, ...] | None,
        on_host: bool,
        names: tuple[str, ...],
        *values: Tensor,
    ) -> Sequence[Tensor]:
        """Run a kernel in any thread, with the settings of the caller of the backward. ``parts``: the fragments of its step.
        ``coming``: what the host updates after it; None for other kernels."""
        backward = self._backward
        assert backward is not None
        if parts and backward.fragments is None:
            backward.fragments = FragmentUpdates(parts)
        if torch.get_num_threads() != backward.threads:
            torch.set_num_threads(backward.threads)
        with self.marking_failure(), torch.no_grad():
            if on_host:
                backward.stop_if_refused()
            if coming is not None:
                backward.coming = coming
            updated: Sequence[Tensor] = kernel(backward, names, *values)
            for name in names if kernel is KERNELS[update] else ():
                backward.sums.pop(name, None)
            if coming is not None and not coming and self.disk is not None:
                self.disk.finish()
            return updated

    # -------------------------------------------------------------------------------------------------- of one backward

    def before_forward(self, inputs: Mapping[str, Tensor]) -> bool:
        """Note the settings of the caller's thread; the backward may run in another. Tells whether that backward will update
        any of the inputs. Raises StepError as ``check_memory``."""
        self._threads = torch.get_num_threads()
        self._check_disk()
        if torch_private.inside_ddp():
            raise StepError(
                'the model was called by DistributedDataParallel, to which update="backward" leaves no gradients to average; '
                "expected the compiled model itself, on every rank, after torch.distributed.init_process_group: it combines "
                'gradients itself. Where a library wraps it, such as the Transformers Trainer, pass update="step"'
            )
        _, updated = self._updated()
        trained = {name for name, tensor in inputs.items() if id(tensor) in updated and tensor.requires_grad}
        check_memory(inputs, trained)
        if trained and self._where.type != "cpu":  # whose backward runs in another thread, where nothing can be held back
            self.loop.interrupts.hold()
        return bool(trained)

    def begin_backward(
        self,
        planned: frozenset[str],
        trained: frozenset[str],
        outputs: Sequence[Tensor | None],
        tangents: Sequence[Tensor | None],
        node: Any,
        adds_up: bool,
    ) -> None:
        """Check everything before a backward, while nothing has changed, and note the optimizer's options.

        ``planned``: the names of the optimizer's parameters when the forward ran; ``trained``: of those that the backward
        updates; ``outputs``: those that are still alive; ``node``: the backward's, in autograd's graph; ``adds_up``: its
        gradients are added to those of backwards before. Raises StepError.
        """
        self._wholeness.check()
        self._check_disk()
        parameters, optimizer, model = self._parameters(), self.optimizer, self.model()
        assert optimizer is not None and model is not None
        if parameters.keys() != planned:
            raise StepError("the optimizer's parameters are others than when this forward ran; run the forward again")
        updated = {name: parameters[name] for name in parameters if name in trained}
        self.loop.check_backward(updated)
        if not all(accumulating := torch_private.accumulating(node)):
            called = "backward(inputs=...)" if any(accumulating) else "torch.autograd.grad"
            raise StepError(
                f'{called} was called; with update="backward" all gradients are used as they arrive, and nothing was changed. '
                'Call backward() without inputs, or use update="step"'
            )
        check_parameters(updated, adds_up)
        check_others(updated, {id(p) for p in (*nn.Module.parameters(model), *parameters_of(optimizer))}, node)
        groups: dict[int, tuple[int, Mapping[str, Any]]] = {}
        for index, group in enumerate(optimizer.param_groups):
            options = {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
            groups |= {id(parameter): (index, options) for parameter in group["params"]}
        if self.masters is not None:
            self.masters.check(optimizer, parameters.values())
        if self.options.run_ahead:
            let_wait(optimizer, weakly(self._wait))
        sums = self._sums(parameters, updated)
        losses, flags = losses_of(outputs, tangents), self.flags
        if flags is not None and not sums and not any(tangent.device.type == "cpu" for _, tangent in losses):
            flags.begin(losses, len(updated), self.options.nonfinite)
        else:  # last, since a device computes beside the other checks until here
            flags = None
            for output, tangent in losses:
                check_loss(float(tangent), None if output is None else float(output), self.options.nonfinite)
        self._backward = Backward(
            self._wholeness.steps + 1, self.options, optimizer, self.masters, parameters, groups, self._threads, self.grad_norm
        )
        self._backward.trained, self._backward.sums = updated, sums
        asked, expected = not self.options.limit_name, _clipping_by(self.options)
        self._backward.clipping = torch_private.Clipping(is_asked=asked, expected=expected, wait=weakly(self._wait))
        self._backward.notes_norms = bool(self.trainer)
        self._backward.disk, self._backward.shares, self._backward.flags = self.disk, self.shares, flags

    def check_clipped(self, kept: Collection[str], node: Any) -> None:
        """Raises StepError if the trainer will clip gradients together with those of a backward which that leaves, or that are
        left already. ``kept``: the names of the model's parameters whose gradients it leaves; ``node``: the backward's, in
        autograd's graph."""
        model = self.model()
        if not self._also_clipped or model is None:
            return
        elsewhere = torch_private.leaves_beside(node)
        left = set(map(id, torch_private.leaves_behind(node) if elsewhere is None else elsewhere))
        left |= {id(p) for name, p in nn.Module.named_parameters(model) if name in kept}
        names = [name for name, p in self._also_clipped.items() if p.grad is not None or id(p) in left]
        if names:
            lacks, way = "compiled model", "compile all that is trained"
            if any(self._also_clipped[names[0]] is p for p in nn.Module.parameters(model)):
                lacks, way = "optimizer", "pass all parameters to the optimizer"
            more, it = (f" and {len(names) - 1} more", "them") if len(names) > 1 else ("", "it")
            raise StepError(
                f"{self.trainer} clips {names[0]}{more} together with the parameters that the backward updates, but the "
                f"{lacks} lacks {it}. Nothing was changed. Freeze {it} (requires_grad_(False)), {way}, set the "
                f'{self._limit_name} to 0, or use update="step"'
            )

    def _sums(self, parameters: Mapping[str, nn.Parameter], updated: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
        """Returns the gradients of backwards before, by the names of their parameters. Raises StepError if the norm is of some
        that this backward has no part of."""
        if self.masters is not None:
            self.masters.widen(updated.values())
        held = {name: p.grad for name, p in parameters.items() if type(p.grad) is torch.Tensor}
        if (left := held.keys() - updated.keys()) and (self.options.needs_all_gradients or self.trainer):
            raise StepError(
                f'{min(left)} has a gradient of a backward before this one, and none of this one; with update="backward" only '
                'gradients of the last backward of a step are clipped, and nothing was changed. Use update="step"'
            )
        return {name: gradient for name, gradient in held.items() if name in updated}

    def _wait(self) -> None:
        self._wholeness.drain()
        self.loop.updated()

    def _check_disk(self) -> None:
        """Raises StepError if updates are in memory that no file took."""
        if self.disk is not None and (nbytes := self.disk.store.spares.in_memory_nbytes):
            raise StepError(
                f"the disk took no more writes, so {gib(nbytes)} of the last step's updates are in memory. That step has "
                "ended: weights and state are whole. Save a checkpoint on another drive, and load it in a new process whose "
                "disk= can be written"
            )

    def settle(self) -> None:
        """Waits, after an error, until no update is read from disk or written there any more."""
        if self.disk is not None:
            self.disk.settle()

    def all_issued(self) -> None:
        """Waits until flags on the device say that all its updates could be made. Raises StepError if not."""
        if self._backward is not None:
            self._backward.stop_if_refused(wait=True)
            self._backward.end_flags()

    def end_backward(self) -> None:
        """Note that all updates of the backward are done, or under way."""
        assert self._backward is not None
        self._ended = self._backward
        self._wholeness.steps += 1
        self.loop.used(self._backward.trained, not self.options.run_ahead, self._backward.clipping, self.trainer)
        for notice in () if self.disk is None else self.disk.store.spares.new_notices():
            warnings.warn(notice, stacklevel=2)

    @contextlib.contextmanager
    def marking_failure(self) -> Iterator[None]:
        """Note whatever is raised inside: after the backward's first update the model is unusable until it is loaded again."""
        try:
            yield
        except BaseException as error:
            if self._backward is not None and self._backward.has_updated:
                self._spoil_amid(error)
            raise

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Notes whatever a backward raises, and ends what its updates have under way then. If none of it has been written, the
        model is as before the backward. Ctrl-C waits until all updates have ended; a second one does not."""
        self.loop.interrupts.hold()
        try:
            yield
        except BaseException as error:
            self.loop.interrupts.forget()
            self.settle()
            if self._backward is not None and not self._backward.undo():
                tell_what_changed(error)
                self._spoil_amid(error)
            elif self._backward is not None and self._backward.added:
                self.loop.failed(self._backward.trained)
            raise

    def failed_behind(self) -> None:
        """Note that updates which ran behind a forward have failed, whatever failed: nobody knows which are done."""
        self.settle()
        self._spoil("failed behind the forward after it: some parameters may have been updated, others not")

    def _spoil_amid(self, error: BaseException) -> None:
        self._spoil(f"failed among its updates: some parameters have been updated, others not ({first_line(error)})")

    def _spoil(self, why: str) -> None:
        """Refuse to go on, from now until a checkpoint is loaded, with what the last backward has left."""
        assert self._backward is not None
        self._wholeness.spoil(f"step {self._backward.number} {why}")

    @property
    def has_updated(self) -> bool:
        """True from the first update of the last backward on."""
        backward = self._backward
        return backward is not None and (backward.has_updated or bool(backward.entries or backward.flagged))

    @property
    def allocated_state(self) -> bool:
        """True where the last backward allocated optimizer state, which later ones need not."""
        return self._backward is not None and self._backward.allocated_state

    @property
    def grad_norm(self) -> float | None:
        """The last norm of all gradients that was computed, in a backward that has ended."""
        return None if self._ended is None else self._ended.grad_norm

    def _check_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._ended is not None:
            check_step(self._ended, optimizer)


def _kernel_of(node: fx.Node) -> Kernel:
    return KERNELS[node.target] if streamed_state(node) is None else update_streamed


def _clipping_by(options: UpdateOptions) -> str:
    """Returns what a loop may do to gradients that a backward with these options has used."""
    limit, name = options.max_grad_norm, options.limit_name
    if limit is None:
        return "no clipping" + (f": the {name} was 0 when the forward ran" if name else "")
    if name:
        return f"clip_grad_norm_ to {limit:g}, which was the {name} when the forward ran"
    return f"clip_grad_norm_ with the max_grad_norm={limit:g} that compile was given"
