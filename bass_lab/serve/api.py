"""The HTTP API: turns requests into jobs of the engine, and updates of jobs into responses."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bass_core import options
from bass_core.async_session import AsyncSession, Job
from bass_core.exactness.processors import Processor
from bass_core.loading.model_pair import ModelPair
from bass_core.prompts import check_context, token_ids
from bass_lab.serve.answers import Answer
from bass_lab.serve.bodies import ChatBody, CompletionBody, Sampled, StreamOptions, complaint
from bass_lab.serve.counts import Counts
from bass_lab.serve.ends import STOPPED, Ended, Ends, updates
from bass_lab.serve.gate import MOST_BYTES, MOST_NUMBERS, MOST_PARTS, Gate, Refused, line

LONGEST_TOKEN = 256  # characters; a longer text per token of the context is refused before tokenizing
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
BODIES = {"/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody}


@dataclass
class Service:
    """State shared by all requests. name: the model name for clients. on_row_end: called once per row, see `Ends`.
    deadline: seconds until every row ends."""

    pair: ModelPair
    name: str
    engine: AsyncSession
    gate: Gate
    counts: Counts
    on_row_end: Callable[[Ended | None], None]
    deadline: float | None = None

    def __post_init__(self):
        self.began = int(time.time())
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="bass reader")  # tokenizing would block the loop
        self.counts.watch("bass_rows_running", "rows in the batch", lambda: min(self.gate.rows, self.gate.places))
        self.counts.watch("bass_rows_waiting", "rows waiting for a batch slot", lambda: self.gate.waiting)

    @property
    def state(self) -> str:
        if self.engine.error is not None:
            return "dead"
        return "draining" if self.gate.draining else "ok"

    def check_model(self, name: str | None) -> None:
        """Raise Refused for any other model than the served model."""
        if name is not None and name != self.name:
            said = f"model: {name[:100]!r} is not served here; use {self.name!r}"
            raise Refused(404, said, "model", "model_not_found")

    async def answer(self, body: Sampled, request: Request) -> Response:
        """Return the response to a request. Raises Refused."""
        arrived, chat = time.monotonic(), isinstance(body, ChatBody)
        self.check_model(body.model)
        prompts = [[message.plain for message in body.messages]] if chat else _prompts(body.prompt)
        count = len(prompts) * body.n
        wants_logprobs = body.logprobs is not None and body.logprobs is not False
        if chat and body.top_logprobs and not wants_logprobs:
            raise Refused(400, "top_logprobs: this field needs logprobs=true", "top_logprobs")
        if body.stream_options is not None and not body.stream:
            raise Refused(400, "stream_options: this field needs stream=true", "stream_options")
        self.gate.enter(count)
        try:
            loop = asyncio.get_running_loop()
            ids, limits, processors = await loop.run_in_executor(self._reader, self._read, body, prompts)
            seed = secrets.randbits(31) if body.seed is None else body.seed
            rows, ends = self._rows(body, ids, limits, processors, seed, arrived), Ends(count, self.on_row_end)
            try:
                job = self.engine.start(rows, logprobs=wants_logprobs, notify=ends)  # `on_row_end` leaves the gate
            except RuntimeError as error:
                raise Refused(500, STOPPED) from error
        except BaseException:
            self.gate.leave(count)
            raise
        answer = Answer(chat, self.name, self.pair.tokenizer, sum(map(len, ids)), seed, wants_logprobs, body.stop or ())
        if body.stream:
            told = body.stream_options or StreamOptions()
            return EventStream(job, self._chunks(job, ends, answer, chat, told))
        return await self._whole(job, ends, answer, request)

    def _read(self, body: Sampled, prompts: list) -> tuple[list, list[int], list[Processor]]:
        """Return the token ids and maximum new tokens of each prompt, and the request's processors. Runs in a thread of
        its own. Raises Refused."""
        field = "messages" if isinstance(body, ChatBody) else "prompt"
        most = body.max_tokens
        if isinstance(body, ChatBody):
            if None not in (most, body.max_completion_tokens) and most != body.max_completion_tokens:
                raise Refused(400, "max_tokens: differs from max_completion_tokens; give only one", "max_tokens")
            most = body.max_completion_tokens if most is None else most
        places = min(self.pair.contexts.values(), default=None)
        if places is not None and max(map(_characters, prompts)) > places * LONGEST_TOKEN:  # saves minutes of reading
            message = f"{field}: the text is far longer than the context of {places} tokens"
            raise Refused(400, message, field, "context_length_exceeded")
        try:
            options.stop_strings(body.stop or (), self.pair.tokenizer)
        except ValueError as error:
            raise Refused(400, line(str(error)), "stop") from error
        try:
            ids = token_ids(self.pair, prompts)
        except (ValueError, TypeError) as error:
            said = str(error).removeprefix("prompt 0: ") if len(prompts) == 1 else str(error)
            raise Refused(400, f"{field}: {line(said)}", field) from error
        limits = []
        for prompt in ids:
            room = 4096 if places is None else places - len(prompt)
            limits.append(max(room, 0) if most is None else most)
            try:
                check_context(self.pair, len(prompt), max(limits[-1], 1))
            except ValueError as error:
                named = field if room < 1 else "max_tokens"
                said = line(str(error)).replace("max_new_tokens", "max_tokens")
                raise Refused(400, f"{named}: {said}", named, "context_length_exceeded") from error
        return ids, limits, self._processors(body)

    def _processors(self, body: Sampled) -> list[Processor]:
        """Return the processors of a request. Raises Refused for a wrong one. Compiles a grammar as a check."""
        asked, found = self.engine.session.asked, []
        ends = ({} if body.ignore_eos else asked.ends) | dict.fromkeys(body.stop_token_ids or (), "stop")
        for name, make in body.processors.items():
            try:
                found.append(make())
                asked.processors(self.pair, (), ends, None, found[-1:])
            except (ValueError, ImportError) as error:
                raise Refused(400, f"{name}: {line(str(error))}", name) from error
        return found

    def _rows(
        self, body: Sampled, ids: list, limits: list[int], processors: list[Processor], seed: int, arrived: float
    ) -> list:
        """Return the rows of a request, with their arguments of `Session.submit`."""
        sampling = {name: value for name in SAMPLING if (value := getattr(body, name)) is not None}
        waits = [seconds for seconds in (body.timeout, self.deadline) if seconds is not None]
        left = max(0.0, arrived + min(waits) - time.monotonic()) if waits else None
        own = sampling | {"seed": seed, "stop": body.stop or (), "ignore_eos": body.ignore_eos, "deadline": left}
        own |= {"processors": processors, "draft_length": body.draft_length, "top_logprobs": body.likeliest}
        own |= {"stop_token_ids": body.stop_token_ids or ()}
        return [
            (prompt, own | {"sample": index * body.n + sample, "max_new_tokens": limits[index]})
            for index, prompt in enumerate(ids)
            for sample in range(body.n)
        ]

    async def _whole(self, job: Job, ends: Ends, answer: Answer, request: Request) -> Response:
        gone = asyncio.ensure_future(_disconnected(request))
        collected = asyncio.ensure_future(self._collect(job))
        try:
            await asyncio.wait({gone, collected}, return_when=asyncio.FIRST_COMPLETED)
            if not collected.done():
                return Response(status_code=499)  # the client has disconnected
            collected.result()
            return JSONResponse(answer.whole(ends.in_order))
        finally:
            job.cancel()
            for task in (gone, collected):
                task.cancel()

    async def _collect(self, job: Job) -> None:
        async for _ in updates(self.engine, job):
            pass

    async def _chunks(
        self, job: Job, ends: Ends, answer: Answer, chat: bool, told: StreamOptions
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield chunks as rows gain text. An error is the last chunk."""
        begun: set[int] = set()
        generated = 0
        unused = {"usage": None} if told.include_usage else {}
        try:
            async for update in updates(self.engine, job):
                index = update.index
                generated += len(update.tokens)
                usage = {"usage": answer.usage(generated)} if told.continuous_usage_stats else unused
                if chat and index not in begun:
                    yield answer.opening(index) | usage
                begun.add(index)
                ended = None if update.result is None else ends.ended[index]
                chunk = answer.chunk(index, update.tokens, update.logprobs, update.handle.alternatives, ended)
                if chunk is not None:
                    yield chunk | usage
            if told.include_usage:
                yield answer.last(ends.in_order)
        except Refused as refused:
            yield refused.body


class EventStream(StreamingResponse):
    """Server-sent events with a job's chunks. The job ends with the connection."""

    def __init__(self, job: Job, chunks: AsyncIterator[dict[str, Any]]):
        async def events() -> AsyncIterator[str]:
            async for chunk in chunks:
                yield f"data: {json.dumps(chunk, allow_nan=False)}\n\n"
            yield "data: [DONE]\n\n"

        super().__init__(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()


class Entrance:
    """Outermost middleware: checks the caller and the body, counts requests, and reports internal errors."""

    def __init__(self, app: ASGIApp, gate: Gate, counts: Counts):
        self.app, self.gate, self.counts = app, gate, counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = None

        async def watching(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            try:
                headers = Headers(scope=scope)
                self.gate.check_caller(scope["path"], headers)
                if scope["path"] in BODIES and scope["method"] == "POST":
                    _check_kind(headers)
                    receive = await _within_limit(receive)
                await self.app(scope, receive, watching)
            except Refused as refused:
                if status is not None:
                    raise
                await _refusal(refused)(scope, receive, watching)
            except Exception as error:
                print(f"error: a fault in bass serve: {type(error).__name__}: {line(str(error))}", file=sys.stderr)
                if os.environ.get("BASS_DEBUG"):
                    traceback.print_exc()
                if status is None:
                    refused = Refused(500, "internal error; the server's log has the cause")
                    await _refusal(refused)(scope, receive, watching)
        finally:
            known = scope["path"] if scope["path"] in (*BODIES, "/v1/models", "/health", "/metrics") else "other"
            self.counts.requests.labels(known, str(status or 499)).inc()


def make_app(service: Service, allow_origins: Sequence[str] = ()) -> FastAPI:
    """Return the application. The engine must be open. allow_origins: sites whose pages may call it (CORS)."""
    about = {"title": "BASS", "description": "Batched speculative decoding of one pair of models"}
    app = FastAPI(**about, redoc_url=None, redirect_slashes=False)
    app.add_middleware(Entrance, gate=service.gate, counts=service.counts)
    if allow_origins:  # outside Entrance, because a preflight request has no key
        allowed = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"], "expose_headers": ["Retry-After"]}
        app.add_middleware(CORSMiddleware, allow_origins=allow_origins, **allowed)
    app.state.service = service

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continue prompts. Further fields than OpenAI's are listed in docs/SERVING.md."""
        return await service.answer(body, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answer a conversation, formatted by the tokenizer's chat template."""
        return await service.answer(body, request)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the served model."""
        return {"object": "list", "data": [_model(service)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return _model(service)

    @app.get("/health")
    async def health() -> JSONResponse:
        """Return 200 while the server accepts requests, 503 while the server drains or if the engine is dead."""
        state, gate = service.state, service.gate
        told = {"status": state, "model": service.name, "rows": gate.rows, "waiting": gate.waiting}
        return JSONResponse(told, status_code=200 if state == "ok" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return the metrics in Prometheus' text format."""
        return Response(service.counts.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> JSONResponse:
        return _refusal(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return _refusal(Refused(400, *complaint(BODIES[request.url.path], list(error.errors()))))

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> JSONResponse:
        said = {404: "there is no such path", 405: f"the method {request.method} is not allowed for this path"}
        said[400] = "the body must be one JSON object in UTF-8"
        refused = Refused(error.status_code, said.get(error.status_code, str(error.detail)))
        refused.headers |= error.headers or {}
        return _refusal(refused)

    return app


def _refusal(refused: Refused) -> JSONResponse:
    return JSONResponse(refused.body, status_code=refused.status, headers=refused.headers)


def _model(service: Service) -> dict[str, Any]:
    contexts = service.pair.contexts.values()
    own = {"max_model_len": min(contexts)} if contexts else {}
    return {"id": service.name, "object": "model", "created": service.began, "owned_by": "bass", **own}


def _prompts(prompt: Any) -> list:
    """Return the prompts as a list. Raises Refused if there is none."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    if not prompt:
        raise Refused(400, "prompt: the list is empty; give at least one text or token", "prompt")
    return prompt


def _characters(prompt: str | list) -> int:
    """Return the number of characters of a text or conversation; 0 for token ids."""
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(message["content"]) for message in prompt if isinstance(message, dict))


def _check_kind(headers: Headers) -> None:
    """Refuse bodies that are not JSON. A browser may send other content types to this server without a preflight."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refused(415, f"the body must be JSON: send Content-Type: application/json, not {kind[:50]!r}")


async def _within_limit(receive: Receive) -> Receive:
    """Read the whole body, and return a `receive` that replays the body. Raises Refused above the limits."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            break
        body += message.get("body", b"")
        if len(body) > MOST_BYTES:
            raise Refused(413, f"the body is longer than {MOST_BYTES} bytes")
        if not message.get("more_body"):
            _check_parts(bytes(body))
            message = {"type": "http.request", "body": bytes(body), "more_body": False}
            break
    first = [message]

    async def again() -> Message:
        return first.pop() if first else await receive()

    return again


def _check_parts(body: bytes) -> None:
    """Raise Refused for a body with too many parts, because parsing and validation block the event loop."""
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    parts, numbers = plain.count(b'"') // 2, 0
    if parts <= MOST_PARTS:
        signs = b"".join(plain.split(b'"')[::2])  # without strings
        parts, numbers = parts + signs.count(b"[") + signs.count(b"{"), signs.count(b",")
    if parts > MOST_PARTS or numbers > MOST_NUMBERS:
        few = f"send at most {MOST_PARTS} strings, lists and objects, and {MOST_NUMBERS} numbers"
        raise Refused(413, f"the body has too many parts: {few}")


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
