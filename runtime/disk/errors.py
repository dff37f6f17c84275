"""Errors of the disk tier. Each says what was asked of which file, what happened, and what to do."""

from __future__ import annotations


class DiskError(OSError):
    """Raised when a disk does not read, write or reserve what it was asked to."""


class DiskFull(DiskError):
    """Raised before anything is written, if the file system has not the bytes that a plan needs."""


class DiskCorrupt(DiskError):
    """Raised when bytes that were read are not those that were written, before anything uses them."""
