"""The page and the JSON of a transform come from its signature and docstring."""

import json

import pytest

from requant.transforms import REGISTRY
from requant.transforms.pipelines.describe import describe, page

each_transform = pytest.mark.parametrize("name", sorted(REGISTRY))


@each_transform
def test_the_page_says_everything(name: str) -> None:
    transform = REGISTRY[name]
    lines = page(transform).splitlines()
    assert lines[0] == name
    assert transform.doc in page(transform)
    for option in transform.options:
        assert sum(line.startswith(f"  {option}: ") for line in lines) == 1
    assert ("Types and defaults:" in lines) == bool(transform.options)
    for option in transform.options:
        assert any(
            line.strip().startswith(f"{option}: ") or f", {option}: " in line or f"{option}, " in line for line in lines
        )
    assert (lines[-1] == f"Comes after: {', '.join(transform.after)}") == bool(transform.after)


@each_transform
def test_the_json_is_plain(name: str) -> None:
    transform = REGISTRY[name]
    found = json.loads(json.dumps(describe(transform), allow_nan=False))
    assert found["name"] == name
    assert found["summary"].endswith(".")
    assert found["doc"].startswith(found["summary"])
    assert [option["name"] for option in found["options"]] == list(transform.options)
    assert found["after"] == list(transform.after)


def test_a_required_option() -> None:
    assert "  min_max_log_file: str, required" in page(REGISTRY["freeze_min"]).splitlines()
    (option, percentile) = describe(REGISTRY["freeze_min"])["options"]
    assert option == {"name": "min_max_log_file", "type": "str", "required": True, "default": None}
    assert percentile == {"name": "min_percentile", "type": "float", "required": False, "default": 5.0}


def test_defaults_are_shown_as_a_pipeline_writes_them() -> None:
    lines = page(REGISTRY["insert_logging"]).splitlines()
    assert "  op: names, may be repeated, default none" in lines
    assert "  show_op: bool, default false" in lines
    assert "  message: str, default empty" in lines
    assert "  first_n: int, default -1" in lines
    assert "  input_min: float, default none" in page(REGISTRY["quantize_nodes"]).splitlines()
