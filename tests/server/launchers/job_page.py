"""A job as the server shows it."""

from __future__ import annotations

from typing import Any

import httpx


class JobPage:
    """The API's answers about one job."""

    def __init__(self, client: httpx.Client, name: str) -> None:
        self._client, self._name = client, name

    def job(self) -> dict[str, Any]:
        """Return the job; empty if the server does not know it yet."""
        answer = self._client.get(f"/api/v1/jobs/{self._name}")
        return {} if answer.status_code == 404 else dict(answer.raise_for_status().json())

    def restarts(self) -> list[dict[str, Any]]:
        """Return its restarts, the newest first."""
        items = self._client.get(f"/api/v1/actions?job={self._name}").json()["items"]
        return [item for item in items if item["kind"] == "restart"]

    def trains(self, generation: int) -> bool:
        """Return whether all ranks of this generation have finished a step."""
        job = self.job()
        if (job.get("generation"), job.get("state")) != (generation, "running"):
            return False
        ranks = self._client.get(f"/api/v1/jobs/{self._name}/ranks").json()["items"]
        return all((rank["step"] or 0) >= 1 for rank in ranks)
