"""Fixtures for all tests: an environment without the user's settings, and one Ray cluster for those that need it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

# How long an example takes depends on what else the machine has to do.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")

os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.pop("RAY_ADDRESS", None)
# Results of earlier runs of the tests are no results of this one.
os.environ["ACCELOPT_RAY_STORE"] = "off"


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Says what stays together when pytest-xdist shares the tests out: a module, and all that use the one cluster."""
    for item in items:
        together = "ray" if item.get_closest_marker("ray") else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(together))


@pytest.fixture(scope="session")
def cluster() -> Iterator[object]:
    """A local cluster with two CPUs, shared by all tests; actors are the tests' own and end with them."""
    actors_cluster = pytest.importorskip("actors.cluster", reason="Ray is not installed", exc_type=ImportError)
    with actors_cluster.connected(cpus=2) as found:
        yield found
