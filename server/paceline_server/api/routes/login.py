"""Sign-in of browsers by a link that works once, and the rights of the caller."""

from __future__ import annotations

from datetime import UTC, datetime

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, RedirectResponse, Response

from paceline_server.api import problems, schemas
from paceline_server.api.auth import Operator, Viewer, session_cookie
from paceline_server.api.dependencies import PartsDep
from paceline_server.store.tokens import LINK_NS, SESSION_NS, create_link_code, open_session

router = APIRouter(tags=["login"])
page = APIRouter(include_in_schema=False)


@router.get(
    "/caller", response_model=schemas.CallerModel, responses=problems.responses(401, 403, 503)
)
async def get_caller(caller: Viewer) -> schemas.CallerModel:
    """Return the caller's name and whether it may change anything."""
    return schemas.CallerModel(name=caller.name, can_change="operator" in caller.grants)


@router.post(
    "/login-links",
    status_code=201,
    response_model=schemas.LoginLink,
    responses=problems.responses(401, 403, 503),
)
def create_login_link(parts: PartsDep, caller: Operator) -> schemas.LoginLink:
    """Create a link that signs in one browser, once, with the rights of the caller."""
    now_ns = parts.now_ns()
    with parts.database.write() as session:
        code = create_link_code(session, caller.name, now_ns)
    expires = datetime.fromtimestamp((now_ns + LINK_NS) / 1e9, UTC)
    return schemas.LoginLink(path=f"/login?code={code}", expires_at=expires)


@page.get("/login")
def login(request: Request, parts: PartsDep, code: str = "") -> Response:
    """Open a session: one half of its secret goes into a cookie, the other to the page."""
    with parts.database.write() as session:
        secret = open_session(session, code, parts.now_ns())
    if secret is None:
        return PlainTextResponse(
            "This link was used before or is older than ten minutes. `paceline login` prints a new"
            " one.\n",
            403,
            {"Cache-Control": "no-store"},
        )
    kept, _, sent = secret.partition(".")
    # A fragment stays in the browser: no server, proxy or log sees it.
    response = RedirectResponse(f"/#session={sent}", 303, {"Cache-Control": "no-store"})
    response.set_cookie(
        session_cookie(request),
        kept,
        max_age=SESSION_NS // 10**9,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return response
