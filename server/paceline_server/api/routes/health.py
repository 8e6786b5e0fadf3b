"""For probes and Prometheus; outside /api and without tokens."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client.exposition import choose_encoder

from paceline_server.api.dependencies import PartsDep
from paceline_server.store.database import UNAVAILABLE

router = APIRouter(tags=["health"])


@router.head("/healthz", include_in_schema=False)
@router.get("/healthz", response_class=PlainTextResponse)
async def healthz() -> str:
    """The process answers."""
    return "ok\n"


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz", responses={503: {"description": "Something is missing; the body says it."}})
def readyz(of: PartsDep) -> JSONResponse:
    """The server can do its work."""
    missing = of.unready()
    try:
        of.database.ping()
    except UNAVAILABLE:
        missing.append("database: does not answer")
    return JSONResponse({"ready": not missing, "missing": missing}, 503 if missing else 200)


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics", response_class=PlainTextResponse)
def metrics(of: PartsDep, request: Request) -> Response:
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(of.metrics.registry), media_type=content_type)
