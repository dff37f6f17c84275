"""The options of a compiled callable, checked once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mtcompile import knobs
from mtcompile.errors import CaptureError, did_you_mean
from mtcompile.optim.precision import PRECISIONS, Precision
from mtcompile.optim.update_options import UpdateOptions
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.cuts.form import Allowed, Form
from mtcompile.passes.planning.policies import KEEP_STATE, POLICIES
from mtcompile.passes.planning.search import EFFORTS
from mtcompile.sizes import parse_bytes

KERNELS = ("auto", "eager", "exact", "inductor")
FETCHED = ("auto", "used", "all")  # which experts, and which rows of embeddings
FRAGMENTS = ("auto", "exact", "split")  # which weights may be cut: where no sum is split, if nothing fits else or always; any
FASTEST = "fastest"  # the policy that searches


@dataclass(frozen=True, slots=True)
class DiskBudget:
    """A folder on a disk, and the bytes that may be taken there. ``spare``: a folder for what cannot be written there."""

    folder: Path
    nbytes: int
    spare: Path | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """The options of ``mtcompile.compile`` or of the torch.compile backend, checked.

    ``memory``, ``host``: budgets in bytes; None: what is free, less a reserve. ``disk``: None for no disk; it takes what
    ``host`` has no room for. ``updates``: None for ``update="step"``. ``throttle``: the speeds of the emulated device; None:
    its own. ``offload``: whether activations may wait in host memory. ``elastic``: whether plans follow the measured speeds.
    ``fragments``: which weights may be cut into fragments; None: none. ``effort``: what planning may cost.
    Raises ValueError or TypeError for values that it cannot honour.
    """

    memory: int | None = None
    host: int | None = None
    kernels: str = "auto"
    loss_chunks: int | str = 1
    policy: str = FASTEST
    precision: Precision = PRECISIONS["model"]
    updates: UpdateOptions | None = None
    accumulate: int | str = 1
    offload: bool = True
    throttle: Machine | None = None
    viz: str | Path | None = None
    disk: DiskBudget | None = None
    experts: str = "auto"
    embeddings: str = "auto"
    elastic: bool = False
    fragments: str | None = "auto"
    tiles: int | str = 1
    effort: str = field(default_factory=knobs.effort)

    def __post_init__(self) -> None:
        if self.policy not in (FASTEST, *POLICIES):
            close = did_you_mean(self.policy, (FASTEST, *POLICIES))
            raise ValueError(f"expected policy to be one of {FASTEST}, {', '.join(POLICIES)}, found {self.policy!r}{close}")
        if self.kernels not in KERNELS:
            close = did_you_mean(self.kernels, KERNELS)
            raise ValueError(f"expected kernels to be one of {', '.join(KERNELS)}, found {self.kernels!r}{close}")
        for option, choice in (("experts", self.experts), ("embeddings", self.embeddings)):
            if choice not in FETCHED:
                close = did_you_mean(choice, FETCHED)
                raise ValueError(f"expected {option} to be one of {', '.join(FETCHED)}, found {choice!r}{close}")
        counts = (("loss_chunks", self.loss_chunks), ("tiles", self.tiles), ("accumulate", self.accumulate))
        for name, count in counts:
            if not _is_count(count) and count != "auto":
                raise ValueError(f'expected {name} to be a whole number of 1 or more, or "auto", found {count!r}')
        if not isinstance(self.offload, bool):
            raise TypeError(f"expected offload to be True or False, found {self.offload!r}")
        if not isinstance(self.elastic, bool):
            raise TypeError(f"expected elastic to be True or False, found {self.elastic!r}")
        if self.elastic and (self.policy != FASTEST or self.fuses):
            raise ValueError(
                f"elastic=True changes plans while a model trains; expected policy={FASTEST!r}, and kernels='auto', "
                f"'eager' or 'exact', whose bits no plan changes, found policy={self.policy!r} and kernels={self.kernels!r}"
            )
        check_fragments(self.fragments, self.updates)
        check_effort(self.effort)
        if self.cuts is not None and self.tiles != 1:
            raise ValueError(f"expected tiles or fragments, found both: tiles={self.tiles!r}, fragments={self.fragments!r}")
        if self.disk is not None and self.host is None:
            raise ValueError('disk= takes what host= has no room for; expected host= too, such as host="64GiB", found none')
        if self.viz is not None and not isinstance(self.viz, (str, Path)):
            raise TypeError(f"expected viz to be the path of an HTML file, found {self.viz!r}")

    @property
    def cuts(self) -> str | None:
        """Which weights may be cut although plans fit that cut none."""
        return None if self.fragments == "auto" else self.fragments

    @property
    def needs_all_gradients(self) -> bool:
        """True if updates in the backward wait for all gradients, so that no fragment can be updated as its own arrives."""
        return self.updates is not None and self.updates.needs_all_gradients

    def allowed(self, may_cut: bool, begins: int) -> Allowed:
        """Returns the forms to choose among. ``may_cut``: whether "auto" may cut weights; ``begins``: bytes, at multiples of
        which fragments begin."""
        last, last_embeddings = self.cuts, self.embeddings
        if self.policy not in KEEP_STATE:
            if may_cut and self.fragments == "auto" and self.tiles == 1 and not self.needs_all_gradients:
                last = "exact"
            if self.embeddings == "auto":
                last_embeddings = "used"
        asked, fuses = self.cuts is not None, self.fuses
        kinds = self.loss_chunks, self.tiles, self.cuts, self.embeddings, last, last_embeddings
        return Allowed(*kinds, begins, asked, fuses, compares_last=self.policy == FASTEST)

    def check_form(self, form: Form) -> None:
        """Raises CaptureError if a training graph, in this form, has nothing of what was to be cut."""
        if self.loss_chunks not in ("auto", form.chunks):
            raise CaptureError(
                f"loss_chunks={self.loss_chunks}: expected a linear layer whose float32 logits go straight into a mean "
                "cross-entropy, without class weights or label smoothing; found none. Nothing else may read these logits: the "
                "model may return them, but not for another loss. Convert bf16 or fp16 logits with .float(), or leave "
                "loss_chunks out"
            )
        if self.tiles not in ("auto", 1) and form.tiles == 1:
            raise CaptureError(
                f"tiles={self.tiles}: expected blocks with linear layers that work token by token, found none that most of "
                'their memory stays inside of; leave tiles out, or pass tiles="auto"'
            )

    @property
    def fuses(self) -> bool:
        """True if kernels fuse operations whose results then round otherwise."""
        return self.kernels == "inductor"


def check_effort(effort: str) -> None:
    """Raises ValueError for an effort that is not known."""
    if effort not in EFFORTS:
        close = did_you_mean(str(effort), EFFORTS)
        raise ValueError(f"expected effort to be one of {', '.join(EFFORTS)}, found {effort!r}{close}")


def check_fragments(fragments: str | None, updates: UpdateOptions | None) -> None:
    """Raises ValueError for ``fragments=`` that is not known, or that the other options do not allow."""
    if fragments is None or fragments == "auto":
        return
    if fragments not in FRAGMENTS:
        close = did_you_mean(str(fragments), FRAGMENTS)
        raise ValueError(f"expected fragments to be None or one of {', '.join(FRAGMENTS)}, found {fragments!r}{close}")
    if updates is not None and updates.needs_all_gradients:
        raise ValueError(
            f'fragments={fragments!r} with update="backward" updates each fragment as its gradient arrives; expected no '
            f'max_grad_norm= and nonfinite= "stop" or "continue", found max_grad_norm={updates.max_grad_norm} and '
            f'nonfinite={updates.nonfinite!r}, which wait for all gradients. Leave that one out, or pass update="step"'
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def parse_disk(disk: str | None) -> DiskBudget | None:
    """Converts ``"/path:400GiB"``, a folder and a size, to a budget; None stays None. Raises ValueError."""
    if disk is None:
        return None
    folder, colon, size = str(disk).rpartition(":")
    if not colon or not folder or not size.strip():
        raise ValueError(f'expected disk to be a folder and a size, such as "/mnt/nvme:400GiB", found {disk!r}')
    nbytes = parse_bytes(size, "disk")
    assert nbytes is not None
    knobs.disk_direct()  # a wrong value is an error here, not in the first step
    spare = knobs.disk_spare()
    return DiskBudget(Path(folder).expanduser(), nbytes, Path(spare).expanduser() if spare else None)
