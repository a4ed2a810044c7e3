from __future__ import annotations

import pytest

from tests.builders.server import Hub, serving


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub on this machine, which huggingface_hub takes for its own."""
    from huggingface_hub import constants

    with serving(Hub(tmp_path / "hub")) as server:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + template)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield server
