"""Health probes and metrics; outside /api. Probes need no token."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client.exposition import choose_encoder

from paceline_server.api import problems
from paceline_server.api.auth import authorized
from paceline_server.api.dependencies import PartsDep
from paceline_server.store.database import UNAVAILABLE, first_line

router = APIRouter(tags=["health"])


@router.head("/healthz", include_in_schema=False)
@router.get("/healthz", response_class=PlainTextResponse)
async def healthz() -> str:
    """Liveness: the process responds."""
    return "ok\n"


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz", responses={503: {"description": "Not ready; `missing` lists the reasons."}})
def readyz(parts: PartsDep) -> JSONResponse:
    """Readiness: the database can be written, the log writer and the workers run."""
    missing = parts.unready()
    try:
        parts.database.try_write()
    except UNAVAILABLE as error:
        missing.append(f"database: cannot be written: {first_line(error)}")
    return JSONResponse({"ready": not missing, "missing": missing}, 503 if missing else 200)


async def _reads_metrics(request: Request, parts: PartsDep) -> None:
    if parts.metrics_need_token:
        await authorized(request, parts, "viewer")


_metrics = [Depends(_reads_metrics)]


@router.head("/metrics", include_in_schema=False, dependencies=_metrics)
@router.get(
    "/metrics",
    response_class=PlainTextResponse,
    dependencies=_metrics,
    responses=problems.responses(401, 403, 503),
)
def metrics(parts: PartsDep, request: Request) -> Response:
    """Return metrics in the Prometheus or OpenMetrics format."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(parts.metrics.registry), media_type=content_type)
