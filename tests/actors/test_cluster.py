"""Starting the local cluster."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="Ray is not installed")

from accelopt_ray.outcome import UserError
from actors import cluster


def test_a_cluster_that_does_not_start_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_slow(**_: object) -> None:
        raise Exception("The current node timed out during startup. This could happen because the GCS is overloaded.")

    monkeypatch.setattr(cluster.ray, "init", too_slow)
    with pytest.raises(UserError) as caught:
        cluster._start_local(2)
    text = str(caught.value)
    assert "timed out during startup" in text and "less busy" in text and "\n" not in text
