"""Whether a model endpoint answers, asked before a run depends on it."""

from __future__ import annotations

import os

from accelopt_ray.config import ROLES, RunConfig
from accelopt_ray.outcome import UserError

_TIMEOUT_S = 10.0


def check_endpoints(config: RunConfig) -> None:
    """Asks each endpoint of a run for its models.

    Raises:
        UserError: One does not answer, refuses the key, or does not have the model.
    """
    wanted_models: dict[tuple[str, str], set[str]] = {}
    for role in ROLES:
        for endpoint in config.endpoints(role):
            wanted_models.setdefault((endpoint.base_url, endpoint.api_key_env), set()).add(endpoint.model)
    for (base_url, api_key_env), wanted in wanted_models.items():
        offered = models_of(base_url, api_key_env)
        for model in sorted(wanted):
            # An endpoint may answer for more models than it lists, but one that lists none tells nothing.
            if offered and model not in offered:
                raise UserError(f"{base_url} has no model {model!r}: it offers {', '.join(offered[:8])}")


def models_of(base_url: str, api_key_env: str) -> list[str]:
    """Asks an endpoint for its models.

    Returns:
        Their names; empty when the endpoint answers but does not list models.

    Raises:
        UserError: It does not answer, or refuses the key.
    """
    import httpx

    key = os.environ.get(api_key_env, "")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.get(f"{base_url.rstrip('/')}/models", headers=headers, timeout=_TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        raise UserError(f"the endpoint {base_url} does not answer ({reason}): start it, or correct its URL") from None
    if answer.status_code in (401, 403):
        raise UserError(f"the endpoint {base_url} refuses the key: put a valid one into the variable {api_key_env}")
    if answer.status_code >= 500:
        raise UserError(f"the endpoint {base_url} answers with HTTP {answer.status_code}: wait until it is ready")
    try:
        return [str(model["id"]) for model in answer.json()["data"]]
    except (ValueError, KeyError, TypeError):
        return []
