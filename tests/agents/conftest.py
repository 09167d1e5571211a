from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from misbehaving_endpoint import Endpoint, serve


@pytest.fixture(scope="session")
def running_endpoint() -> Iterator[Endpoint]:
    with serve() as running:
        yield running


@pytest.fixture
def endpoint(running_endpoint: Endpoint) -> Endpoint:
    """The session's endpoint with no script and no past."""
    running_endpoint.reset()
    return running_endpoint
