"""No request, whether ``/openapi.json`` allows it or not, causes a server error: schemathesis sends
a few here, and more with ``EXKV_EXAMPLES=100``."""

from __future__ import annotations

import contextlib
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from running import get, running

from exkv.serve.guard import Limits
from exkv.serve.serving import Serving

schemathesis = pytest.importorskip("schemathesis", reason="pip install 'exkv[test]'")
EXAMPLES = int(os.environ.get("EXKV_EXAMPLES", "1"))
#: Routes that would unload the other tests' model.
CHANGES = ("/v1/model/unload",)
#: Fields that keep answers short, so that there is time for many.
SHORT = {
    "/v1/completions": {"max_tokens": 2, "n": 1},
    "/v1/chat/completions": {"max_tokens": 2, "max_completion_tokens": 2, "n": 1},
    "/v1/responses": {"max_output_tokens": 2},
}
CHECKS = (schemathesis.checks.not_a_server_error,)
QUIETLY = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def tried(address: str, paths: set[str]) -> None:
    """Send valid and invalid requests to all of these paths."""
    schema = schemathesis.openapi.from_url(f"{address}/openapi.json")
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path in paths:
            for mode in (
                schemathesis.GenerationMode.POSITIVE,
                schemathesis.GenerationMode.NEGATIVE,
            ):
                _tried(address, operation, mode)


def _tried(address: str, operation, mode) -> None:
    @QUIETLY
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case):
        if isinstance(case.body, dict) and mode is schemathesis.GenerationMode.POSITIVE:
            case.body |= SHORT.get(operation.path, {})
        case.call_and_validate(base_url=address, checks=CHECKS, timeout=180)

    with contextlib.suppress(Unsatisfiable):  # no request can be invalid
        ask()


def test_no_request_causes_a_server_error(address, serving):
    paths = set(get(f"{address}/openapi.json")[1]["paths"])
    assert len(paths) >= 14
    tried(address, paths - set(CHANGES))


def test_routes_without_a_model_answer_503(address):
    with running(Serving(None, limits=Limits(jobs=2))) as empty:
        for path in ("/v1/models", "/v1/state", "/health"):
            assert get(f"{empty}{path}")[0] == 200
        for path in ("/v1/model", "/v1/plan"):
            status, answer = get(f"{empty}{path}")
            assert (status, answer["error"]["code"]) == (503, "model_not_loaded")
