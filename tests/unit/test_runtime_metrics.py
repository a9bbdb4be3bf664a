"""What is read of the metrics of servers: three numbers, by whatever names, with whatever labels."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from gpuledger.adapters.runtimes.metrics import MetricsMapping, count, ratio_bp
from gpuledger.domain.ports import RuntimeFigures

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a b}\\"{c"} 2.0
vllm:num_requests_running{engine="1",model_name="a b}\\"{c"} 1.0
vllm:num_requests_waiting{engine="0",model_name="x"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="x"} 0.125
vllm:kv_cache_usage_perc{engine="1",model_name="x"} 0.28
"""
SGLANG = """\
sglang:num_running_reqs{model_name="m",tp_rank="0"} 3
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 1 1796000000000
sglang:token_usage{model_name="m",tp_rank="0"} 0.5
vllm:num_requests_running 7
vllm:kv_cache_usage_perc 0.9
"""


@pytest.mark.parametrize(
    ("page", "value"),
    [
        ("a 2\n", 2),
        ("# HELP a 7\n# TYPE a gauge\na 2.0\n", 2),
        ("a 2e1 1796000000000\n", 20),
        ("a\t2 \r\n", 2),
        ('a{x="1"} 1\na{x="2"} 2\n', 3),
        ('a{x="} 9\\" a 9",y="{"} 1\n', 1),
        ("a{} 1", 1),
        ("a 1.9\n", 1),
        ("aa 1\nb_a 1\nxa 1\n", None),
        ("a NaN\n", None),
        ("a +Inf\n", None),
        ("a -1\n", None),
        ("a 1e999999999\n", None),
        ("a one\n", None),
        ("a\n1\n", None),
        ('a{x="1} 1\n', None),
        # One that is no number makes the sum none: half of a figure is a wrong one.
        ('a{x="1"} 1\na{x="2"} NaN\n', None),
        ("", None),
    ],
)
def test_a_count_is_the_sum_over_its_labels(page: str, value: int | None) -> None:
    assert count(page, ("a",)) == value


@pytest.mark.parametrize(
    ("page", "value"),
    [
        ("a 0\n", 0),
        ("a 1\n", 10_000),
        ("a 0.28\n", 2800),
        ("a 0.00001\n", 1),
        ("a 1e-5\n", 1),
        ('a{x="1"} 0.1\na{x="2"} 0.9\n', 9000),
        ("a 1.5\n", None),
        ("a NaN\n", None),
    ],
)
def test_a_ratio_is_that_of_the_fullest(page: str, value: int | None) -> None:
    assert ratio_bp(page, ("a",)) == value


@pytest.mark.parametrize(
    ("mapping", "page", "figures"),
    [
        pytest.param({}, VLLM, RuntimeFigures(3, 4, 2800), id="empty: vLLM's names"),
        pytest.param({}, "vllm:gpu_cache_usage_perc 0.5\n", RuntimeFigures(None, None, 5000), id="an older vLLM"),
        pytest.param({"path": "/m"}, VLLM, RuntimeFigures(3, 4, 2800), id="a path names nothing"),
        pytest.param({"running": "sglang:num_running_reqs"}, SGLANG, RuntimeFigures(3), id="what is blank stays blank"),
        pytest.param(
            {
                "running": "sglang:num_running_reqs",
                "waiting": "sglang:num_queue_reqs",
                "cache_use": "sglang:token_usage",
            },
            SGLANG,
            RuntimeFigures(3, 1, 5000),
            id="all of its own",
        ),
        pytest.param({"waiting": "sglang:num_queue_reqs"}, SGLANG, RuntimeFigures(7, 1, 9000), id="waiting alone"),
        pytest.param({"running": "absent"}, VLLM, RuntimeFigures(None), id="a name that is not there"),
        pytest.param({}, "", RuntimeFigures(None), id="nothing"),
    ],
)
def test_a_mapping_is_complete_when_it_names_what_runs(
    mapping: dict[str, str], page: str, figures: RuntimeFigures
) -> None:
    assert MetricsMapping.model_validate(mapping).figures(page) == figures


@pytest.mark.parametrize("mapping", [{"running": "a b"}, {"running": ""}, {"path": "metrics"}, {"path": "/a b"}])
def test_what_is_no_name_is_refused(mapping: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="should match pattern"):
        MetricsMapping.model_validate(mapping)
