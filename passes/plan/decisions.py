"""Decisions about a step, each with a reason."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

Choice = Literal["device", "host", "disk", "save", "keep", "recompute", "again", "early", "late"]
Kind = Literal["params", "fetch", "return", "gradients", "update", "variant", "activation", "load"]


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision.

    ``kind``: ``params`` (where a block's parameters, their gradients and optimizer state are at home: device, host or disk),
    ``variant`` (what of a block's saved values stays for its backward: ``save`` all, ``keep`` those in ``values``,
    ``recompute`` all), ``activation`` (where a value waits between its uses: device, host, disk, or nowhere, as its region
    is run again: recompute; subject ``*`` is all values without a decision of their own), ``fetch`` (what was fetched of a
    block's parameters for the forward stays for the backward: keep; it is fetched again otherwise: again), ``return`` (a
    block's parameters are fetched for the backward no sooner than they are read: late; as far ahead as all others: early) or
    ``gradients`` (those of a block that go home leave the device before the next region, which waits for that: early; as
    much later as fetches are ahead: late), ``update`` (a block whose home is the host is updated by the device, which its state
    passes through: device; by the host: host) or ``load`` (a value comes back from the host for the backward no sooner than
    it is read: late; as far ahead as all others: early). ``reason``: empty until a plan is chosen (``planning/reasons``).
    """

    kind: Kind
    subject: str
    choice: Choice
    nbytes: int
    reason: str = ""
    values: tuple[str, ...] = ()


_NONE: dict[str, Decision] = {}
_ORIGINS = 3  # that decisions know: some of these are seldom evaluated


class Decisions(tuple[Decision, ...]):
    """Decisions that are found by kind and subject; of several about one subject, the first counts. Plans of large models make
    hundreds, and differ from others in a few: what is known of one plan's is kept for those made of it."""

    @cached_property
    def by_subject(self) -> dict[tuple[str, str], Decision]:
        """Those that count, by kind and subject."""
        index = {(d.kind, d.subject): d for d in self}
        return index if len(index) == len(self) else {(d.kind, d.subject): d for d in reversed(self)}

    @cached_property
    def by_kind(self) -> dict[Kind, dict[str, Decision]]:
        """Those that count, by subject, for each kind. Decisions that were made of others share what did not change."""
        index: dict[Kind, dict[str, Decision]] = {}
        for (_, subject), decision in self.by_subject.items():
            index.setdefault(decision.kind, {})[subject] = decision
        return index

    def of_kind(self, kind: Kind) -> dict[str, Decision]:
        """Those that count of one kind, by subject."""
        return self.by_kind.get(kind, _NONE)

    @cached_property
    def identity(self) -> int:
        """A number that is equal for decisions with equal effects, in any order and whatever their reasons."""
        return sum(map(_identity, self.by_subject.values()))

    @cached_property
    def token(self) -> object:
        """Stands for these decisions where they would be kept too long."""
        return object()

    @cached_property
    def origins(self) -> tuple[tuple[object, frozenset[tuple[str, str]]], ...]:
        """The decisions that these were made of, as tokens, the last ones first, with the kinds and subjects that differ."""
        return ()

    @cached_property
    def recomputed(self) -> int:
        """A number like ``identity``, for what is kept for the backward and what is run again alone."""
        return sum(map(_recomputed, self.by_subject.values()))

    def replaced(self, new: Iterable[Decision], behind: bool = True) -> Decisions:
        """These decisions with new ones in place of those about the same subjects; of several about one, the last. ``behind``:
        the new ones are the last; otherwise where those were that they replace."""
        changes = {(d.kind, d.subject): d for d in new}
        if len(self.by_subject) != len(self):
            return Decisions((*(d for d in self if (d.kind, d.subject) not in changes), *changes.values()))
        index = self.by_subject.copy()
        before = [index.pop(key, None) for key in changes] if behind else [index.get(key) for key in changes]
        index |= changes
        decisions = Decisions(index.values())
        known = decisions.__dict__
        known["by_subject"], left = index, [d for d in before if d is not None]
        changed = frozenset(changes)
        further = [(token, changed | others) for token, others in self.origins[: _ORIGINS - 1]]
        known["origins"] = (self.token, changed), *further
        if "by_kind" in self.__dict__:
            kinds = known["by_kind"] = self.by_kind.copy()
            kinds |= {kind: self.of_kind(kind).copy() for kind in {d.kind for d in changes.values()}}
            for (_, subject), decision in changes.items():
                kinds[decision.kind][subject] = decision
        if "identity" in self.__dict__:
            known["identity"] = self.identity - sum(map(_identity, left)) + sum(map(_identity, changes.values()))
        if "recomputed" in self.__dict__:
            known["recomputed"] = self.recomputed - sum(map(_recomputed, left)) + sum(map(_recomputed, changes.values()))
        return decisions


def _identity(decision: Decision) -> int:
    return _digest(decision.kind, decision.subject, decision.choice, decision.values)


def _recomputed(decision: Decision) -> int:
    kind, choice = decision.kind, decision.choice
    if kind == "variant":
        return _digest(kind, decision.subject, "save" if choice == "save" else "", decision.values)
    return _digest(kind, decision.subject, choice, ()) if kind == "activation" and choice == "recompute" else 0


@lru_cache(1 << 16)
def _digest(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=16).digest(), "big")
