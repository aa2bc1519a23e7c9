"""Writes one answer, whole or as server-sent events, from the tokens of its choices as they come."""

import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from llama.tokenizer import ChatTokenizer

from .client import EngineClient, Generation, Group
from .logprobs import TokenLogprobs, of_chat, of_completion
from .messages import EngineDeadError
from .protocol import ApiError, Request
from .text import TextStream


@dataclass
class Piece:
    """Newly certain text of one choice; `reason` with the last."""

    text: str
    reason: str | None
    logprobs: list[TokenLogprobs]


class Choice:
    """The text of one choice as it is generated; what arrived together comes out together."""

    def __init__(self, generation: Generation, stops: list[str], tokenizer: ChatTokenizer) -> None:
        self.generation = generation
        self.has_begun = False
        self._stream = TextStream(tokenizer, stops)
        self._has_stops = bool(stops)
        self._unsent: list[TokenLogprobs] = []  # of tokens whose text has not come out

    def take(self) -> Piece | None:
        """What has arrived, if some text of it is certain."""
        generation, stream = self.generation, self._stream
        tokens, generation.tokens = generation.tokens, []
        logprobs, generation.logprobs = generation.logprobs, []
        stop_tokens = generation.prompt.stop_tokens
        reason = None
        if not (self._has_stops or logprobs) and stop_tokens.isdisjoint(tokens):
            generation.num_taken += len(tokens)
            text = stream.push_all(tokens)
        else:
            text = ""
            for place, token in enumerate(tokens):
                generation.num_taken += 1
                if token in stop_tokens:
                    reason = "stop"
                    break
                if logprobs:
                    self._unsent.append(TokenLogprobs(token, *logprobs[place], stream.num_taken))
                text += stream.push(token)
                if stream.stopped:
                    reason = "stop"
                    break
        if generation.is_done and not stream.stopped:
            text += stream.finish()
            reason = "stop" if stream.stopped else reason or "length"
        return self._piece(text, reason) if text or reason else None

    def _piece(self, text: str, reason: str | None) -> Piece:
        all_out = reason is not None and not self._stream.stopped
        count = sum(all_out or entry.offset < self._stream.num_released for entry in self._unsent)
        sent, self._unsent = self._unsent[:count], self._unsent[count:]
        return Piece(text, reason, sent)


class Answer:
    """The answer to one request; `client` has the sequences of `group`."""

    def __init__(
        self, chat: bool, model: str, request: Request, client: EngineClient, group: Group, tokenizer: ChatTokenizer
    ) -> None:
        self._chat, self._request, self._client, self._group = chat, request, client, group
        self._tokenizer = tokenizer
        self._choices = [Choice(generation, request.stops, tokenizer) for generation in group.generations]
        kind = "chat.completion" if chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": f"{kind}.chunk" if chat and request.stream else kind,
            "created": int(time.time()),
            "model": model,
        }

    async def whole(self) -> dict[str, Any] | None:
        """The body of an answer that is not streamed; None if the client has left."""
        texts = [Piece("", None, []) for _ in self._choices]
        async for pieces in self._pieces():
            for choice, piece in pieces:
                whole = texts[choice.generation.index]
                whole.text += piece.text
                whole.reason = piece.reason
                whole.logprobs += piece.logprobs
        if not all(text.reason for text in texts):
            return None
        entries = [self._entry(choice, text, "message") for choice, text in zip(self._choices, texts, strict=True)]
        return self._head | {"choices": entries, "usage": self._usage()}

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events, the last one [DONE]; those that are due together come together."""
        # What all events have in common is written once.
        rest = ', "usage": null' if self._request.include_usage else ""
        begin, end = f'data: {json.dumps(self._head)[:-1]}, "choices": [', f"]{rest}}}\n\n"
        try:
            async for pieces in self._pieces():
                entries = [json.dumps(self._entry(choice, piece, "delta")) for choice, piece in pieces]
                yield "".join([f"{begin}{entry}{end}" for entry in entries]).encode()
        except EngineDeadError as error:
            yield event(ApiError(str(error), None, 503, "server_error").body)
            return
        if self._request.include_usage:
            yield event(self._head | {"choices": [], "usage": self._usage()})
        yield b"data: [DONE]\n\n"

    async def _pieces(self) -> AsyncIterator[list[tuple[Choice, Piece]]]:
        """The pieces of all choices as they come, until each has ended or the client has left."""
        missing = len(self._choices)
        async with contextlib.aclosing(self._group.changes()) as changes:
            async for changed in changes:
                pieces = []
                for generation in changed:
                    choice = self._choices[generation.index]
                    if (piece := choice.take()) is not None:
                        pieces.append((choice, piece))
                        if piece.reason:
                            missing -= 1
                            self._client.end(generation)
                if pieces:
                    yield pieces
                if not missing:
                    return

    def _usage(self) -> dict[str, int]:
        prompt, generated = self._request.num_prompt_tokens, sum(g.num_taken for g in self._group.generations)
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}

    def _entry(self, choice: Choice, piece: Piece, name: str) -> dict[str, Any]:
        """One entry of `choices`; `name` is that of a chat's text."""
        logprobs = None
        if choice.generation.prompt.sampling.logprobs:
            write = of_chat if self._chat else of_completion
            logprobs = write(piece.logprobs, self._request.num_top, self._tokenizer)
        entry = {"index": choice.generation.index, "finish_reason": piece.reason, "logprobs": logprobs}
        if not self._chat:
            return entry | {"text": piece.text}
        role = {} if choice.has_begun else {"role": "assistant"}
        choice.has_begun = True
        return entry | {name: role | {"content": piece.text}}


def event(value: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return f"data: {json.dumps(value)}\n\n".encode()
