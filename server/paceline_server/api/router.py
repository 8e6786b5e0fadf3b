"""The ASGI application. A resource is one module in `routes` and one line here."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection
from pathlib import Path
from typing import Any

import anyio
from fastapi import FastAPI
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline_server.api import problems, schemas
from paceline_server.api.auth import TokenVerifier
from paceline_server.api.browser import BrowserGuard
from paceline_server.api.limit import BodyLimit
from paceline_server.api.node_keys import NodeKeyVerifier
from paceline_server.api.routes import (
    actions,
    agents,
    audit,
    events,
    evidence,
    health,
    incidents,
    ingest,
    jobs,
    login,
    nodes,
    policies,
    recoveries,
    trace,
    what_if,
)

_RESOURCES = (
    ingest,
    agents,
    jobs,
    trace,
    what_if,
    evidence,
    nodes,
    incidents,
    recoveries,
    actions,
    audit,
    policies,
    events,
    login,
)
_DECODERS = 4
_UNCOMPRESSED = ("/events", "/commands", "/trace")


def build(
    static_directory: Path | None, host_names: Collection[str] = (), own_site: str = ""
) -> FastAPI:
    """Build the application. The composition root sets `app.state.parts`.

    `host_names`: names of this server, besides those of loopback. `own_site`: see `BrowserGuard`.
    """
    app = FastAPI(
        title="Paceline",
        version=importlib.metadata.version("paceline"),
        description="Diagnosis and repair of distributed training jobs.",
        openapi_url="/openapi.json",
        docs_url=None,  # the default pages load scripts from a CDN
        redoc_url=None,
        responses=problems.responses(422),
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.token_verifier = TokenVerifier()
    app.state.node_key_verifier = NodeKeyVerifier()
    app.state.decoders = anyio.CapacityLimiter(_DECODERS)
    app.add_middleware(Compressed, minimum_size=4096, compresslevel=1)
    app.add_middleware(BodyLimit)
    app.add_middleware(ingest.Ingest)  # before BodyLimit: batches have their own limit
    app.add_middleware(BrowserGuard, host_names=host_names, own_site=own_site)
    problems.install(app)
    for resource in _RESOURCES:
        app.include_router(resource.router, prefix="/api/v1")
    app.include_router(health.router)
    app.include_router(login.page)
    _complete_description(app)
    if static_directory is not None and static_directory.is_dir():
        # Not mounted: a mount at / would also match requests that should get 405 or a redirect.
        app.router.default = Pages(directory=static_directory, html=True)
    return app


class Compressed(GZipMiddleware):
    """Compresses responses: the page of a job with 1,000 ranks reads 150 kB/s, or a fifth of that
    when compressed.

    Streams are not compressed, because buffering would delay their events; neither is Parquet,
    which is already compressed.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_uncompressed = scope["type"] == "http" and scope["path"].endswith(_UNCOMPRESSED)
        await (self.app if is_uncompressed else super().__call__)(scope, receive, send)


class Pages(StaticFiles):
    """The dashboard's files. Any other path is a view of the single-page application."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        if path.startswith("api/"):
            raise HTTPException(404)
        try:
            response = await super().get_response(path, scope)
        except HTTPException as error:
            is_file = path.startswith("assets/") or ("/" not in path and "." in path)
            if error.status_code != 404 or is_file:
                raise
            response = await super().get_response("index.html", scope)
        # Asset names contain a hash of their content; index.html must be revalidated.
        cache_control = "max-age=31536000, immutable" if path.startswith("assets/") else "no-cache"
        response.headers["Cache-Control"] = cache_control
        return response


def _complete_description(app: FastAPI) -> None:
    """Add to the OpenAPI document the parts that many routes share."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            document["components"]["schemas"]["Problem"] = schemas.Problem.model_json_schema()
            for path in document["paths"].values():
                for method, operation in path.items():
                    _complete_operation(method, operation)
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _complete_operation(method: str, operation: dict[str, Any]) -> None:
    has_body = "requestBody" in operation
    has_cursor = any(each["name"] == "cursor" for each in operation.get("parameters", ()))
    # A cursor or a body that cannot be decoded; a body that is too large.
    more = [400, 413] if has_body else [400] if has_cursor else []
    for status, response in problems.responses(*more).items():
        operation["responses"].setdefault(str(status), response)
    if method == "get" and "security" in operation and "agents" not in operation["tags"]:
        operation["security"].append({})  # anyone may read on loopback, see `auth`
