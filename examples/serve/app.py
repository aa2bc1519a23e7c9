"""The HTTP interface: OpenAI's completions and chat, health and metrics."""

import asyncio
import contextlib
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from llama.engine import Token
from llama.tokenizer import ChatTokenizer

from .logprobs import TokenLogprobs, of_chat, of_completion
from .metrics import Metrics
from .protocol import ApiError, Request, read_request
from .service import EngineDeadError, Generation, QueueFullError, Service
from .text import TextStream

MAX_BODY = 4 << 20
PAGE = Path(__file__).with_name("chat.html").read_text(encoding="utf-8")
# It is one file and asks this server only.
PAGE_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
RETRY_AFTER = {"Retry-After": "1"}
DISCONNECT_POLL = 0.2


class EventStream(StreamingResponse):
    """Server-sent events; closes the generations even if the client leaves before the first event."""

    def __init__(self, content: AsyncIterator[str], service: Service, generations: list[Generation]) -> None:
        super().__init__(content, media_type="text/event-stream")
        self._service, self._generations = service, generations

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the answer."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            for generation in self._generations:
                self._service.close(generation)


@dataclass
class Piece:
    """Newly certain text of one choice; `reason` with the last."""

    index: int
    text: str
    reason: str | None
    logprobs: list[TokenLogprobs]


async def pieces(
    index: int, generation: Generation, stops: list[str], tokenizer: ChatTokenizer
) -> AsyncIterator[Piece]:
    """The text of one choice as it is generated; what arrived together comes out together."""
    stream = TextStream(tokenizer, stops)
    unsent: list[TokenLogprobs] = []  # of tokens whose text has not come out

    def piece(text: str, reason: str | None) -> Piece:
        all_out = reason is not None and not stream.stopped
        count = sum(all_out or entry.offset < stream.num_released for entry in unsent)
        sent, unsent[:] = unsent[:count], unsent[count:]
        return Piece(index, text, reason, sent)

    while True:
        text, reason = "", None
        items = await generation.take()
        if not stops and all(type(item) is Token and item.logprob is None for item in items):
            tokens = [item.id for item in items]
            if generation.prompt.stop_tokens.isdisjoint(tokens):
                generation.num_taken += len(tokens)
                text, items = stream.push_all(tokens), []
        for item in items:
            if isinstance(item, Exception):
                raise item
            if item is None:
                text += stream.finish()
                reason = "stop" if stream.stopped else reason or "length"
                break
            generation.num_taken += 1
            if item.id in generation.prompt.stop_tokens:
                reason = "stop"
                continue
            if item.logprob is not None:
                unsent.append(TokenLogprobs(item, stream.num_taken))
            text += stream.push(item.id)
            if stream.stopped:
                reason = "stop"
                break
        if text or reason:
            yield piece(text, reason)
        if reason:
            return


async def merged(
    service: Service, generations: list[Generation], stops: list[str], tokenizer: ChatTokenizer
) -> AsyncIterator[Piece]:
    """The pieces of all choices as they come; closes the generations however it ends."""
    arrived: asyncio.Queue = asyncio.Queue()

    async def forward(index: int, generation: Generation) -> None:
        try:
            async for piece in pieces(index, generation, stops, tokenizer):
                arrived.put_nowait(piece)
        except EngineDeadError as error:
            arrived.put_nowait(error)
        finally:
            service.close(generation)

    tasks = [asyncio.create_task(forward(i, g)) for i, g in enumerate(generations)]
    try:
        missing = len(tasks)
        while missing:
            piece = await arrived.get()
            if isinstance(piece, Exception):
                raise piece
            missing -= piece.reason is not None
            yield piece
    finally:
        for task, generation in zip(tasks, generations, strict=True):
            task.cancel()
            service.close(generation)  # a task that never ran has not closed it


class Server:
    """Handlers over one model."""

    def __init__(
        self, service: Service, tokenizer: ChatTokenizer, metrics: Metrics, model: str, api_key: str | None
    ) -> None:
        self.service, self.tokenizer, self.metrics, self.model = service, tokenizer, metrics, model
        self.api_key = api_key
        self.created = int(time.time())

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/", self.page),
            Route("/v1/models", self.models),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/health", self.health),
            Route("/metrics", self.metrics_page),
        ]
        return Starlette(routes=routes, exception_handlers={ApiError: api_error, HTTPException: http_error})

    async def page(self, _: HttpRequest) -> Response:
        """A page to chat with."""
        return Response(PAGE, media_type="text/html", headers={"Content-Security-Policy": PAGE_POLICY})

    async def models(self, http: HttpRequest) -> Response:
        """The one model."""
        self.authorise(http)
        entry = {"id": self.model, "object": "model", "created": self.created, "owned_by": "xla-attention"}
        return JSONResponse({"object": "list", "data": [entry]})

    async def health(self, _: HttpRequest) -> Response:
        """200 while the engine lives."""
        return Response(status_code=200 if self.service.error is None else 503)

    async def metrics_page(self, _: HttpRequest) -> Response:
        """Prometheus' text."""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def completions(self, http: HttpRequest) -> Response:
        """Continue prompts."""
        return await self.generate(http, chat=False)

    async def chat(self, http: HttpRequest) -> Response:
        """Answer messages."""
        return await self.generate(http, chat=True)

    def authorise(self, http: HttpRequest) -> None:
        """Refuse a request without the API key, where one is set."""
        given = http.headers.get("authorization", "").encode()
        if self.api_key is not None and not hmac.compare_digest(given, f"Bearer {self.api_key}".encode()):
            raise ApiError("the API key is missing or wrong", None, 401, "authentication_error")

    def read(self, body: bytearray, *, chat: bool) -> Request:
        """What a body asks for."""
        return read_request(
            read_json(body), chat=chat, model=self.model, tokenizer=self.tokenizer, capacity=self.service.capacity
        )

    async def generate(self, http: HttpRequest, *, chat: bool) -> Response:
        """Read, submit, answer."""
        self.authorise(http)
        body = await read_body(http)
        # A long text takes seconds to tokenise, in which others are to be answered.
        request = await asyncio.to_thread(self.read, body, chat=chat)
        try:
            generations = self.service.submit(request.prompts)
        except (QueueFullError, EngineDeadError) as error:
            raise ApiError(str(error), None, 503, "server_error") from error
        source = merged(self.service, generations, request.stops, self.tokenizer)
        answer = Answer(chat, self.model, request, generations, self.tokenizer)
        if request.stream:
            return EventStream(answer.events(source), self.service, generations)
        work = asyncio.create_task(answer.whole(source))
        try:
            # Starlette does not cancel a plain handler when the client goes away.
            while not (await asyncio.wait({work}, timeout=DISCONNECT_POLL))[0]:
                if await http.is_disconnected():
                    return Response(status_code=499)
            return JSONResponse(work.result())
        except EngineDeadError as error:
            raise ApiError(str(error), None, 503, "server_error") from error
        finally:
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError, EngineDeadError):
                await work
            for generation in generations:
                self.service.close(generation)


class Answer:
    """Writes one answer, whole or as events."""

    def __init__(
        self, chat: bool, model: str, request: Request, generations: list[Generation], tokenizer: ChatTokenizer
    ) -> None:
        self.chat, self.request, self.generations, self.tokenizer = chat, request, generations, tokenizer
        kind = "chat.completion" if chat else "text_completion"
        self.head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": f"{kind}.chunk" if chat and request.stream else kind,
            "created": int(time.time()),
            "model": model,
        }

    def usage(self) -> dict[str, int]:
        """Counts of tokens."""
        prompt, generated = self.request.num_prompt_tokens, sum(g.num_taken for g in self.generations)
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}

    def choice(self, piece: Piece, *, delta: bool, first: bool = True) -> dict[str, Any]:
        """One entry of `choices`."""
        logprobs = None
        if self.request.prompts[piece.index].sampling.logprobs:
            logprobs = (of_chat if self.chat else of_completion)(piece.logprobs, self.request.num_top, self.tokenizer)
        entry = {"index": piece.index, "finish_reason": piece.reason, "logprobs": logprobs}
        if not self.chat:
            return entry | {"text": piece.text}
        message = ({"role": "assistant"} if first else {}) | {"content": piece.text}
        return entry | {"delta" if delta else "message": message}

    async def whole(self, source: AsyncIterator[Piece]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choices = [Piece(index, "", None, []) for index in range(len(self.generations))]
        async with contextlib.aclosing(source):
            async for piece in source:
                choices[piece.index].text += piece.text
                choices[piece.index].reason = piece.reason
                choices[piece.index].logprobs += piece.logprobs
        return self.head | {"choices": [self.choice(p, delta=False) for p in choices], "usage": self.usage()}

    async def events(self, source: AsyncIterator[Piece]) -> AsyncIterator[str]:
        """Server-sent events, the last one [DONE]."""
        begun: set[int] = set()
        rest = {"usage": None} if self.request.include_usage else {}
        try:
            async with contextlib.aclosing(source):
                async for piece in source:
                    choice = self.choice(piece, delta=True, first=piece.index not in begun)
                    begun.add(piece.index)
                    yield event(self.head | {"choices": [choice]} | rest)
        except EngineDeadError as error:
            yield event(ApiError(str(error), None, 503, "server_error").body)
            return
        if self.request.include_usage:
            yield event(self.head | {"choices": [], "usage": self.usage()})
        yield "data: [DONE]\n\n"


def event(value: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(value)}\n\n"


async def read_body(http: HttpRequest) -> bytearray:
    """The body, at most `MAX_BODY` bytes of it."""
    if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError("the content type is not application/json", None, 415)
    body = bytearray()
    async for part in http.stream():
        body += part
        if len(body) > MAX_BODY:
            raise ApiError(f"the body has more than {MAX_BODY} bytes", None, 413)
    return body


def read_json(body: bytearray) -> Any:
    """The body as JSON."""
    try:
        value = json.loads(body)
        json.dumps(value, ensure_ascii=False).encode()  # refuses lone surrogates, which no tokenizer takes
        return value
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not valid JSON: {error}") from error


async def api_error(_: HttpRequest, error: Exception) -> Response:
    """An `ApiError` as an answer."""
    return JSONResponse(error.body, error.status, RETRY_AFTER if error.status == 503 else None)


async def http_error(_: HttpRequest, error: Exception) -> Response:
    """Unknown paths and methods in OpenAI's form."""
    return JSONResponse(ApiError(error.detail).body, error.status_code, error.headers)
