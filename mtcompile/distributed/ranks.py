"""The ranks of a data-parallel job, as one model sees them: they agree before each phase, and combine gradients in it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn

from mtcompile import knobs
from mtcompile.distributed.connection import RECORD_NBYTES, Connection
from mtcompile.distributed.homes.gathering import PartsOnHosts
from mtcompile.distributed.homes.shared_memory import common_memory, shared_memory
from mtcompile.distributed.homes.shares import HostShares, state_places
from mtcompile.distributed.meeting import RanksParted
from mtcompile.errors import MtcompileError, StepError
from mtcompile.optim.written_update import flat
from mtcompile.passes.step_graph import all_gather, all_reduce, broadcast, calls, gathers_parts, is_collective, reduce_scatter
from mtcompile.runtime.schedule import Phase

_SAMPLED, _SAMPLE = 4, 256  # parameters, and elements of each, that ranks compare before a backward
_POINTS = 16  # elements of each parameter, of which a rank notices that another one has written to them
_DIGEST_NBYTES = 16
_COMPILING, _PHASE, _STEP, _SHARING, _READING = (bytes([kind]) for kind in range(5))  # what ranks come together for
_COMES_TO = {
    _COMPILING: "compiles a model",
    _PHASE: "begins a phase of a step",
    _STEP: "calls optimizer.step()",
    _SHARING: "begins its first training step",
    _READING: "calls optimizer.state_dict(), or reads other state that hosts have parts of",
}


class Ranks:
    """The ranks that train one model. A rank that stops before they have agreed on a phase tells the others why, and all go
    on with the next batch; one that stops later parts them for good."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self.rank, self.count = connection, connection.rank, connection.count
        self._parted: str | None = None
        self._agreed = self._told = False  # told: the others know of the error that goes through phases
        self._depth = 0
        self._rounds = self._backwards = 0
        self.nonfinite: dict[str, bool] = {}  # by parameter: whether a gradient of which each rank has a part is not finite
        self._remembered: tuple[tuple[str, ...], bytes] | None = None
        self._sequences: WeakKeyDictionary[fx.GraphModule, dict[Phase, bytes]] = WeakKeyDictionary()

    @property
    def exchange_nbytes(self) -> int:
        """Host bytes that this rank holds for exchanges."""
        return self.connection.exchange_nbytes

    @property
    def me(self) -> int:
        """The place of this rank among those of its host."""
        return self.connection.meeting.me

    @property
    def here(self) -> int:
        """How many of them are on this host."""
        return len(self.connection.host)

    @property
    def hosts(self) -> int:
        """How many hosts they are on."""
        return self.count // len(self.connection.host)

    @property
    def sharing_hosts(self) -> int:
        """How many hosts update a part each of what they have in common."""
        return self.hosts if knobs.ranks_shard() else 1

    # ------------------------------------------------------------------------------------------------------- the model

    def adopt(self, model: nn.Module) -> None:
        """Gives all ranks the weights and buffers of the first. Raises MtcompileError, on all ranks, if a rank has another
        model."""
        tensors = dict((*model.named_parameters(), *model.named_buffers()))
        about = [(n, t.dtype, tuple(t.shape), t.stride(), t.requires_grad) for n, t in tensors.items()]
        digests = self._tell(_COMPILING, _digest(about))
        if others := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
            raise MtcompileError(
                f"expected the same model on all ranks, found that rank {others[0]} has other names, shapes, dtypes, strides "
                "or requires_grad than rank 0; build it the same way on each"
            )
        values = [tensor.detach() for tensor in tensors.values()]
        with torch.no_grad():
            self.connection.exchange.broadcast(values, values, "for the weights of rank 0")

    @contextlib.contextmanager
    def sharing(self, names: Sequence[str]) -> Iterator[None]:
        """Surrounds what puts weights where the ranks of a host have them once. Waits for all ranks to begin it. Raises
        StepError, on all of them, if one has stopped before, or unless all name the same parameters as those of a host."""
        self._check_together()
        digests = self._tell(_SHARING, _digest(names))
        if others := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
            raise StoppedTogether(
                f"expected the ranks of a host to share the same weights, found that rank {others[0]} and rank 0 would not: on "
                "one of them, tensors outside the model, such as a state_dict, share memory with parameters. Drop these before "
                "the first step; MT_RANKS_SHARE=0 gives each rank weights of its own"
            )
        self._agreed = True  # who fails from here on has half of the weights elsewhere
        yield
        self._agreed = False

    def _gather_here(self, number: int) -> list[int]:
        """Returns the number that each rank of this host passed, in their order."""
        connection, doing = self.connection, "to share weights"
        table = connection.records[self._rounds % 2]
        self._rounds += 1
        table[self.rank, :8].view(torch.int64).fill_(number)
        connection.meeting.meet(doing)
        return [int(table[rank, :8].view(torch.int64)) for rank in connection.host]

    def common_memory(
        self,
        nbytes: int,
        fill: Callable[[Tensor], None],
        together: bool = False,
        elsewhere: Sequence[tuple[int, int]] = (),
    ) -> Tensor:
        """Returns memory with what ``fill`` writes there, once for all ranks of this host: ``together``, for good; else as long
        as nobody writes to it. ``elsewhere``: the bytes that are other hosts'. All of them call it."""
        with self.reaching_others("to share weights"):
            return common_memory(nbytes, self.me == 0, self._gather_here, fill, together, elsewhere)

    def new_shares(self, parameters: Mapping[str, nn.Parameter], masters: bool, hosts: int) -> HostShares:
        """Makes what the ranks of this host have of a model between them, with memory for its optimizer state, which takes
        nothing until it is written to; of ``hosts``, each has a part of that. All of them call it."""
        offsets, nbytes = state_places(parameters, masters)
        with self.reaching_others("to share optimizer state"):
            memory = shared_memory(nbytes, self.me == 0, self._gather_here)
        shares = HostShares(memory, offsets, (self.rank if hosts > 1 else self.me), self.here, hosts)
        shares.nonfinite = self.nonfinite
        if hosts > 1:
            shares.elsewhere = PartsOnHosts(self.connection.hosts, self.reaching_others, self._read_together)
        return shares

    def _read_together(self) -> None:
        """Waits for all ranks to read the same. Raises StepError, on all ranks, where one of them does something else."""
        self._check_together()
        self._tell(_READING, b"")

    def end_updates(self, gathered: Sequence[Tensor]) -> None:
        """Brings the elements of these that other hosts have updated, and waits for the other ranks of this host."""
        doing = "to end its updates"
        with self.reaching_others(doing):
            if gathered:
                self.connection.exchange.all_gather(gathered, gathered, doing)
            self.connection.meeting.meet(doing)

    def meet(self, doing: str) -> None:
        """Waits for the other ranks of this host, unless they have parted."""
        if self._parted is None:
            with self.reaching_others(doing):
                self.connection.meeting.meet(doing)

    # ------------------------------------------------------------------------------------------------------- the phases

    @contextlib.contextmanager
    def phase(self) -> Iterator[None]:
        """Surrounds a phase that ``agree`` begins, or what leads to one. An error inside reaches the other ranks."""
        around, self._agreed = self._agreed, False
        self._told &= self._depth > 0
        self._depth += 1
        try:
            yield
        except BaseException as error:
            self._stopped(error)
            raise
        finally:
            self._agreed = around
            self._depth -= 1

    def _stopped(self, error: BaseException) -> None:
        """Tells the others of an error that goes through ``phase``, once."""
        if self._parted is not None or self._told or isinstance(error, StoppedTogether):
            return
        why = str(error).partition("\n")[0] or type(error).__name__
        self._told = True
        if self._agreed or not isinstance(error, Exception):
            self._parted = why
            self.connection.meeting.fail(why)
        else:
            with contextlib.suppress(StepError):
                self._tell(_PHASE, b"", why)

    def agree(self, step: fx.GraphModule, phase: Phase, parameters: Mapping[str, Tensor]) -> None:
        """Waits for all ranks to come here, and compares what they are going to run. Raises StepError, on all ranks, if one of
        them has stopped or would run other collectives; and if the weights of this step are not the same everywhere."""
        sequence = self._sequence(step, phase)
        if not sequence:
            return
        self._check_together()
        digests = self._tell(_PHASE, sequence + self._sample(parameters))
        self._agreed = True
        self._backwards += phase == "backward"
        alike = [digest[:_DIGEST_NBYTES] for digest in digests]
        if others := [rank for rank, digest in enumerate(alike) if digest != alike[0]]:
            raise StoppedTogether(
                f"expected all ranks to combine the same gradients in the same order in this {phase}, found that rank "
                f"{others[0]} does not do what rank 0 does: give all ranks batches that run the same operations, as often, and "
                "numbers for loss_chunks and tiles; of one size, with weights in parts (MT_RANKS_SHARD=weights)"
            )
        if others := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
            self._parted = f"rank {others[0]} has other weights than rank 0"
            raise StoppedTogether(
                f"expected equal weights on all ranks before each update, found others on rank {others[0]} than on rank 0: one "
                "of them was changed on one rank only, or a gradient came from outside the model's call. Start the job again "
                "from the last checkpoint"
            )

    def agree_on_update(self, about: Any, gradients: Mapping[str, Tensor]) -> None:
        """Waits for all ranks to call ``optimizer.step()``, and compares what they are going to do. Raises StepError, on all
        ranks, unless all of them do the same with the same ``gradients``. ``about``: options and counts, as ``repr`` shows
        them."""
        self._check_together()
        told = self._tell(_STEP, _digest(tuple(gradients)) + _digest(about) + _points(gradients.values()))
        self._agreed = True
        wrong = (
            "gradients of the same parameters on all ranks when they call optimizer.step()",
            "the same options of the optimizer, and as many steps before, on all ranks",
            "equal gradients on all ranks when they call optimizer.step(), as a backward leaves them",
        )
        for place, expected in enumerate(wrong):
            part = slice(place * _DIGEST_NBYTES, (place + 1) * _DIGEST_NBYTES)
            if others := [rank for rank, digest in enumerate(told) if digest[part] != told[0][part]]:
                raise StoppedTogether(
                    f"expected {expected}, found others on rank {others[0]} than on rank 0; nothing was changed. Do the same "
                    "on all ranks, or set MT_RANKS_SHARE=0, which gives each rank weights of its own"
                )

    def _check_together(self) -> None:
        if self._parted is not None:
            raise RanksParted(f"the ranks have parted ({self._parted}); start the job again from the last checkpoint")

    def _sequence(self, step: fx.GraphModule, phase: Phase) -> bytes:
        """Returns a digest of the collectives of a phase, in order; empty where there are none."""
        known = self._sequences.setdefault(step, {})
        if phase not in known:
            about = [_about(call) for call in calls(step) if is_collective(call) and call.meta["phase"] == phase]
            known[phase] = _digest(about) if about else b""
        return known[phase]

    def _sample(self, parameters: Mapping[str, Tensor]) -> bytes:
        """Returns a digest of a few values of a few parameters, others each time."""
        tensors = list(parameters.values())
        begin = self._backwards * _SAMPLED
        some = [tensors[i % len(tensors)] for i in range(begin, begin + min(_SAMPLED, len(tensors)))]
        sampled = [t.detach().reshape(-1)[:_SAMPLE].cpu().contiguous().view(torch.uint8).tolist() for t in some if t.numel()]
        return _digest(sampled)

    def remember(self, parameters: Mapping[str, Tensor]) -> None:
        """Takes a few values of each of what lies once for all ranks of a host as they are now, for ``check_unchanged``."""
        self._remembered = tuple(parameters), _points(parameters.values())

    def check_unchanged(self, parameters: Mapping[str, Tensor]) -> None:
        """Raises StepError if what was remembered of these is not as it was."""
        known = self._remembered
        if known is not None and known[0] == tuple(parameters) and known[1] != _points(parameters.values()):
            raise StepError(
                "weights that lie once for all ranks of the host have changed between two steps, and not by an update; load "
                "them again (load_state_dict on all ranks). MT_RANKS_SHARE=0 gives each rank weights of its own"
            )

    def forget(self) -> None:
        """Lets values change until ``remember`` takes them again."""
        self._remembered = None

    def _tell(self, kind: bytes, record: bytes, why: str = "") -> list[bytes]:
        """Tells all ranks a record, and returns theirs, in order. Raises StepError if one of the others has stopped, with its
        reason ``why``, or has come for another ``kind`` of thing."""
        connection = self.connection
        table = connection.records[self._rounds % 2]
        self._rounds += 1
        told = (b"\1" + kind + why.encode() if why else b"\0" + kind + record)[:RECORD_NBYTES]
        table[self.rank].copy_(torch.frombuffer(bytearray(told.ljust(RECORD_NBYTES, b"\0")), dtype=torch.uint8))
        doing = "to begin a step with it"
        with self.reaching_others(doing):
            connection.meeting.meet(doing)
            if connection.hosts is not None:
                if connection.meeting.me == 0:
                    gathered = connection.hosts.gather(table[list(connection.host)])
                    for others, host in zip(gathered, connection.hosts.ranks, strict=True):
                        table[list(host)] = others
                connection.meeting.meet(doing)
        rows = [bytes(row.tolist()) for row in table]
        for rank, row in enumerate(rows):
            if row[0] and rank != self.rank:
                text = row[2:].rstrip(b"\0").decode(errors="replace")
                raise StoppedTogether(f"rank {rank} stopped before this step, and nothing was changed: {text}")
        for rank, row in enumerate(rows):
            if not why and row[1:2] != kind:
                whole = "; MT_RANKS_SHARD=0 leaves all of the state on each host" if _READING in (kind, row[1:2]) else ""
                raise StoppedTogether(
                    f"rank {rank} {_COMES_TO[row[1:2]]}, and rank {self.rank} {_COMES_TO[kind]}; nothing was changed. Expected "
                    "all ranks to call the model, backward, optimizer.step() and state_dict() equally often, in the same "
                    f"order{whole}"
                )
        return [row[2 : 2 + len(record)] for row in rows]

    @contextlib.contextmanager
    def reaching_others(self, doing: str) -> Iterator[None]:
        """Turns errors of the way to other ranks into RanksParted."""
        self._check_together()
        try:
            yield
        except RanksParted as error:
            self._parted = str(error)
            self.connection.meeting.fail(self._parted)
            raise
        except MtcompileError:
            raise
        except RuntimeError as error:
            self._parted = str(error).partition("\n")[0]
            self.connection.meeting.fail(self._parted)
            raise RanksParted(
                f"a rank on another host has ended, or did not come within {self.connection.meeting.timeout_s:g} s "
                f"(MT_RANKS_TIMEOUT), while this one waited {doing}; look for its error, and start the job again from the last "
                f"checkpoint ({self._parted})"
            ) from error

    # -------------------------------------------------------------------------------------------------- the collectives

    def kernels(self, step: fx.GraphModule) -> dict[str, Callable[..., None]]:
        """The collectives of a schedule's network instructions, by name."""
        return {
            call.name: functools.partial(self._run, call.target, call.meta["names"], gathers_parts(call))
            for call in calls(step)
            if is_collective(call)
        }

    def _run(
        self, collective: Any, names: Sequence[str], of_parts: bool, sources: Sequence[Tensor], targets: Sequence[Tensor]
    ) -> None:
        exchange, doing = self.connection.exchange, _DOING[collective]
        with self.reaching_others(doing), torch.no_grad():
            for name in names:
                self.nonfinite.pop(name, None)
            if collective is reduce_scatter:
                flags = exchange.reduce_scatter(sources, targets, doing)
                self.nonfinite.update(zip(names, flags, strict=True))
            elif collective is all_gather:
                (exchange.gather_parts if of_parts else exchange.all_gather)(sources, targets, doing)
            else:
                (exchange.all_reduce if collective is all_reduce else exchange.broadcast)(sources, targets, doing)


_DOING = {
    all_reduce: "to combine gradients",
    reduce_scatter: "to combine gradients",
    all_gather: "for the parameters that other hosts have",
    broadcast: "for the buffers of rank 0",
}


class StoppedTogether(StepError):
    """Raised on all ranks when one of them stops before a phase, or they differ: nobody needs to be told."""


def _about(call: fx.Node) -> tuple[Any, ...]:
    """Describes a collective as all ranks must have it."""
    operands: Any = call.args
    values = tuple((operand.meta["val"].dtype, tuple(operand.meta["val"].shape)) for operand in operands)
    return str(getattr(call.target, "__name__", call.target)), call.meta["names"], values


def _points(tensors: Iterable[Tensor]) -> bytes:
    """Returns a digest of elements of each tensor at equal distances."""
    by_dtype = dict[torch.dtype, list[Tensor]]()
    for tensor in tensors:
        if count := tensor.numel():
            by_dtype.setdefault(tensor.dtype, []).append(flat(tensor.detach())[:: -(-count // _POINTS)])
    return _digest([torch.cat(points).view(torch.uint8).numpy().tobytes() for points in by_dtype.values()])


def _digest(about: Any) -> bytes:
    return hashlib.blake2b(repr(about).encode(), digest_size=_DIGEST_NBYTES).digest()
