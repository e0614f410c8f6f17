"""`ccl-search mcp`: the Model Context Protocol, so that Claude Code, Codex or another agent runs searches."""

from __future__ import annotations

import argparse
import asyncio
import hmac
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cclsearch.cli.docs import find_pages, read_title
from cclsearch.cli.tool_calls import TOOLS, ToolCalls, make_schema
from cclsearch.core.errors import UserError
from cclsearch.core.version import __version__
from cclsearch.run.catalog import runs_folder

if TYPE_CHECKING:
    from mcp.server import Server
    from mcp.server.auth.provider import AccessToken

TOKEN_NAME, MIN_TOKEN = "CCL_SEARCH_MCP_TOKEN", 16
"""Environment variable of the token, and its least number of characters."""
MAX_BODY = 256 * 1024
"""Bytes of a request over HTTP."""
SKILL = Path(__file__).parent / "skill" / "ccl-search"
SCHEME = "ccl-search://"
ABOUT = (
    "Finds the fastest configuration for LLM training or serving on many accelerators within a small budget of real"
    " runs. `plan` shows what would run; `start` a search, then `wait`, `propose`, `wait`, ... until it ends; `best`."
)


def run(args: argparse.Namespace) -> None:
    """Serve until the client ends, or until Ctrl-C; or write the skill."""
    if args.skill is not None:
        print(f"wrote {shutil.copytree(SKILL, args.skill / SKILL.name, dirs_exist_ok=True)}")
        return
    token = os.environ.pop(TOKEN_NAME, "")  # what is started from here does not get it
    server = make_server(ToolCalls(runs_folder(args.runs).absolute(), args.budget))
    if args.http is None:
        asyncio.run(_serve_stdio(server))
        return
    from mcp.server.auth.settings import AuthSettings

    from cclsearch.ui.app import serve

    app = server.streamable_http_app(
        max_request_body_size=MAX_BODY,
        auth=AuthSettings(issuer_url="http://127.0.0.1", resource_server_url=None),  # type: ignore[arg-type]
        token_verifier=Token(args.token_file, token),
    )
    serve(app, args.http, lambda address: print(f"{address}mcp", flush=True), lifespan="on")


class Token:
    """Accepts requests with one token; a verifier of the SDK."""

    def __init__(self, path: Path | None, token: str) -> None:
        """Take the token of a file, or this one; raises UserError for one that others can read or guess."""
        try:
            if path is not None and (path.stat().st_mode & 0o077 or path.stat().st_uid != os.getuid()):
                raise UserError(f"{str(path)!r}: others can read it, or it is not yours; run `chmod 600 {path}`")
            self._token = (token.encode() if path is None else path.read_bytes()).strip()
        except OSError as error:
            raise UserError(f"--token-file: {error}") from None
        if len(self._token) < MIN_TOKEN:
            how = f"set {TOKEN_NAME}, or write one to a file that only you can read, and name it with --token-file"
            raise UserError(f"--http needs a token of at least {MIN_TOKEN} characters: {how}")

    async def verify_token(self, token: str) -> AccessToken | None:
        """Return the access that the token gives; None if it is another one."""
        from mcp.server.auth.provider import AccessToken

        given = AccessToken(token="", client_id="user", scopes=[])
        return given if hmac.compare_digest(token.encode(), self._token) else None


async def _serve_stdio(server: Server[Any]) -> None:
    from mcp.server.stdio import stdio_server

    async with stdio_server() as (received, sent):
        await server.run(received, sent, server.create_initialization_options())


def make_server(calls: ToolCalls) -> Server[Any]:
    """The server of the SDK: the tools, and what they show as resources, such as ccl-search://trial/RUN/3."""
    from mcp import MCPError, types
    from mcp.server import Server

    def fixed(result: types.Result) -> Any:
        async def answer(context: Any, params: Any) -> types.Result:
            return result

        return answer

    async def call_tool(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        client = context.session.client_params
        by = f"{client.client_info.name} {client.client_info.version}" if client is not None else "agent"
        text, failed = await calls.answer(params.name, params.arguments or {}, by)
        return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=failed)

    async def read_resource(context: Any, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
        name, *values = str(params.uri).removeprefix(SCHEME).split("/")
        text, failed = f"there is no resource {str(params.uri)[:100]!r}", True
        if len(values) == len(places.get(name, ())):
            text, failed = await calls.answer(name, dict(zip(places[name], values, strict=True)), "")
        if failed:
            raise MCPError(code=types.INVALID_PARAMS, message=text)
        return types.ReadResourceResult(contents=[types.TextResourceContents(uri=params.uri, text=text)])

    places = {name: entry["places"] for name, entry in TOOLS.items() if "places" in entry and "starts" not in entry}
    tools = [types.Tool(name=n, description=e["about"], input_schema=make_schema(n)) for n, e in TOOLS.items()]
    pages = [types.Resource(name=n, uri=f"{SCHEME}docs/{n}", title=read_title(p)) for n, p in find_pages().items()]
    uris = {name: "/".join((SCHEME + name, *(f"{{{each}}}" for each in names))) for name, names in places.items()}
    templates = [types.ResourceTemplate(name=name, uri_template=uri) for name, uri in uris.items()]
    return Server(
        "ccl-search",
        version=__version__,
        instructions=ABOUT,
        on_list_tools=fixed(types.ListToolsResult(tools=tools)),
        on_call_tool=call_tool,
        on_list_resources=fixed(types.ListResourcesResult(resources=pages)),
        on_list_resource_templates=fixed(types.ListResourceTemplatesResult(resource_templates=templates)),
        on_read_resource=read_resource,
    )
