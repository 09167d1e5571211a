"""Where models are asked, and how."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from accelopt_ray.agents.gpu_time import GpuTimePrice
from accelopt_ray.agents.prices import Price


@dataclass(frozen=True)
class ModelEndpoint:
    """One model at one OpenAI-compatible endpoint, or at several replicas of it.

    Attributes:
        base_url: For instance ``http://host:8000/v1``.
        model: Model name as the endpoint knows it.
        api_key_env: Environment variable that holds the key. The key itself is read when the client is made and is
            never part of this record, which is written to disk.
        temperature: Sampling temperature; None leaves it to the endpoint, as reasoning models may demand.
        top_p: Nucleus sampling; None leaves it to the endpoint.
        max_tokens: Longest completion, reasoning included; None leaves it to the endpoint.
        max_tokens_field: Name of that parameter: ``max_tokens``, or ``max_completion_tokens`` where the endpoint
            accepts only that.
        send_seed: Whether to send a sampling seed with each call.
        extra_body: Further request fields, such as ``{"reasoning_effort": "high"}``.
        timeout_s: Longest wait for one reply, in seconds.
        max_in_flight: Most calls at once at each base URL; the client goes below it when that one is overloaded.
        max_retries: Further tries after a failure that may pass.
        price: Price of tokens or of GPU time; None looks the model up in the price table.
        weight: Share of a role's calls where several endpoints serve it.
        replicas: Further base URLs that serve the same model. Calls of one affinity go to the same of them.
        samples_per_request: Most samples of one prompt to ask for in one request, by the field ``n``; 1 asks for each
            in a request of its own.
        tokenizer: Folder or name of the model's tokeniser, for counting where the endpoint gives no usage.
    """

    base_url: str
    model: str
    api_key_env: str = "OPENAI_API_KEY"
    temperature: float | None = 1.0
    top_p: float | None = None
    max_tokens: int | None = 16_384
    max_tokens_field: str = "max_tokens"
    send_seed: bool = True
    extra_body: Mapping[str, object] = field(default_factory=dict)
    timeout_s: float = 600.0
    max_in_flight: int = 64
    max_retries: int = 6
    price: Price | GpuTimePrice | None = None
    weight: float = 1.0
    replicas: tuple[str, ...] = ()
    samples_per_request: int = 1
    tokenizer: str | None = None

    @property
    def base_urls(self) -> tuple[str, ...]:
        """All that serve the model."""
        return (self.base_url, *self.replicas)

    def routes(self, affinity: str) -> tuple[str, ...]:
        """The base URLs in the order in which calls of one affinity try them.

        Equal affinities always begin with the same one, whose prefix cache then holds their prompt; when a replica
        comes or goes, only its own calls move (rendezvous hashing).
        """
        return tuple(sorted(self.base_urls, key=lambda url: hashlib.sha256(f"{affinity} {url}".encode()).digest()))


def choose_endpoint(endpoints: Sequence[ModelEndpoint], call_id: str) -> ModelEndpoint:
    """Chooses the endpoint that answers a call, with probability in proportion to its weight.

    The choice depends on the call alone, so a resumed run asks the same model again.

    Raises:
        ValueError: There are no endpoints, or no weight is positive.
    """
    total = sum(endpoint.weight for endpoint in endpoints)
    if total <= 0:
        raise ValueError("no endpoint has a positive weight")
    draw = int.from_bytes(hashlib.sha256(call_id.encode()).digest()[:8], "big") / 2**64 * total
    for endpoint in endpoints:
        draw -= endpoint.weight
        if draw < 0:
            return endpoint
    return max(endpoints, key=lambda endpoint: endpoint.weight)
