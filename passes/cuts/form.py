"""The form of a joint graph: into how small operations it is cut, and the forms that there are to choose among."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import fx

from mtcompile.passes.analysis.rows import fetched_by_rows
from mtcompile.passes.cuts.fragments.cut import UNCUT, Cut, cut_weights, cuts_of
from mtcompile.passes.cuts.rows.take import take_rows
from mtcompile.passes.cuts.tiles.rewrite import tile_tokens, tiles_contract
from mtcompile.passes.joint.loss_head import chunk_loss, head_nbytes, largest_logits, narrow_logits, returned_logits
from mtcompile.passes.proof.cuts.chunks import check_chunks
from mtcompile.passes.proof.cuts.fragments import check_fragments
from mtcompile.passes.proof.cuts.rows import check_rows
from mtcompile.passes.proof.cuts.tiles import check_tiles
from mtcompile.passes.step_graph import copy_step, storage_nbytes
from mtcompile.runtime.schedule import gib

AUTO = (1, 4, 16, 64)  # chunks, and tiles, that "auto" chooses among
_LARGE_HEAD = 0.02  # of the device: logits that take more are told of, and sizes are solved for with no larger ones


@dataclass(frozen=True, slots=True)
class Form:
    """How a joint graph is cut. ``chunks``: of its loss head; ``tiles``: of tokens, in which what works token by token runs;
    ``cut``: of its linear weights."""

    chunks: int = 1
    tiles: int = 1
    cut: Cut = UNCUT


WHOLE = Form()


def first_form(joint: fx.GraphModule, device: int | None) -> Form:
    """Returns the form in which a joint graph is planned first, for so many bytes of the device: the coarsest with room for the
    logits of its loss head."""
    return Form(_chunks_within(head_nbytes(joint), device))


def small_head(joint: fx.GraphModule, device: int | None) -> Form:
    """Returns the form whose logits take a small part of the device at once."""
    logits = largest_logits(joint)
    nbytes = 0 if logits is None else storage_nbytes(logits)
    return Form(_chunks_within(nbytes, None if device is None else int(device * _LARGE_HEAD)))


def _chunks_within(nbytes: int, most: int | None) -> int:
    return next((chunks for chunks in AUTO if most is None or nbytes // chunks <= most), AUTO[-1])


def told_head(joint: fx.GraphModule, device: int | None) -> list[str]:
    """Says why the loss head of a step that does not fit takes so much memory: the dtype of its logits rules out chunks, or the
    model returns them."""
    told, narrow, returned = [], _if_large(narrow_logits(joint), device), _if_large(returned_logits(joint), device)
    if narrow is not None:
        dtype = str(narrow.dtype).removeprefix("torch.")
        told.append(
            f"a loss head cannot run in chunks: its logits ({gib(storage_nbytes(narrow))}) are {dtype}, and adding up the "
            f"chunks' losses in {dtype} would lose precision. With logits.float() it could, and would need less memory"
        )
    if returned is not None:
        told.append(
            f"the model returns its logits ({gib(storage_nbytes(returned))}), which stay on the device during the backward: "
            "return only the loss to avoid this"
        )
    return told


def _if_large(logits: torch.Tensor | None, device: int | None) -> torch.Tensor | None:
    return None if logits is None or device is None or storage_nbytes(logits) < device * _LARGE_HEAD else logits


@dataclass(frozen=True, slots=True)
class Allowed:
    """The forms to choose among. ``chunks``, ``tiles``: a number or "auto"; ``fragments``, ``begins``: as ``possible_cuts``
    takes them; ``embeddings``: as for ``compile``; ``last_fragments`` and ``last_embeddings`` instead, where nothing fits
    otherwise, and, with ``compares_last``, where they may be faster. ``in_fragments``: compares fragments however good the
    first plan is. ``fuses``: kernels may do without values that one operation makes for another."""

    chunks: int | str = "auto"
    tiles: int | str = "auto"
    fragments: str | None = None
    embeddings: str = "auto"
    last_fragments: str | None = None
    last_embeddings: str = "used"
    begins: int = UNCUT.begins
    in_fragments: bool = False
    fuses: bool = False
    compares_last: bool = True


def chains_of_forms(allowed: Allowed, first: Form, cuts: Sequence[Cut]) -> Iterator[list[Form]]:
    """Yields forms, finer and finer in each list: with the loss head in chunks and, with it whole or in many chunks, weights
    ``cut`` into fragments, or tiles. ``first``: has the numbers that are not to be chosen; it is in no list."""
    whole = Form(1 if allowed.chunks == "auto" else first.chunks, 1 if allowed.tiles == "auto" else first.tiles)
    in_chunks = [replace(whole, chunks=number) for number in AUTO] if allowed.chunks == "auto" else [whole]
    yield [form for form in in_chunks if form.chunks > first.chunks]
    for coarsest in dict.fromkeys((whole, in_chunks[-1])):
        for gathers in dict.fromkeys(cut.gathers for cut in cuts):
            yield [replace(coarsest, cut=cut) for cut in cuts if cut.gathers == gathers]
        if allowed.tiles == "auto":
            yield [replace(coarsest, tiles=number) for number in AUTO[1:]]


Check = Callable[[], None]


class Rewritten(NamedTuple):
    """A joint graph in a ``form``, as far as there is something to cut. ``contract``: how its results differ;
    ``checks``: to be run if this form is chosen. They raise SameComputationError."""

    graph: fx.GraphModule
    form: Form
    contract: list[str]
    checks: tuple[Check, ...] = ()


def cut_joint(joint: fx.GraphModule, form: Form, known: dict[Form, Rewritten]) -> Rewritten:
    """Returns a normalized joint graph in a form. ``known``: the same in forms with whole weights, as far as they were asked
    for."""
    if form == WHOLE:
        return Rewritten(joint, form, [])
    if form.cut != UNCUT:
        whole, uncut, contract, checks = uncut_weights = cut_joint(joint, replace(form, cut=UNCUT), known)
        if not cuts_of(whole, form.cut):
            return uncut_weights
        rewritten = copy_step(whole)
        split = cut_weights(rewritten, form.cut)
        checks = (*checks, functools.partial(check_fragments, whole, rewritten, form.cut.splits))
        return Rewritten(rewritten, replace(uncut, cut=form.cut), contract + split, checks)
    if form not in known:
        known[form] = _without_cut(joint, form)
    return known[form]


def _without_cut(joint: fx.GraphModule, form: Form) -> Rewritten:
    rewritten, contract, checks = copy_step(joint), list[str](), list[Check]()
    if form.chunks > 1 and chunk_loss(rewritten, form.chunks):
        contract.append(f"the loss head's sums over tokens (loss, weight and bias gradients) in {form.chunks} chunks")
        checks.append(functools.partial(check_chunks, joint, rewritten))
        joint = rewritten
        rewritten = copy_step(joint) if form.tiles > 1 else joint
    else:
        form = replace(form, chunks=1)
    form = replace(form, tiles=tile_tokens(rewritten, form.tiles))
    if form.tiles > 1:
        contract.append(tiles_contract(form.tiles))
        checks.append(functools.partial(check_tiles, joint, rewritten))
    return Rewritten(rewritten, form, contract, tuple(checks))


def in_rows(joint: fx.GraphModule, embeddings: str) -> fx.GraphModule | None:
    """Returns a joint graph that takes only those rows of embeddings that a batch names. ``embeddings``: "all", "used" or
    "auto", as for ``compile``. None where it takes all rows."""
    wanted = fetched_by_rows(joint, embeddings)
    if not wanted:
        return None
    taken = copy_step(joint)
    take_rows(taken, wanted)
    check_rows(joint, taken)
    return taken
