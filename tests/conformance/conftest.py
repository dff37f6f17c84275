"""A plan cache that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def plans_are_searched_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The tests of this folder compile the same few models again and again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MT_CACHE", str(tmp_path_factory.mktemp("plans")))
        yield
