"""After its first call, no objective makes the host wait for the device, forward or backward."""

from __future__ import annotations

import json

import pytest

from tests.builders.processes import run
from tests.objectives.features import METHODS
from tests.objectives.on_device import MISTAKES, follow


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, str]]:
    ended = run(follow)
    assert ended.code == 0, ended.errors
    return json.loads(ended.output.splitlines()[-1])


@pytest.mark.parametrize("method", METHODS)
def test_forward_and_backward_run_on_the_device_without_waiting_for_it(method, found):
    assert found["methods"][method] == ""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_pretended_device_notices_a_host_that_waits(mistake, found):
    assert found["mistakes"][mistake] != ""
