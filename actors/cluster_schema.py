"""Ray's own opinion of a cluster file, without a cloud account."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import ray

# Private to Ray, but what `ray up` calls first; the tests notice when they change.
from ray.autoscaler._private.util import prepare_config, validate_config

from accelopt_ray.outcome import UserError


def check_with_ray(path: Path, content: Mapping[str, Any]) -> None:
    """Validates a cluster file against the schema of the installed Ray and its further offline checks.

    Raises:
        UserError: Ray would refuse the file; the message names the field.
    """
    schema_path = Path(ray.__file__).parent / "autoscaler" / "ray-schema.json"
    try:
        jsonschema.validate(content, json.loads(schema_path.read_text(encoding="utf-8")))
    except jsonschema.ValidationError as error:
        field = ".".join(str(part) for part in error.absolute_path)
        raise UserError(f"{path}: {field or 'top level'}: {error.message}: correct the field") from None
    logger = logging.getLogger("ray.autoscaler._private.util")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        validate_config(prepare_config(copy.deepcopy(dict(content))))
    except (ValueError, KeyError, TypeError, jsonschema.ValidationError) as error:
        raise UserError(f"{path}: Ray refuses it: {' '.join(str(error).split())[:300]}") from None
    finally:
        logger.setLevel(level)
