"""``python -m accelopt_ray``: the command line without an installed script."""

from __future__ import annotations

from accelopt_ray.cli import main

if __name__ == "__main__":
    main()
