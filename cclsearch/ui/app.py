"""The web application: addresses and their pages, and its server, which closes connections that wait for clients.

Pages are rendered here; only a changed part is sent again."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from cclsearch.card.task import TASKS
from cclsearch.charts.chart import page_data, page_script, palette_css
from cclsearch.core.errors import UserError
from cclsearch.core.metrics import METRICS
from cclsearch.core.secrets.redact import redact
from cclsearch.export.tables import CONTENT_TYPE, render_openmetrics
from cclsearch.record.event import MAX_TRIAL
from cclsearch.run.annotations import add_note, add_tags
from cclsearch.ui.evidence import read_text
from cclsearch.ui.guard import Guard, Permissions, clean
from cclsearch.ui.pages import Pages
from cclsearch.ui.run_index import RunIndex, use_sound
from cclsearch.ui.searches import SearchStarter, read_number, stop_search

STATIC = Path(__file__).parent / "static"
# A look costs a few calls of `stat`.
LOOK_S, LOOK_ALL_S = 0.5, 1.0
"""Seconds between two looks of an open page at one run, or at all runs."""
BEAT_S = 15.0
"""Seconds of silence after which a stream sends a comment, so that it notices a closed page."""
RECENT_S, READ_ALL_S = 24 * 3600.0, 30.0
"""`/metrics` shows runs that run or changed so many seconds ago, and reads each for at most so long."""
MAX_BODY = 64 * 1024

Handler = Callable[[Request], Awaitable[Response]]


def make_app(runs: Path, allowed: Permissions) -> Starlette:
    """The application over a folder of runs."""
    runs = runs.resolve()
    index, starter = RunIndex(runs), SearchStarter(runs)
    pages = Pages(index, starter, allowed)
    routes = [
        Route("/", _page(pages.runs)),
        Route("/runs/{run}", _page(pages.run)),
        Route("/runs/{run}/chart.json", _data(pages.run_chart)),
        Route("/runs/{run}/trials/{trial:int}", _page(pages.trial)),
        Route("/runs/{run}/trials/{trial:int}/metrics", _page(pages.trial_metrics)),
        Route("/runs/{run}/trials/{trial:int}/files/{path:path}", partial(_show_file, index)),
        Route("/compare", _page(pages.compare)),
        Route("/compare/chart.json", _data(pages.compare_charts)),
        Route("/leaderboard", _page(pages.leaderboard)),
        Route("/nights", _page(pages.nights)),
        Route("/nights/{series}", _page(pages.series)),
        Route("/nights/{series}/chart.json", _data(pages.series_charts)),
        Route("/start", _page(pages.start)),
        Route("/events", partial(_stream, index)),
        Route("/metrics", partial(_show_metrics, index)),
        Route("/static/{name}", _show_static),
        Route("/change/{what}", partial(_change, index, starter, allowed), methods=["POST"]),
    ]
    handlers: Any = {UserError: _refuse, HTTPException: _refuse}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.add_middleware(Guard, runs=runs)
    return app


def warm_up() -> None:
    """Load the needs of the first page: plugins with their tasks and metrics, templates, the patterns of secrets."""
    import scipy.stats  # noqa: F401  # how certain a best is

    TASKS.entries()
    METRICS.entries()
    clean("")
    _load_static("ui.css")
    Pages.render_error("")


def _page(render: Callable[[Request], str]) -> Handler:
    """A handler that renders a page in a thread: other pages are answered meanwhile."""

    async def handle(request: Request) -> Response:
        return HTMLResponse(await run_in_threadpool(render, request))

    return handle


def _data(draw: Callable[[Request], tuple[Mapping[str, Any], str]]) -> Handler:
    """Return a handler that answers charts with a note on the points left out."""

    async def handle(request: Request) -> Response:
        charts, note = await run_in_threadpool(draw, request)
        described = {place: {"title": c.title, "summary": c.summary} for place, c in charts.items()}
        return JSONResponse({**page_data(charts), "described": described, "note": note})

    return handle


async def _refuse(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 403 if request.method == "POST" else 404
    text = str(error.detail) if isinstance(error, HTTPException) else str(error)
    text = redact(text)
    if request.method == "POST" or request.url.path.endswith(".json"):
        return JSONResponse({"error": text}, status)
    return HTMLResponse(Pages.render_error(text), status)


async def _show_file(index: RunIndex, request: Request) -> Response:
    def read() -> str:
        view = index.view(request.path_params["run"])
        trial = view.find_trial(request.path_params["trial"])
        return read_text(view.run, trial, request.path_params["path"])

    return PlainTextResponse(await run_in_threadpool(read))


async def _show_metrics(index: RunIndex, request: Request) -> Response:
    """The figures of the runs that changed of late, for a monitoring system on this machine."""

    def render() -> str:
        recent = index.read_recent(RECENT_S, READ_ALL_S)
        return use_sound(recent, lambda runs: render_openmetrics(runs, time.time()))[0]

    return Response(await run_in_threadpool(render), headers={"content-type": CONTENT_TYPE})


@cache
def _load_static(name: str) -> tuple[bytes, str]:
    if name == "charts.js":
        return page_script().encode(), "text/javascript"
    if name == "ui.css":
        return f"{palette_css()}\n{(STATIC / name).read_text('utf-8')}".encode(), "text/css"
    if name in ("ui.js", "theme.js"):
        return (STATIC / name).read_bytes(), "text/javascript"
    raise UserError("there is no such file")


async def _show_static(request: Request) -> Response:
    data, kind = await run_in_threadpool(_load_static, request.path_params["name"])
    return Response(data, media_type=kind, headers={"cache-control": "private, max-age=60"})


async def _stream(index: RunIndex, request: Request) -> Response:
    """A stream of server-sent events: one whenever the run (or, without one, any run) has changed."""
    name = request.query_params.get("run")
    if name is not None:
        await run_in_threadpool(index.find_folder, name)
    return StreamingResponse(_follow(index, name), media_type="text/event-stream")


async def _follow(index: RunIndex, name: str | None) -> AsyncIterator[str]:
    seen, silent_s, look_s = "", 0.0, LOOK_S if name is not None else LOOK_ALL_S
    yield "retry: 2000\n\n"
    while True:
        stamp = await run_in_threadpool(index.stamp_all if name is None else partial(index.stamp, name))
        if name is not None and stamp[-1] is None:
            yield "event: gone\ndata: {}\n\n"
            return
        found = hashlib.sha256(repr(stamp).encode()).hexdigest()[:16]
        if found != seen:
            seen, silent_s = found, 0.0
            yield f"data: {json.dumps({'stamp': found})}\n\n"
        elif silent_s >= BEAT_S:
            silent_s = 0.0
            yield ": still here\n\n"
        await asyncio.sleep(look_s)
        silent_s += look_s


async def _change(index: RunIndex, starter: SearchStarter, allowed: Permissions, request: Request) -> Response:
    """Change something: tags and notes, or a search that starts or stops. Refused unless the request may."""
    what = request.path_params["what"]
    is_note = what in ("tag", "untag", "note")
    may, option = (allowed.notes, "--allow-notes") if is_note else (allowed.start, "--allow-start")
    allowed.check(request, may=may, option=option)
    fields = await _read_fields(request)

    def change() -> str:
        if what == "start":
            return starter.start(fields)
        name = str(fields.get("run", ""))
        folder = index.find_folder(name)
        match what:
            case "tag" | "untag":
                tags = str(fields.get("text", "")).split()
                if not tags:
                    raise UserError("the tag is empty")
                add_tags(folder, tags, remove=what == "untag")
                return "removed" if what == "untag" else "added"
            case "note":
                number = read_number(fields, "trial", 0, 1, MAX_TRIAL) if fields.get("trial") else None
                if number is not None:
                    index.view(name).find_trial(number)
                add_note(folder, str(fields.get("text", "")), number)
                return "added"
            case "stop":
                return stop_search(index.runs, folder)
            case "resume":
                return starter.resume(name)
            case _:
                raise UserError(f"there is no change {what!r}")

    return JSONResponse({"message": await run_in_threadpool(change)})


async def _read_fields(request: Request) -> dict[str, object]:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY:
            raise UserError(f"the request has more than {MAX_BODY:,} bytes")
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise UserError("the request is not a JSON object")
    return fields


HOST = "127.0.0.1"
"""Anybody who reaches the port may read all runs, so nothing outside this machine reaches it."""
IDLE_S = 10.0
"""Seconds in which a client sends a whole request, or reads some of an answer; else its connection is closed."""
END_S = 0.7
"""Seconds after Ctrl-C at which the process ends, even if a thread still reads: it writes nothing."""


class _Connection(H11Protocol):
    _timer: asyncio.TimerHandle | None = None
    _unread = 0
    """Bytes of an answer that the client had not read at the last look."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look_later()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look_later()

    def _look_later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._unread = self.transport.get_write_buffer_size()
        self._timer = self.loop.call_later(IDLE_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        waits = self.cycle is None or self.cycle.response_complete or self.cycle.more_body
        if waits or 0 < self._unread <= self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self._look_later()


class _Server(uvicorn.Server):
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end; a thread that is stuck in a file does not delay it."""
        super().handle_exit(sig, frame)
        last = threading.Timer(END_S, _end_now)
        last.daemon = True
        last.start()


def _end_now() -> None:
    sys.stdout.flush()
    os._exit(0)


def serve_runs(runs: Path, port: int, allowed: Permissions, say: Callable[[str], None]) -> None:
    """Serve a folder of runs; `say` gets the address. Raises UserError if the port cannot be used."""

    def begin(address: str) -> None:
        threading.Thread(target=page_script, daemon=True).start()  # bundled while the first page is read
        warm_up()
        say(address + (f"#token={allowed.token}" if allowed.any else ""))

    serve(make_app(runs, allowed), port, begin)


def serve(app: ASGIApp, port: int, begin: Callable[[str], None], *, lifespan: Literal["on", "off"] = "off") -> None:
    """Serve an application; `begin` gets the address before. Raises UserError if the port cannot be used."""
    with _listen(port) as listener:
        config = uvicorn.Config(
            app, log_level="error", access_log=False, lifespan=lifespan, server_header=False,
            http=_Connection, ws="none", timeout_graceful_shutdown=1, h11_max_incomplete_event_size=32 * 1024,
        )  # fmt: skip
        for number in (signal.SIGINT, signal.SIGTERM):  # a background job of a script would ignore Ctrl-C
            signal.signal(number, signal.default_int_handler)
        begin(f"http://{HOST}:{listener.getsockname()[1]}/")
        with contextlib.suppress(KeyboardInterrupt):
            _Server(config).run(sockets=[listener])


def _listen(port: int) -> socket.socket:
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port))
        listener.listen(128)
    except (OSError, OverflowError) as error:
        listener.close()
        why = getattr(error, "strerror", None) or "it is not a port"
        raise UserError(f"port {port} cannot be used ({why}): choose another (0: any free one)") from None
    return listener
