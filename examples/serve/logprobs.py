"""Log-probabilities of tokens in OpenAI's two forms."""

from dataclasses import dataclass
from typing import Any

from llama.tokenizer import ChatTokenizer


@dataclass(frozen=True)
class TokenLogprobs:
    """A token with its log-probability, its alternatives, and where its text begins in the text of the choice."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    offset: int


def token_text(tokenizer: ChatTokenizer, token: int) -> str:
    """The text of one token, also of a special one; bytes that are no character are U+FFFD."""
    return tokenizer.tokenizer.decode([token], skip_special_tokens=False)


def of_completion(entries: list[TokenLogprobs], num_top: int, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """`logprobs` of a choice of /v1/completions; of alternatives with the same text, the most likely stays."""
    tops = []
    for entry in entries:
        top: dict[str, float] = {}
        for token, logprob in entry.top[:num_top]:
            top.setdefault(token_text(tokenizer, token), logprob)
        tops.append(top)
    return {
        "tokens": [token_text(tokenizer, entry.token) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": tops if num_top else None,
        "text_offset": [entry.offset for entry in entries],
    }


def of_chat(entries: list[TokenLogprobs], num_top: int, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """`logprobs` of a choice of /v1/chat/completions."""

    def described(token: int, logprob: float) -> dict[str, Any]:
        text = token_text(tokenizer, token)
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}

    return {
        "content": [
            described(entry.token, entry.logprob)
            | {"top_logprobs": [described(*alternative) for alternative in entry.top[:num_top]]}
            for entry in entries
        ],
        "refusal": None,
    }
