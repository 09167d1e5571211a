"""What tokens cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from accelopt_ray.outcome import UserError

_PACKAGE_TABLE = Path(__file__).with_name("prices.yaml")


@dataclass(frozen=True)
class Price:
    """US dollars per million tokens of each kind."""

    prompt_usd_per_million: float
    cached_usd_per_million: float
    completion_usd_per_million: float

    def cost_usd(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> float:
        """Returns the cost of a call.

        Args:
            prompt_tokens: All prompt tokens.
            cached_tokens: Those of them that the endpoint's cache answered.
            completion_tokens: Completion tokens, reasoning included.
        """
        fresh = max(0, prompt_tokens - cached_tokens)
        return (
            fresh * self.prompt_usd_per_million
            + cached_tokens * self.cached_usd_per_million
            + completion_tokens * self.completion_usd_per_million
        ) / 1e6


@dataclass(frozen=True)
class PriceTable:
    """Prices by model name.

    Attributes:
        as_of: Date of the prices, ISO format.
        models: Price by name in lower case.
    """

    as_of: str
    models: Mapping[str, Price]

    def price(self, model: str) -> Price | None:
        """Returns a model's price, or None if the table has none; ``openai/gpt-oss-120b`` is found by its last part."""
        name = model.lower()
        return self.models.get(name) or self.models.get(name.rsplit("/", 1)[-1])


def load_prices(path: Path | None = None) -> PriceTable:
    """Reads a price table; the package's own without a path.

    Raises:
        UserError: The file cannot be read or is not of the package table's form.
    """
    source = path or _PACKAGE_TABLE
    try:
        content = yaml.safe_load(source.read_text(encoding="utf-8"))
        models = {str(name).lower(): _price(entry) for name, entry in content["models"].items()}
        return PriceTable(str(content["as_of"]), models)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"cannot read the price table {source}: {error}") from error
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(
            f"the price table {source} is malformed ({error!r}): give as_of and, under models, "
            "prompt, cached and completion for each, in US dollars per million tokens"
        ) from error


def _price(entry: Mapping[str, object]) -> Price:
    prompt = _usd(entry["prompt"])
    return Price(prompt, _usd(entry.get("cached", prompt)), _usd(entry["completion"]))


def _usd(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise ValueError(f"{value!r} is no price")
    return float(value)
