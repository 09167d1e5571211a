"""Ray's provider of fake nodes, with a folder for unpacked jobs for each node, as if each had a disk of its own.

Ray's nodes on one machine share that folder, and every node that joins empties it and unpacks the job anew, under the
feet of whoever imports from it.
"""

from __future__ import annotations

import functools
import threading
import uuid
from typing import Any
from unittest import mock

from ray._private.parameter import RayParams
from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider

_PATCHING = threading.Lock()


class SeparateNodesProvider(FakeMultiNodeProvider):
    def _create_node_with_resources_and_labels(self, *arguments: Any, **options: Any) -> Any:
        parameters = functools.partial(RayParams, runtime_env_dir_name=f"runtime_resources_{uuid.uuid4().hex[:8]}")
        with _PATCHING, mock.patch("ray._private.parameter.RayParams", parameters):
            return super()._create_node_with_resources_and_labels(*arguments, **options)
