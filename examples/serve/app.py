"""The HTTP interface: OpenAI's completions and chat, health and metrics."""

import asyncio
import contextlib
import hmac
import json
import time
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from . import metrics
from .answer import Answer
from .client import EngineClient, Group
from .messages import EngineDeadError, FrontSettings, QueueFullError
from .protocol import ApiError, Request, read_request

MAX_BODY = 4 << 20
PAGE = Path(__file__).with_name("chat.html").read_text(encoding="utf-8")
# It is one file and asks this server only.
PAGE_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
RETRY_AFTER = {"Retry-After": "1"}


class EventStream(Response):
    """Server-sent events of one answer."""

    media_type = "text/event-stream"

    def __init__(self, answer: Answer, client: EngineClient, group: Group) -> None:
        super().__init__()
        # Its length is not known.
        del self.headers["content-length"]
        self._answer, self._client, self._group = answer, client, group

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the answer; however that ends, no sequence of it stays in the engine."""
        watch = asyncio.create_task(leave_on_disconnect(receive, self._group))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with contextlib.aclosing(self._answer.events()) as events:
                async for part in events:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            watch.cancel()
            self._client.close(self._group)


async def leave_on_disconnect(receive: Any, group: Group) -> None:
    """Wait until the client goes away, and end its answer."""
    while (await receive())["type"] != "http.disconnect":
        pass
    group.leave()


class Server:
    """Handlers over one model."""

    def __init__(self, client: EngineClient, settings: FrontSettings) -> None:
        self.client, self.settings = client, settings
        self.model, self.tokenizer = settings.model, settings.tokenizer
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
        return Response(status_code=200 if self.client.error is None else 503)

    async def metrics_page(self, _: HttpRequest) -> Response:
        """Prometheus' text."""
        try:
            snapshot = await self.client.metrics()
        except EngineDeadError as error:
            raise ApiError(str(error), None, 503, "server_error") from error
        return Response(metrics.page(snapshot), media_type="text/plain; version=0.0.4")

    async def completions(self, http: HttpRequest) -> Response:
        """Continue prompts."""
        return await self.generate(http, chat=False)

    async def chat(self, http: HttpRequest) -> Response:
        """Answer messages."""
        return await self.generate(http, chat=True)

    def authorise(self, http: HttpRequest) -> None:
        """Refuse a request without the API key, where one is set."""
        given = http.headers.get("authorization", "").encode()
        api_key = self.settings.api_key
        if api_key is not None and not hmac.compare_digest(given, f"Bearer {api_key}".encode()):
            raise ApiError("the API key is missing or wrong", None, 401, "authentication_error")

    def read(self, body: bytearray, *, chat: bool) -> Request:
        """What a body asks for."""
        return read_request(
            read_json(body), chat=chat, model=self.model, tokenizer=self.tokenizer, capacity=self.settings.capacity
        )

    async def generate(self, http: HttpRequest, *, chat: bool) -> Response:
        """Read, submit, answer."""
        self.authorise(http)
        body = await read_body(http)
        # A long text takes seconds to tokenise, in which others are to be answered.
        request = await asyncio.to_thread(self.read, body, chat=chat)
        try:
            group = await self.client.submit(request.prompts)
        except (QueueFullError, EngineDeadError) as error:
            raise ApiError(str(error), None, 503, "server_error") from error
        answer = Answer(chat, self.model, request, self.client, group, self.tokenizer)
        if request.stream:
            return EventStream(answer, self.client, group)
        watch = asyncio.create_task(leave_on_disconnect(http.receive, group))
        try:
            whole = await answer.whole()
            return Response(status_code=499) if whole is None else JSONResponse(whole)
        except EngineDeadError as error:
            raise ApiError(str(error), None, 503, "server_error") from error
        finally:
            watch.cancel()
            self.client.close(group)


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
