"""All routes: a resource is one file and one line here."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import anyio
from fastapi import APIRouter, FastAPI
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline_server.api import problems, schemas
from paceline_server.api.auth import TokenVerifier
from paceline_server.api.limit import BodyLimit
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
    nodes,
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
    actions,
    audit,
    events,
)
_DECODERS = 4
_AS_IT_IS = ("/events", "/commands", "/trace")


def build(static_directory: Path | None) -> FastAPI:
    """The application without its parts: `app.state.parts` is for the composition root."""
    app = FastAPI(
        title="Paceline",
        version=importlib.metadata.version("paceline"),
        description="Which rank slows the job, why, and what is done about it.",
        openapi_url="/openapi.json",
        docs_url=None,  # its pages would load their scripts from elsewhere
        redoc_url=None,
        responses=problems.responses(422),
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.guard = TokenVerifier()
    app.state.decoders = anyio.CapacityLimiter(_DECODERS)
    app.add_middleware(Compressed, minimum_size=4096, compresslevel=1)
    app.add_middleware(BodyLimit)
    app.add_middleware(ingest.Ingest)  # before the limit: batches have their own
    problems.install(app)
    v1 = APIRouter(prefix="/api/v1")
    for resource in _RESOURCES:
        v1.include_router(resource.router)
    app.include_router(v1)
    app.include_router(health.router)
    _describe_problems(app)
    if static_directory is not None and static_directory.is_dir():
        # Not mounted: what is mounted at / would take each request that a route nearly answers.
        app.router.default = Pages(directory=static_directory, html=True)
    return app


class Compressed(GZipMiddleware):
    """The page of a thousand ranks reads 150 kB a second; compressed, a fifth of that.

    Streams go through as they are, for what they say must not wait until enough has been said,
    and so does Parquet, which is compressed already.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        as_it_is = scope["type"] == "http" and scope["path"].endswith(_AS_IT_IS)
        await (self.app if as_it_is else super().__call__)(scope, receive, send)


class Pages(StaticFiles):
    """The web's files; a path that is none of them is a view of the one page."""

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
        # Asset names carry a hash of their content; the page itself must not be kept.
        kept = "max-age=31536000, immutable" if path.startswith("assets/") else "no-cache"
        response.headers["Cache-Control"] = kept
        return response


def _describe_problems(app: FastAPI) -> None:
    """Add the problem's schema, which no route returns as its model."""
    generate = app.openapi

    def openapi() -> dict[str, object]:
        document = generate()
        known = document["components"]["schemas"]
        known["Problem"] = schemas.Problem.model_json_schema()
        return document

    app.openapi = openapi  # type: ignore[method-assign]
