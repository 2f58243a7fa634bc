from __future__ import annotations

import json

import jsonschema
import pytest

from gpuprof.domain.catalogue import datasets
from gpuprof.domain.map_file import json_schema
from gpuprof.placement.contract import demand, problem
from gpuprof.placement.deploy import to_map
from gpuprof.placement.published.ffd import FirstFitDecreasing

PUBLISHED = json.loads((datasets() / "deployment.schema.json").read_text(encoding="utf-8"))


def test_the_published_schema_is_that_of_the_code() -> None:
    assert json_schema() == PUBLISHED


def test_a_map_obeys_the_published_schema_and_an_edited_one_does_not() -> None:
    given = problem([demand("m")])
    content = json.loads(to_map(given, FirstFitDecreasing().place(given)).to_json())
    validator = jsonschema.Draft202012Validator(PUBLISHED)
    validator.validate(content)
    content["nodes"][0]["gpus"][0]["partitions"][0]["replicas"][0]["sm_share_pct"] = 101
    with pytest.raises(jsonschema.ValidationError):
        validator.validate(content)
