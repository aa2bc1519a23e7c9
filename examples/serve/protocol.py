"""The bodies of requests: reads what is supported and refuses the rest by name, in OpenAI's form of errors."""

import math
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llama.tokenizer import ChatTokenizer

# Options that change the text and that only their neutral values can be given for, until sampling is in the step.
NEUTRAL = {
    "temperature": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "echo": False,
    "suffix": (None, ""),
    "best_of": (None, 1),
    "tools": (None, []),
    "logit_bias": (None, {}),
}
# Without effect on a greedy text.
WITHOUT_EFFECT = {"top_p", "seed", "user", "metadata", "store"}
KNOWN = {"model", "prompt", "messages", "max_tokens", "max_completion_tokens", "n", "stop", "stream", "stream_options"}
MAX_CHOICES = 16
MAX_STOPS = 4


class ApiError(Exception):
    """An answer other than 200, in OpenAI's form."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, kind: str = "invalid_request_error"
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": None}}


@dataclass(frozen=True)
class Request:
    """What one body asks for; `prompts` has one entry per choice."""

    prompts: list[list[int]]
    num_prompt_tokens: int
    max_new_tokens: int
    stops: list[str]
    stream: bool
    include_usage: bool


def integer(body: dict, name: str, default: int, low: int, high: int) -> int:
    """The integer `name` of the body, within bounds."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ApiError(f"{name} is {value!r}, expected an integer from {low} to {high}", name)
    return value


def boolean(body: dict, name: str) -> bool:
    """The boolean `name` of the body, False where it is absent."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise ApiError(f"{name} is {value!r}, expected true or false", name)
    return bool(value)


def check_options(body: dict) -> None:
    """Refuse unknown options, and known ones with a value that has no implementation here."""
    for name, value in body.items():
        if name not in KNOWN | WITHOUT_EFFECT | NEUTRAL.keys():
            raise ApiError(f"{name} is not an option of this server", name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ApiError(f"{name} is {value}, expected a finite number", name)
        if name in NEUTRAL:
            neutral = NEUTRAL[name]
            if value is not None and value not in (neutral if isinstance(neutral, tuple) else (neutral,)):
                raise ApiError(f"{name} is {value!r}: this server generates greedily and has no {name} yet", name)


def read_stops(body: dict) -> list[str]:
    """The stop strings: none, one or a list."""
    stops = body.get("stop")
    stops = [] if stops is None else [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise ApiError(f"stop is not a text or a list of at most {MAX_STOPS} texts, none of them empty", "stop")
    return stops


def completion_prompts(body: dict, tokenizer: ChatTokenizer) -> list[list[int]]:
    """`prompt`: a text, token ids, or a list of either."""
    prompt = body.get("prompt")
    ids = isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt)
    entries = [prompt] if isinstance(prompt, str) or ids else prompt
    if not isinstance(entries, list) or not entries:
        raise ApiError("prompt is missing or empty, expected a text, token ids or a list of them", "prompt")
    prompts = []
    for entry in entries:
        if isinstance(entry, list) and all(type(token) is int for token in entry):
            if not all(0 <= token < tokenizer.vocab_size for token in entry):
                raise ApiError(f"prompt has a token id outside 0 to {tokenizer.vocab_size - 1}", "prompt")
            tokens = entry
        elif isinstance(entry, str):
            tokens = tokenizer.encode(entry)
        else:
            raise ApiError("prompt holds an entry that is neither a text nor token ids", "prompt")
        prompts.append(tokens)
    return prompts


def chat_prompt(body: dict, tokenizer: ChatTokenizer) -> list[int]:
    """`messages`, written by the model's chat template in Jinja's sandbox."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError("messages is missing or empty, expected a list of messages", "messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ApiError("messages holds an entry without a role", "messages")
        if not isinstance(message.get("content"), str):
            raise ApiError("messages holds an entry whose content is not a text", "messages")
    if not tokenizer.template:
        raise ApiError("the model has no chat template, use /v1/completions", "model")
    try:
        template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(tokenizer.template)
        text = template.render(messages=messages, add_generation_prompt=True)
    except (TemplateError, TypeError, ValueError) as error:
        raise ApiError(f"the chat template does not accept the messages: {error}", "messages") from error
    return tokenizer.tokenizer.encode(text, add_special_tokens=False).ids


def read_request(body: Any, *, chat: bool, model: str, tokenizer: ChatTokenizer, capacity: int) -> Request:
    """Read one body; `ApiError` says what is wrong with it."""
    if not isinstance(body, dict):
        raise ApiError(f"the body is a JSON {type(body).__name__}, expected an object")
    if body.get("model") != model:
        raise ApiError(f"model is {body.get('model')!r}, served is {model!r}", "model", 404, "not_found_error")
    check_options(body)
    prompts = [chat_prompt(body, tokenizer)] if chat else completion_prompts(body, tokenizer)
    longest = max(map(len, prompts))
    if not min(map(len, prompts)):
        raise ApiError("the prompt has no tokens, expected at least one", "prompt")
    if longest >= capacity:
        raise ApiError(f"a prompt has {longest} tokens, with one generated token at most {capacity} fit", "prompt")
    name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    max_new_tokens = integer(body, name, capacity - longest if chat else min(16, capacity - longest), 1, 2**31)
    if longest + max_new_tokens > capacity:
        raise ApiError(f"{longest} prompt tokens and {name} = {max_new_tokens} exceed {capacity} tokens", name)
    choices = integer(body, "n", 1, 1, MAX_CHOICES)
    stream = boolean(body, "stream")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict) or (options and not stream):
        raise ApiError("stream_options is not an object or is given without stream", "stream_options")
    return Request(
        [prompt for prompt in prompts for _ in range(choices)],
        sum(map(len, prompts)),
        max_new_tokens,
        read_stops(body),
        stream,
        boolean(options, "include_usage"),
    )
