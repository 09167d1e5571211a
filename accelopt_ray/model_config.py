"""The part of a run's configuration that is about models: endpoints, models to host, prices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from accelopt_ray.agents.endpoints import ModelEndpoint
from accelopt_ray.agents.gpu_time import GpuTimePrice
from accelopt_ray.agents.prices import Price, PriceTable, load_prices
from accelopt_ray.outcome import UserError
from accelopt_ray.serving.model import HostedModel
from accelopt_ray.serving.presets import PRESETS, ModelPreset, Sampling, model_preset

_URL = r"^https?://\S+$"
_OWN_FIELDS = frozenset({"base_url", "replicas", "hosted", "price", "gpu_hour_usd", "gpus"})
"""Fields of :class:`Endpoint` that reach the client in another form."""


class Section(BaseModel):
    """A part of the configuration: no unknown fields, no changes after the check."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TokenPrices(Section):
    """US dollars per million tokens; what the endpoint's cache answers costs as much as a fresh token unless named."""

    prompt: float = Field(ge=0.0)
    cached: float | None = Field(default=None, ge=0.0)
    completion: float = Field(ge=0.0)

    def price(self) -> Price:
        """The same in the model client's terms."""
        return Price(self.prompt, self.prompt if self.cached is None else self.cached, self.completion)


class PriceList(Section):
    """A price table of the user's own, in the form of the package's.

    Attributes:
        as_of: Date of the prices.
        models: Prices by model name.
    """

    as_of: str
    models: dict[str, TokenPrices]

    @field_validator("as_of", mode="before")
    @classmethod
    def _date_as_text(cls, value: object) -> str:
        return str(value)

    @classmethod
    def of(cls, table: PriceTable) -> PriceList:
        """A table in the configuration's form."""
        models = {
            name: TokenPrices(
                prompt=price.prompt_usd_per_million,
                cached=price.cached_usd_per_million,
                completion=price.completion_usd_per_million,
            )
            for name, price in table.models.items()
        }
        return cls(as_of=table.as_of, models=models)

    @classmethod
    def read(cls, path: Path) -> PriceList:
        """Reads a file.

        Raises:
            UserError: It cannot be read or has another form.
        """
        return cls.of(load_prices(path))

    def table(self) -> PriceTable:
        """The same in the model client's terms."""
        return PriceTable(self.as_of, {name.lower(): prices.price() for name, prices in self.models.items()})


class Hosted(Section):
    """A model that the run brings up for itself.

    Attributes:
        preset: What to start from, a name from :data:`~accelopt_ray.serving.presets.PRESETS`; the model's own name by
            default, if it is one.
        source: Hub name or local folder; the preset's by default.
        context_tokens: Longest prompt and completion together.
        tensor_parallel: GPUs that share one copy of the weights.
        gpus_per_replica: GPUs taken for one replica; as many as ``tensor_parallel`` by default, 0 serves on CPUs.
        cpus_per_replica: CPUs taken for one replica.
        min_replicas: Replicas kept when nobody asks.
        max_replicas: Most replicas.
        accelerator_type: Ray's name of the GPU wanted.
        engine: Further arguments of vLLM's engine, by their Python names.
        environment: Environment variables of the engine.
        start_timeout_s: Longest wait until it is ready.
        max_restarts: How often a replica that failed is started again.
        executable: The ``vllm`` command, where models are child processes.
        gpu_hour_usd: US dollars for an hour of one GPU.
    """

    preset: str | None = None
    source: str | None = None
    context_tokens: int | None = Field(default=None, ge=256)
    tensor_parallel: int | None = Field(default=None, ge=1)
    gpus_per_replica: int | None = Field(default=None, ge=0)
    cpus_per_replica: int = Field(default=1, ge=0)
    min_replicas: int = Field(default=0, ge=0)
    max_replicas: int = Field(default=1, ge=1)
    accelerator_type: str | None = None
    engine: dict[str, Any] = Field(default_factory=dict)
    environment: dict[str, str] = Field(default_factory=dict)
    start_timeout_s: float = Field(default=3600.0, gt=0.0)
    max_restarts: int = Field(default=3, ge=0)
    executable: str = "vllm"
    gpu_hour_usd: float | None = Field(default=None, ge=0.0)

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Hosted:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas {self.min_replicas} exceeds max_replicas {self.max_replicas}")
        return self

    def sampling(self, name: str) -> Sampling:
        """How its maker would have it asked; nothing in particular without a preset."""
        preset = self._preset(name)
        return preset.sampling if preset is not None else Sampling()

    def model(self, name: str) -> HostedModel:
        """The model in the terms of what starts it.

        Raises:
            UserError: There is no such preset, or neither preset nor source.
        """
        preset = self._preset(name)
        source = self.source or (preset.source if preset is not None else None)
        if source is None:
            raise UserError(f"hosted.{name} has no source: give a hub name, a folder, or a preset")
        tensor_parallel = self.tensor_parallel or (preset.tensor_parallel if preset is not None else 1)
        return HostedModel(
            name=name,
            # A folder is found from wherever the server runs.
            source=str(Path(source).resolve()) if Path(source).is_dir() else source,
            context_tokens=self.context_tokens or (preset.context_tokens if preset is not None else None),
            tensor_parallel=tensor_parallel,
            gpus_per_replica=tensor_parallel if self.gpus_per_replica is None else self.gpus_per_replica,
            cpus_per_replica=self.cpus_per_replica,
            min_replicas=self.min_replicas,
            max_replicas=self.max_replicas,
            accelerator_type=self.accelerator_type,
            engine={**(preset.engine if preset is not None else {}), **self.engine},
            environment=self.environment,
            start_timeout_s=self.start_timeout_s,
            max_restarts=self.max_restarts,
            executable=self.executable,
        )

    def _preset(self, name: str) -> ModelPreset | None:
        if self.preset is not None:
            return model_preset(self.preset)
        return model_preset(name) if name.lower() in {known.lower() for known in PRESETS} else None


class Endpoint(Section):
    """An OpenAI-compatible chat endpoint, with the fields of :class:`~accelopt_ray.agents.endpoints.ModelEndpoint`.

    It is either somewhere (``base_url``) or brought up by the run (``hosted``, a name under the run's ``hosted`` or
    that of a preset). The key itself is never written anywhere, only the name of the variable that holds it.
    ``gpu_hour_usd`` and ``gpus`` price the time in which it works instead of its tokens.
    """

    base_url: str | None = Field(default=None, pattern=_URL)
    replicas: list[str] = Field(default_factory=list)
    hosted: str | None = None
    model: str = ""
    api_key_env: str = "OPENAI_API_KEY"
    temperature: float | None = Field(default=1.0, ge=0.0, le=2.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    max_tokens: int | None = Field(default=16_384, ge=1)
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    send_seed: bool = True
    extra_body: dict[str, Any] = Field(default_factory=dict)
    timeout_s: float = Field(default=600.0, gt=0.0)
    max_in_flight: int = Field(default=64, ge=1)
    max_retries: int = Field(default=6, ge=0)
    price: TokenPrices | None = None
    gpu_hour_usd: float | None = Field(default=None, ge=0.0)
    gpus: int = Field(default=1, ge=1)
    weight: float = Field(default=1.0, gt=0.0)
    samples_per_request: int = Field(default=1, ge=1, le=128)
    tokenizer: str | None = None

    @field_validator("replicas")
    @classmethod
    def _are_urls(cls, replicas: list[str]) -> list[str]:
        for url in replicas:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{url!r} is no URL: give one like http://host:8000/v1")
        return replicas

    @model_validator(mode="after")
    def _is_somewhere(self) -> Endpoint:
        if (self.base_url is None) == (self.hosted is None):
            raise ValueError("an endpoint has either a base_url or the name of a hosted model: give one of them")
        if self.base_url is not None and not self.model:
            raise ValueError("model is missing: name the model at the base_url")
        if self.price is not None and self.gpu_hour_usd is not None:
            raise ValueError("an endpoint is priced by tokens or by GPU hours: give price or gpu_hour_usd")
        return self

    def filled_from(self, name: str, hosted: Hosted) -> Endpoint:
        """The same with everything that is not said taken from the hosted model and its preset.

        Raises:
            UserError: As :meth:`Hosted.model`.
        """
        model, sampling = hosted.model(name), hosted.sampling(name)
        # One request for all samples of a prompt: vLLM reads the prompt once for them.
        values: dict[str, object] = {"model": name, "samples_per_request": 16, "tokenizer": model.source}
        # Calls wait for a server that is started again: with pauses of up to a minute, for a quarter of an hour.
        values["max_retries"] = 20
        values |= {key: value for key, value in vars(sampling).items() if value not in (None, {})}
        if hosted.gpu_hour_usd is not None and self.price is None:
            values |= {"gpu_hour_usd": hosted.gpu_hour_usd, "gpus": max(1, model.gpus)}
        unsaid = {key: value for key, value in values.items() if key not in self.model_fields_set}
        return type(self).model_validate({**self.model_dump(exclude_unset=True), **unsaid})

    def model_endpoint(self, base_urls: Sequence[str] = ()) -> ModelEndpoint:
        """The same in the model client's terms.

        Args:
            base_urls: Where a hosted model answers; without them its URL is empty.
        """
        fields = {name: getattr(self, name) for name in type(self).model_fields if name not in _OWN_FIELDS}
        urls = tuple(base_urls) if self.hosted is not None else (self.base_url or "", *self.replicas)
        price: Price | GpuTimePrice | None = self.price.price() if self.price is not None else None
        if self.gpu_hour_usd is not None:
            price = GpuTimePrice(self.gpu_hour_usd, self.gpus)
        return ModelEndpoint(base_url=urls[0] if urls else "", replicas=urls[1:], **fields, price=price)


def filled(models: Mapping[str, Sequence[Endpoint]], hosted: Mapping[str, Hosted]) -> dict[str, list[Endpoint]]:
    """Fills every hosted endpoint from its model; a name that is not among ``hosted`` must be a preset's.

    Raises:
        UserError: There is no such model.
    """
    return {
        role: [
            each if each.hosted is None else each.filled_from(each.hosted, hosted.get(each.hosted, Hosted()))
            for each in endpoints
        ]
        for role, endpoints in models.items()
    }
