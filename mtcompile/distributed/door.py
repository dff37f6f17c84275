"""The door of a model that several ranks train: parameters are at home on the host, where gradients are combined.

Weights, masters and optimizer state lie once for all ranks of a host, which update them in shares.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from mtcompile import knobs
from mtcompile.distributed.homes.shared_memory import hide
from mtcompile.distributed.homes.shares import HostShares, is_dense
from mtcompile.distributed.homes.stepping import StepsInShares
from mtcompile.distributed.meeting import RanksParted
from mtcompile.distributed.ranks import Ranks
from mtcompile.errors import BudgetError, StepError
from mtcompile.execution.compiled import CompiledStep, Frame, LiveFrames
from mtcompile.execution.memory.fragments import parameter_homes
from mtcompile.execution.memory.parameters import Slab, offsets_in_slab
from mtcompile.execution.model_door import ModelDoor
from mtcompile.optim.state_sizes import is_elementwise
from mtcompile.optim.training_state import updates_all
from mtcompile.options import Options
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.state import Budgets, is_trained, with_parts
from mtcompile.passes.joint.build import InputHomes
from mtcompile.passes.planning.problem import DoesNotFit, Planned
from mtcompile.passes.step_graph import calls, inputs_of, reduce_scatter, update
from mtcompile.references import weakly, with_hooks
from mtcompile.runtime.devices.protocol import Device
from mtcompile.runtime.schedule import Phase
from mtcompile.torch_private import shares_storage


class RanksDoor(ModelDoor):
    """A ``ModelDoor`` whose training steps are those of all ``ranks`` together. ``shares``: what those of this host have once
    between them; None until there is anything."""

    alone = False

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        device: Device,
        frames: LiveFrames,
        drain: Callable[[], None],
        ranks: Ranks,
    ) -> None:
        super().__init__(model, options, device, frames, drain)
        self.ranks, self.ranks_here = ranks, ranks.here
        self.shares: HostShares | None = None
        self._steps = StepsInShares(ranks, self.masters, self.wholeness, weakly(self._parameters))
        if self.updates is None:
            self.wholeness.around = weakly(self._steps.before), weakly(self._steps.after)
        self._settled = False  # it is decided what the ranks of this host have in common
        self._needs_parts = False  # no plan with whole weights fits
        self._parts: frozenset[str] = frozenset()  # names of which each host will have a part, while that is put into effect
        self._before_loading, self._after_loading = weakly(self._loading), weakly(self._loaded)
        self._whole_weights = weakly(self._give_whole_weights)
        model.register_load_state_dict_pre_hook(self._before_loading)
        model.register_load_state_dict_post_hook(self._after_loading)

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        if self.shares is not None and not is_elementwise(with_hooks(optimizer)):
            raise StepError(
                "the ranks of this host update shares of each parameter, and expect an optimizer that treats each element by "
                f"itself, such as AdamW; found {type(optimizer).__name__}. MT_RANKS_SHARE=0 gives each rank weights of its own"
            )
        optimizer = with_hooks(optimizer)
        new = optimizer is not self.optimizer
        super().bind(optimizer)
        self._steps.optimizer = with_hooks(optimizer)
        if new:
            with_hooks(optimizer).register_load_state_dict_pre_hook(self._before_loading)
            with_hooks(optimizer).register_load_state_dict_post_hook(self._after_loading)
            self._make_state_whole(optimizer)

    def give_back(self) -> None:
        self._make_weights_whole()
        super().give_back()
        shares, self.shares, self._steps.shares = self.shares, None, None
        if shares is None:
            return
        entries = [] if self.optimizer is None else list(self.optimizer.state.values())
        try:
            shares.give_back(entries, self.masters)
        except RanksParted as error:  # other hosts have parts of it
            shares.forget_state(entries)
            warnings.warn(f"optimizer state is lost; load the last checkpoint to go on: {error}", stacklevel=4)

    def _make_weights_whole(self) -> None:
        """Makes the weights whole on this rank, where each host has a part of them. All ranks call it."""
        parts = {} if self.shares is None else dict(self.shares.parts)
        try:
            for _, parameter in sorted(parts.items()):
                parameter.data = self.shares.whole(parameter)  # type: ignore[union-attr]
        except RanksParted as error:
            warnings.warn(
                f"weights of other hosts are lost: NaN stands for them; load the last checkpoint: {error}", stacklevel=5
            )
        if self.shares is not None:
            self.shares.parts.clear()

    # ----------------------------------------------------------------------------------- state of which other hosts have parts

    def _make_state_whole(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Lets ``optimizer.state_dict()`` have the parts of other hosts, for as long as there is the optimizer."""
        if optimizer is not None and self.shares is not None and self.shares.elsewhere is not None:
            hook = functools.partial(self.shares.whole_state_dict, {} if self.masters is None else self.masters.by_parameter)
            with_hooks(optimizer).register_state_dict_post_hook(hook)

    @property
    def on_several_hosts(self) -> bool:
        """True where each host has a part of the optimizer state."""
        return self.shares is not None and self.shares.elsewhere is not None

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Surrounds a save: the first rank may write state that other hosts have parts of, which these send until it ends."""
        shares, ranks = self.shares, self.ranks
        if shares is None or shares.elsewhere is None or (ranks.rank and ranks.me):
            yield
            return
        shares.saving = not ranks.rank
        try:
            yield
        finally:
            shares.saving = False
            shares.serve() if ranks.rank else shares.elsewhere.end()

    # ------------------------------------------------------------------------------------- what the ranks of a host share

    @property
    def updates_in_shares(self) -> bool:
        """True where the ranks of this host have one set of weights and state between them."""
        if self.ranks_here * self.ranks.sharing_hosts == 1 or not knobs.ranks_share():
            return False
        return self.shares is not None or (self.optimizer is not None and is_elementwise(with_hooks(self.optimizer)))

    @property
    def in_parts(self) -> bool:
        return bool(self.shares is not None and self.shares.parts)

    def before_copy(self) -> None:
        if self.in_parts:
            raise StepError(
                "the model was copied, and each host has a part of its weights, so a copy would lack the others; call "
                "state_dict() on all ranks and load it into a new model, or set MT_RANKS_SHARD=state to keep whole weights"
            )

    def _is_common(self, block: Mapping[str, nn.Parameter]) -> tuple[bool, bool]:
        """Tells whether the ranks of this host will have a block's parameters once, and whether they update them there."""
        # Weights of one rank on its host are where they would be without others, which have parts of their state.
        alone = self.ranks_here == 1 and not self._wants_parts
        if not block or any(not is_dense(p) or (shares_storage(p) and not alone) for p in block.values()):
            return False, False
        if not any(parameter.requires_grad for parameter in block.values()):
            # Each rank that maps frozen weights may write to its own; a GPU's copies need memory that is pinned, which cannot.
            return self.device.where.type == "cpu" and not alone, False
        together = self.updates_in_shares and updates_all(self.optimizer, block.values())
        return together and not alone, together

    def _new_slab(self, block: Mapping[str, nn.Parameter], nbytes: int, fill: Callable[[Tensor], None]) -> Slab | None:
        """Makes the slab of a block that the ranks of this host have in common; all of them call it."""
        common, together = self._is_common(block)
        if together and self.shares is None:
            self.shares = self.ranks.new_shares(self._parameters(), self.masters is not None, self.ranks.sharing_hosts)
            self._make_state_whole(self.optimizer)
            if self.masters is not None:
                self.masters.whole = self.shares.whole
        if together and self.shares is not None:
            self.shares.names.update(block)
        if not common:
            return None
        parts, elsewhere = together and block.keys() <= self._parts, list[tuple[int, int]]()
        if parts and self.shares is not None:
            offsets, _ = offsets_in_slab(block, block, "host")
            elsewhere = [each for name, offset in offsets.items() for each in self.shares.elsewhere_in(block[name], offset)]
            self.shares.parts |= block
        memory = self.ranks.common_memory(nbytes, fill, together, elsewhere)
        # What is gathered is copied by the host, and never by a device.
        return Slab("host", self.device.reach(memory) if together and not parts else memory, common, together, parts)

    @contextlib.contextmanager
    def _sharing(self, step: fx.GraphModule, parts: Collection[str]) -> Iterator[None]:
        """Has homes that are made inside in common with the other ranks of the host. ``parts``: those that it has a part of."""
        with self.ranks.sharing([*sorted({*self._common_names(step), *self._common_names(step, updated=True)}), *parts]):
            self._parts = frozenset(name for name, block in parameter_homes(step).items() if block in parts)
            self.parameters.common = self._new_slab
            try:
                yield
            finally:
                self.parameters.common = lambda block, nbytes, fill: None

    def adopt(self, step: fx.GraphModule, planned: Planned) -> None:
        """Puts the weights of the first step that trains where all ranks of the host have them in common: each of them has
        such a step. Until then, every rank may compute with its own."""
        settles = not self._settled and any(spec.kind in ("grad", "update") for spec in step.meta["outputs"])
        with self._sharing(step, planned.plan.parts) if settles else contextlib.nullcontext():
            super().adopt(step, planned)
        scattered = {name for call in calls(planned.step) if call.target is reduce_scatter for name in call.meta["names"]}
        if alone := sorted(scattered - (set() if self.shares is None else self.shares.names)):
            raise StepError(f"expected all of the gradient of {alone[0]}, which no rank updates in shares, found a share of it")
        self._settled |= settles
        self.parameters.provisional |= not self._settled
        if settles and self.shares is not None:
            (self._steps if self.updates is None else self.updates).shares = self.shares
            self._others_are_hidden()
            for module in self._model().modules() if self.shares.parts else ():
                module.register_state_dict_post_hook(self._whole_weights)
            self.shares.watch(self._parameters())

    def _common_names(self, step: fx.GraphModule, updated: bool = False) -> dict[str, str]:
        """Returns the parameters of a step that will lie once for all ranks of this host -> their home blocks."""
        parameters, blocks, homes = self._parameters(), dict[str, dict[str, nn.Parameter]](), parameter_homes(step)
        for name, block in homes.items():
            blocks.setdefault(block, {})[name] = parameters[name]
        common = {block for block, members in blocks.items() if self._is_common(members)[updated]}
        return {name: block for name, block in homes.items() if block in common}

    def _common_blocks(self, step: fx.GraphModule, updated: bool = False) -> frozenset[str]:
        """Returns the home blocks of a step that lie once for all ranks of this host, or will. ``updated``: those alone that
        they update in shares."""
        if not self._settled:
            return frozenset(self._common_names(step, updated).values())
        if updated or self.ranks_here == 1:
            return frozenset(home for name, home in parameter_homes(step).items() if self.shares and name in self.shares.names)
        return frozenset(block for block, slab in self.parameters.slabs.items() if slab.common)

    def state_nbytes(self) -> dict[str, int]:
        """Returns the current bytes of the training state; of what lies once for this host, this rank's part."""
        nbytes = super().state_nbytes()
        slabs = self.parameters.slabs
        common = [place.parameter.nbytes for place in self.parameters.places.values() if slabs[place.block].common]
        whole = once = {"weights": sum(common)}
        if self.shares is not None:
            whole = whole | self.shares.nbytes_of_all()
            once = {"weights": sum(common) - self.shares.nbytes_elsewhere(), **self.shares.nbytes()}
        return {name: held - whole.get(name, 0) + -(-once.get(name, 0) // self.ranks_here) for name, held in nbytes.items()}

    def _loading(self, *_: Any) -> None:
        if self.shares is not None:
            self.ranks.meet("to load weights with it, as load_state_dict does on all ranks")

    def _give_whole_weights(self, *about: Any) -> None:
        if self.shares is not None:
            self.shares.whole_weights(*about)

    def _hide_others(self) -> None:
        """Lets go of weights that other hosts have parts of, which a load has written here. All ranks of the host call it."""
        assert self.shares is not None
        for block, slab in self.parameters.slabs.items():
            if slab.parts:
                places = [place for place in self.parameters.places.values() if place.block == block]
                hide(slab.memory, [each for p in places for each in self.shares.elsewhere_in(p.parameter, p.offset)])
        self._others_are_hidden()

    def _others_are_hidden(self) -> None:
        """Lets masters take the parameters as they are now, but for those that somebody has written to."""
        if self.shares is not None and self.masters is not None:
            for parameter in self.shares.parts.values():
                master = self.masters.by_parameter.get(id(parameter))
                if master is not None and master.version == parameter._version:
                    self.masters.wrote(parameter)

    def _loaded(self, *_: Any) -> None:
        if self.in_parts:
            self.ranks.meet("to load weights with it, as load_state_dict does on all ranks")
            self._hide_others()
        if self.shares is not None:
            self.shares.watch(self._parameters())
            self.shares.release_others()
            self.ranks.forget()
            self.ranks.meet("to load weights with it, as load_state_dict does on all ranks")

    def _missing_state_nbytes(self) -> int:
        """Returns the bytes of state that the next step will make on this rank."""
        held, parameters, own = self.state_nbytes(), self._parameters(), 0
        for name, nbytes in self._optimizer_state(parameters).items():
            common = self.shares is not None and name in self.shares.names
            own += -(-self.shares.part_nbytes(parameters[name], nbytes) // self.ranks_here) if common else nbytes  # type: ignore[union-attr]
        return own - held["optimizer"] - held["masters"]

    # --------------------------------------------------------------------------------------------------- the plan of a step

    def input_homes(self, joint: fx.GraphModule) -> InputHomes:
        homes = replace(super().input_homes(joint), frozen_apart=True, ranks=self.ranks.count, hosts=self.ranks.hosts)
        if not self._settled:
            return homes
        # What no earlier step had is each rank's own, so it lies apart from what ranks have in common and update in shares.
        later = {name: f"{name.rpartition('.')[0]}+later" for name in self._parameters() if name not in homes.known}
        return replace(homes, known={**homes.known, **later})

    def constraints(self, step: fx.GraphModule) -> tuple[Budgets, Mapping[str, str]]:
        budgets, fixed = super().constraints(step)
        host = None if self.options.host is None else self.options.host // self.ranks_here - self.frames.host_nbytes()
        budgets = replace(budgets, host=host, exchange=self.ranks.exchange_nbytes)
        updates, hosts = budgets.updates, self.ranks.sharing_hosts if self.updates_in_shares else 1
        if updates is not None and self.updates_in_shares:  # a rank waits for the shares of the others after each backward
            every = hosts == self.ranks.hosts  # rank updates a share of its own; else those with one place on several hosts
            sharded = sorted(self._common_blocks(step, updated=True) & {*fixed.keys()}) if every else ()
            updates = replace(updates, run_ahead=False, sharded=tuple(sharded), in_turn=hosts > 1)
        once = self._common_blocks(step, updated=self.ranks_here == 1)
        budgets = replace(budgets, updates=updates, sharing=self.ranks_here, once=once, hosts=hosts)
        if self._settled:
            parts = {block for block, slab in self.parameters.slabs.items() if slab.parts}
            return replace(budgets, parts=frozenset(parts & {*step.meta["homes"].values()})), fixed
        return with_parts(step, budgets, self._wants_parts), fixed

    @property
    def _wants_parts(self) -> bool | None:
        """Tells whether each host is to have a part of the weights it updates; None: where ``host=`` asks for it. Never with
        ``update="step"``, where anybody may read a parameter between a backward and its step."""
        if self.updates is None or not self.updates_in_shares or self.ranks.sharing_hosts == 1:
            return False
        asked = knobs.ranks_shard_weights()
        return True if asked is None and self._needs_parts else asked

    def shard_weights(self, error: DoesNotFit) -> bool:
        if error.tier != "host" or self._settled or self._wants_parts is not None:
            return False
        self._needs_parts = True
        return True

    def _fixed_homes(self, step: fx.GraphModule) -> Mapping[str, str]:
        return dict.fromkeys(step.meta["homes"].values(), "host") | self.parameters.settled_tiers

    def refusal(self, error: DoesNotFit) -> BudgetError:
        if error.tier == "host":  # of which each rank has a part
            causes = tuple((what, nbytes * self.ranks_here) for what, nbytes in error.causes)
            error = DoesNotFit(error.tier, error.minimum * self.ranks_here, causes)
        return super().refusal(error)

    def share_of(self, machine: Machine) -> Machine:
        return machine.shared_by(self.ranks_here, self.updates_in_shares, self.ranks.sharing_hosts)

    def place_for_calls(self, tier: str) -> None:
        super().place_for_calls("host")

    def host_kernels(self, step: fx.GraphModule) -> Mapping[str, Any]:
        return {**super().host_kernels(step), **self.ranks.kernels(step)}

    def disk_staging_nbytes(self) -> int:
        return super().disk_staging_nbytes() + self.ranks.exchange_nbytes

    # ---------------------------------------------------------------------------------------------- around a step that runs

    def training_call(self) -> AbstractContextManager[None]:
        """Lets a rank that fails in its forward tell the others, which wait for it in their backward."""
        return self.ranks.phase() if torch.is_grad_enabled() or self.in_parts else contextlib.nullcontext()

    def evaluation(self, compiled: CompiledStep) -> AbstractContextManager[None]:
        """Surrounds an evaluation, in which all ranks gather weights if each host has a part of them."""
        return self.phase(compiled, "forward") if self.in_parts else contextlib.nullcontext()

    def before_backward(self, frame: Frame, keeps: bool) -> None:
        with self.ranks.phase():
            super().before_backward(frame, keeps)
            if torch.is_grad_enabled():
                raise StepError(
                    "backward was called with create_graph=True, whose gradients would be those of one rank alone; expected a "
                    "backward without it where several ranks train"
                )
            if self.shares is not None:
                self.shares.check()

    @contextlib.contextmanager
    def backward(self, node: Any, frame: Frame, tangents: Sequence[torch.Tensor | None]) -> Iterator[None]:
        with self.ranks.phase(), super().backward(node, frame, tangents):
            yield

    @contextlib.contextmanager
    def phase(self, compiled: CompiledStep, phase: Phase) -> Iterator[None]:
        trained = {spec.name for spec, _ in inputs_of(compiled.step) if is_trained(spec)}
        parameters = {name: p for name, p in self._parameters().items() if name in trained} if phase == "backward" else {}
        if phase == "backward":  # ``backward`` surrounds it
            parts = {} if self.shares is None else self.shares.own_parts(parameters)
            names = set() if self.shares is None else self.shares.names
            self._steps.compared = {name: parts.get(name, p) for name, p in parameters.items() if name in names}
            self.ranks.check_unchanged(self._steps.compared)
            self.ranks.agree(compiled.step, phase, {name: p for name, p in parameters.items() if name not in parts})
            yield
            if self.shares is not None:
                if any(call.target is update for call in calls(compiled.step)):
                    self.ranks.meet("to end its updates")
                    self.shares.updated(self.masters)
                self.ranks.remember(self._steps.compared)
        else:
            with self.ranks.phase():
                self.ranks.agree(compiled.step, phase, parameters)
                yield
