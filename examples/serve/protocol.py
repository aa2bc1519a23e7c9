"""The bodies of requests: reads what is supported and refuses the rest by name, in OpenAI's form of errors."""

import math
import secrets
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llama.options import MAX_TOP_LOGPROBS, Sampling
from llama.tokenizer import ChatTokenizer

from .messages import Prompt

# Options that change the text and that only their neutral values can be given for.
NEUTRAL = {
    "echo": False,
    "suffix": (None, ""),
    "best_of": (None, 1),
    "tools": (None, []),
    "logit_bias": (None, {}),
}
WITHOUT_EFFECT = {"user", "metadata", "store"}
KNOWN = {"model", "prompt", "messages", "max_tokens", "max_completion_tokens", "n", "stop", "stream", "stream_options"}
KNOWN |= {"seed", "top_k", "logprobs", "top_logprobs", "ignore_eos"}
# Numbers with their default, lowest and highest value; top_p of 0 would leave no token.
NUMBERS = {
    "temperature": (1.0, 0.0, 2.0),
    "top_p": (1.0, 1e-6, 1.0),
    "min_p": (0.0, 0.0, 1.0),
    "presence_penalty": (0.0, -2.0, 2.0),
    "frequency_penalty": (0.0, -2.0, 2.0),
    "repetition_penalty": (1.0, 0.01, 100.0),
}
# Logits divided by less might overflow, and the most likely token is all but certain.
MIN_TEMPERATURE = 1e-3
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
    """What one body asks for; `prompts` has one entry per choice, `num_top` alternatives are in its logprobs."""

    prompts: list[Prompt]
    num_prompt_tokens: int
    num_top: int
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


def number(body: dict, name: str) -> float:
    """The number `name` of the body, within its bounds."""
    default, low, high = NUMBERS[name]
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ApiError(f"{name} is {value!r}, expected a number from {low:g} to {high:g}", name)
    return float(value)


def read_sampling(body: dict, *, chat: bool) -> tuple[Sampling, int]:
    """How tokens are chosen, and how many alternatives the log-probabilities have."""
    if chat:
        logprobs, num_top = boolean(body, "logprobs"), integer(body, "top_logprobs", 0, 0, MAX_TOP_LOGPROBS)
        if num_top and not logprobs:
            raise ApiError("top_logprobs is given without logprobs", "top_logprobs")
    else:
        num_top = integer(body, "logprobs", -1, 0, MAX_TOP_LOGPROBS)
        logprobs = num_top >= 0
    values = {name: number(body, name) for name in NUMBERS}
    if values["temperature"] < MIN_TEMPERATURE:
        values["temperature"] = 0.0
    top_k = max(integer(body, "top_k", 0, -1, 2**31 - 1), 0)
    seed = integer(body, "seed", secrets.randbits(63), -(2**63), 2**63 - 1)
    return Sampling(top_k=top_k, seed=seed % 2**64, logprobs=logprobs, **values), num_top


def check_options(body: dict) -> None:
    """Refuse unknown options, and known ones with a value that has no implementation here."""
    for name, value in body.items():
        if name not in KNOWN | WITHOUT_EFFECT | NEUTRAL.keys() | NUMBERS.keys():
            raise ApiError(f"{name} is not an option of this server", name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ApiError(f"{name} is {value}, expected a finite number", name)
        if name in NEUTRAL:
            neutral = NEUTRAL[name]
            if value is not None and value not in (neutral if isinstance(neutral, tuple) else (neutral,)):
                raise ApiError(f"{name} is {value!r}: this server has no {name}", name)


def read_stops(body: dict) -> list[str]:
    """The stop strings: none, one or a list."""
    stops = body.get("stop")
    stops = [] if stops is None else [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise ApiError(f"stop is not a text or a list of at most {MAX_STOPS} texts, none of them empty", "stop")
    return stops


def refuse_endless(text: str, tokenizer: ChatTokenizer, capacity: int, name: str) -> None:
    """Refuse a text that cannot fit even in the longest tokens, before the time of tokenising is spent."""
    if len(text) > capacity * tokenizer.longest_token:
        raise ApiError(f"{name} has a text of {len(text)} characters, more than {capacity} tokens can hold", name)


def completion_prompts(body: dict, tokenizer: ChatTokenizer, capacity: int) -> list[list[int]]:
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
            refuse_endless(entry, tokenizer, capacity, "prompt")
            tokens = tokenizer.encode(entry)
        else:
            raise ApiError("prompt holds an entry that is neither a text nor token ids", "prompt")
        prompts.append(tokens)
    return prompts


def text_of(content: Any) -> str:
    """The content of a message: a text, or parts that are texts."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        raise ApiError("messages holds an entry whose content is neither a text nor a list of texts", "messages")
    if not all(isinstance(part.get("text"), str) for part in parts):
        raise ApiError("messages holds a part of type text without a text", "messages")
    return "".join(part["text"] for part in parts)


def chat_prompt(body: dict, tokenizer: ChatTokenizer, capacity: int) -> list[int]:
    """`messages`, written by the model's chat template in Jinja's sandbox."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError("messages is missing or empty, expected a list of messages", "messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ApiError("messages holds an entry without a role", "messages")
    messages = [message | {"content": text_of(message.get("content"))} for message in messages]
    if not tokenizer.template:
        raise ApiError("the model has no chat template, use /v1/completions", "model")
    try:
        template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(tokenizer.template)
        text = template.render(messages=messages, add_generation_prompt=True)
    except (TemplateError, TypeError, ValueError) as error:
        raise ApiError(f"the chat template does not accept the messages: {error}", "messages") from error
    refuse_endless(text, tokenizer, capacity, "messages")
    return tokenizer.encode_special(text)


def read_request(body: Any, *, chat: bool, model: str, tokenizer: ChatTokenizer, capacity: int) -> Request:
    """Read one body; `ApiError` says what is wrong with it."""
    if not isinstance(body, dict):
        raise ApiError(f"the body is a JSON {type(body).__name__}, expected an object")
    if body.get("model") != model:
        raise ApiError(f"model is {body.get('model')!r}, served is {model!r}", "model", 404, "not_found_error")
    check_options(body)
    prompts = [chat_prompt(body, tokenizer, capacity)] if chat else completion_prompts(body, tokenizer, capacity)
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
    sampling, num_top = read_sampling(body, chat=chat)
    stop_tokens = frozenset() if boolean(body, "ignore_eos") else tokenizer.stop_tokens
    return Request(
        [
            Prompt(prompt, max_new_tokens, replace(sampling, seed=(sampling.seed + choice) % 2**64), stop_tokens)
            for prompt in prompts
            for choice in range(choices)
        ],
        sum(map(len, prompts)),
        num_top,
        read_stops(body),
        stream,
        boolean(options, "include_usage"),
    )
