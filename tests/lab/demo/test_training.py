"""The training of the demo ends as a stopped job, not as a failed one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from paceline_cli.client import Client
from paceline_demo.cluster import Cluster
from paceline_demo.training import start_training, stop_jobs
from tests.ports import free_port


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with closing(Cluster(node_count=1, port=free_port())) as cluster:
        cluster.start()
        yield cluster
    cluster.remove_logs()


@pytest.mark.campaign
@pytest.mark.timeout(300)
def test_the_end_of_the_demo_stops_its_job_on_request(cluster: Cluster) -> None:
    options = ("--emulate-kernel-ms", "5,10", "--layers", "2", "--heads", "4")
    job_id = start_training(cluster, (2, 1, 1), "auto", *options)
    with Client(cluster.url) as client:
        while client.get(f"/jobs/{job_id}")["step"] is None:
            time.sleep(0.2)
        stop_jobs(cluster.url)
        assert client.get(f"/jobs/{job_id}")["state"] == "stopped"
        incidents = client.items("/incidents", job=job_id)
        # A busy host stalls ranks now and then, which is information.
        assert [each["summary"] for each in incidents if each["severity"] != "info"] == []


def test_a_server_that_is_gone_does_not_keep_the_demo_from_ending() -> None:
    stop_jobs("http://127.0.0.1:1")
