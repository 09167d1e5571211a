"""From a chat completion, or from its failure, to the parts of a reply."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion
from openai.types.chat.chat_completion import Choice

from accelopt_ray.agents.tokens import Counter, estimate_tokens
from accelopt_ray.outcome import CallOutcome

_THINK = re.compile(r"\A\s*<think(?:ing)?>(?P<reasoning>.*?)</think(?:ing)?>\s*", re.DOTALL | re.IGNORECASE)
_OPEN_THINK = re.compile(r"\A\s*<think(?:ing)?>", re.IGNORECASE)
# Some chat templates put the opening tag into the prompt, so that only the closing one is in the reply.
_CLOSE_THINK = re.compile(r"</think(?:ing)?>\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Usage:
    """Tokens of one or several requests.

    Attributes:
        prompt_tokens: Of the prompt.
        cached_tokens: Of these, answered from the endpoint's cache.
        completion_tokens: Of the completion, reasoning included.
        reasoning_tokens: Of these, reasoning.
        estimated: Whether the endpoint gave no usage and the texts were counted here.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    estimated: bool = False

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.completion_tokens + other.completion_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
            self.estimated or other.estimated,
        )


@dataclass(frozen=True)
class ParsedCompletion:
    """The parts of one completion."""

    outcome: CallOutcome
    reply_text: str
    reasoning_text: str
    finish_reason: str
    usage: Usage = Usage()


class MalformedCompletionError(Exception):
    """The endpoint answered with something that is no chat completion."""


def parse_completions(
    completion: object, prompt_text: str, samples: int = 1, count_tokens: Counter = estimate_tokens
) -> list[ParsedCompletion]:
    """Reads a chat completion.

    Args:
        completion: What the client library returned; it does not validate, so any JSON value may come.
        prompt_text: Both messages, for the count of tokens where usage is absent.
        samples: How many were asked for.
        count_tokens: Counts tokens where usage is absent.

    Returns:
        The samples, at least one; fewer than asked for if the endpoint has sent fewer. The request's usage is divided
        among them: the prompt evenly, the completion by the length of the texts; the parts add up to what was counted.

    Raises:
        MalformedCompletionError: It has no choices or no message.
    """
    if not isinstance(completion, ChatCompletion) or not completion.choices:
        raise MalformedCompletionError("the endpoint's answer has no choices")
    # An endpoint that sends a choice twice has answered once.
    by_index = {getattr(choice, "index", 0): choice for choice in reversed(completion.choices)}
    answers = [_read_choice(by_index[index]) for index in sorted(by_index, key=_order)[:samples]]
    usages = _usages(completion.usage, prompt_text, answers, count_tokens)
    return [replace(answer, usage=usage) for answer, usage in zip(answers, usages, strict=True)]


def _order(index: object) -> int:
    return index if isinstance(index, int) else 0


def _read_choice(choice: Choice) -> ParsedCompletion:
    message = getattr(choice, "message", None)
    if message is None:
        raise MalformedCompletionError("the endpoint's answer has no message")
    fields = message.model_extra or {}
    reasoning = next((v for k in ("reasoning_content", "reasoning") if isinstance(v := fields.get(k), str)), "")
    content = message.content if isinstance(message.content, str) else ""
    if not reasoning:
        reasoning, content = split_reasoning(content)
    finish_reason = str(choice.finish_reason or "")
    refusal = message.refusal if isinstance(message.refusal, str) else ""
    if not content.strip() and message.tool_calls:
        # A model trained on tools may put its answer into a call of one that was never offered.
        content = "\n".join(_tool_arguments(call) for call in message.tool_calls)
    if refusal or finish_reason == "content_filter":
        outcome = CallOutcome.REFUSED
        content = content or refusal
    elif finish_reason == "length":
        outcome = CallOutcome.TRUNCATED
    elif not content.strip():
        outcome = CallOutcome.EMPTY
    else:
        outcome = CallOutcome.OK
    return ParsedCompletion(outcome, content, reasoning, finish_reason)


def split_reasoning(content: str) -> tuple[str, str]:
    """Splits reasoning written into the answer, in a ``<think>`` block at its start, from the answer.

    Returns:
        Reasoning and answer. A block that is never closed is all reasoning: the model was cut off while thinking.
    """
    match = _THINK.match(content)
    if match is not None:
        return match["reasoning"].strip(), content[match.end() :]
    if _OPEN_THINK.match(content):
        return _OPEN_THINK.sub("", content).strip(), ""
    match = _CLOSE_THINK.search(content)
    if match is not None and "<think" not in content[: match.start()].lower():
        return content[: match.start()].strip(), content[match.end() :]
    return "", content


def _usages(
    usage: CompletionUsage | None, prompt_text: str, answers: Sequence[ParsedCompletion], count_tokens: Counter
) -> list[Usage]:
    prompt = _count(getattr(usage, "prompt_tokens", None))
    generated = _count(getattr(usage, "completion_tokens", None))
    if prompt is None or generated is None:
        prompts = divided(count_tokens(prompt_text), [1] * len(answers))
        thoughts = [count_tokens(answer.reasoning_text) for answer in answers]
        texts = [count_tokens(answer.reply_text) for answer in answers]
        return [
            Usage(tokens, 0, text + thought, thought, estimated=True)
            for tokens, text, thought in zip(prompts, texts, thoughts, strict=True)
        ]
    cached = _count(getattr(getattr(usage, "prompt_tokens_details", None), "cached_tokens", None)) or 0
    thought_count = _count(getattr(getattr(usage, "completion_tokens_details", None), "reasoning_tokens", None)) or 0
    lengths = [len(answer.reply_text) + len(answer.reasoning_text) for answer in answers]
    even = [1] * len(answers)
    parts = zip(
        divided(prompt, even),
        divided(min(cached, prompt), even),
        divided(generated, lengths),
        divided(min(thought_count, generated), [len(answer.reasoning_text) for answer in answers]),
        strict=True,
    )
    return [Usage(*part) for part in parts]


def divided(total: int, weights: Sequence[int]) -> list[int]:
    """Divides a count in proportion to weights, evenly if all are 0; the parts are whole and add up to it exactly."""
    sizes = list(weights) if any(weights) else [1] * len(weights)
    whole, ends, so_far = sum(sizes), [0], 0
    for size in sizes:
        so_far += size
        ends.append(total * so_far // whole)
    return [end - start for start, end in itertools.pairwise(ends)]


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _tool_arguments(call: object) -> str:
    function = getattr(call, "function", None)
    return str(getattr(function, "arguments", "") or "")
