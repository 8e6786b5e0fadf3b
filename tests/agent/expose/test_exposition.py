"""One set of samples in both formats."""

from __future__ import annotations

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as prometheus

from paceline_agent.expose.exposition import render
from paceline_wire.batch import Sample

GPU = {"gpu": "0", "UUID": "GPU-a", "Hostname": "node-0"}
SAMPLES = [
    Sample("DCGM_FI_DEV_GPU_TEMP", GPU, 52.0, 1),
    Sample("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", GPU, 1e9, 1),
    Sample("node_disk_read_bytes_total", {"device": 'a"\\\n'}, 7.0, 1),
    Sample("paceline_driver_info", {"driver_version": "590.48.01"}, 1.0, 1),
    Sample("never_heard_of", {}, float("nan"), 1),
]


def test_both_formats_say_the_same() -> None:
    def sample_set(families: object) -> set[tuple[str, str, str]]:
        return {
            (sample.name, str(sorted(sample.labels.items())), str(sample.value))
            for family in families
            for sample in family.samples
        }

    plain = sample_set(prometheus(render(SAMPLES)))
    assert plain == sample_set(openmetrics(render(SAMPLES, as_openmetrics=True)))
    assert len(plain) == len(SAMPLES)


def test_counters_of_others_that_openmetrics_does_not_take_have_no_type() -> None:
    types = {
        family.name: family.type for family in openmetrics(render(SAMPLES, as_openmetrics=True))
    }
    assert types["DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"] == "unknown"
    assert types["node_disk_read_bytes"] == "counter"
    assert types["DCGM_FI_DEV_GPU_TEMP"] == "gauge"


@pytest.mark.parametrize("label", ["Hostname", "hostname"])
def test_the_hostname_label_is_spelt_as_the_dashboards_have_it(label: str) -> None:
    (sample,) = [
        sample
        for family in prometheus(render(SAMPLES[:1], hostname_label=label))
        for sample in family.samples
    ]
    assert sample.labels == {"gpu": "0", "UUID": "GPU-a", label: "node-0"}


def test_garbage_in_a_label_breaks_no_line() -> None:
    garbage = Sample(
        "node_infiniband_info", {"device": "mlx5_0", "fw": "a\r\x1b[31m\u2028b"}, 1.0, 1
    )
    (family,) = openmetrics(render([garbage], as_openmetrics=True))
    assert family.samples[0].labels["fw"] == "a\ufffd\ufffd[31m\ufffdb"
    assert len(render([garbage]).splitlines()) == 3


def test_labels_that_differ_in_garbage_only_are_one_series() -> None:
    """OpenMetrics allows each series only once."""
    samples = [Sample("node_network_up", {"device": f"e{byte}"}, 1.0, 1) for byte in "\x01\x02"]
    assert render(samples).count("node_network_up{") == 1
