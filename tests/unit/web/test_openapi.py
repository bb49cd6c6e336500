"""The description agrees with itself and with the routes."""

import json
import re
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient

from kici.web.app import ROUTES

Client = TestClient[web.Request, web.Application]


@pytest.fixture
async def description(client: Client) -> dict[str, Any]:
    response = await client.get("/api/v1/openapi.json")
    assert response.content_type == "application/json"
    found: dict[str, Any] = await response.json()
    return found


async def test_every_route_of_the_api_is_described(description: dict[str, Any]) -> None:
    described = {(method.upper(), path) for path, each in description["paths"].items() for method in each}
    assert described == {(route.method, route.path) for route in ROUTES if not route.is_page}


async def test_every_reference_leads_somewhere(description: dict[str, Any]) -> None:
    names = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(description)))
    assert names <= set(description["components"]["schemas"])


async def test_names_of_operations_are_unique(description: dict[str, Any]) -> None:
    names = [operation["operationId"] for each in description["paths"].values() for operation in each.values()]
    assert len(names) == len(set(names))


async def test_permissions_and_parameters_are_told(description: dict[str, Any]) -> None:
    listing = description["paths"]["/api/v1/jobs"]["get"]
    assert listing["x-permission"] == "run.read"
    parameters = {each["name"]: each for each in listing["parameters"]}
    assert set(parameters) == {"status", "runId", "org", "cursor", "limit"}
    assert "queued" in parameters["status"]["schema"]["enum"]
    assert description["paths"]["/health"]["get"]["security"] == []


async def test_bodies_refuse_unknown_keys_in_the_schema_too(description: dict[str, Any]) -> None:
    for each in description["paths"].values():
        for operation in each.values():
            schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            name = schema.get("$ref", "").rpartition("/")[2]
            if name:
                assert description["components"]["schemas"][name]["additionalProperties"] is False, name
