"""What tests of vLLM share."""

import os
import tempfile

import pytest

from flex_inductor.integrations import vllm as integration

# vLLM keeps there what it has found about models: it shall look at them as it does for a new user.
_cache = tempfile.TemporaryDirectory()
os.environ["VLLM_CACHE_ROOT"] = _cache.name


@pytest.fixture
def mods():
    """Forgets the mods that a test registers."""
    yield integration.register_mods
    integration._mods.clear()
    os.environ.pop(integration._EXPECTED, None)


@pytest.fixture
def calls(monkeypatch):
    """The queries of each call of this backend's."""
    seen = []
    attend = integration.Repeated.__call__

    def counted(self, query, *args):
        seen.append(query.size(0))
        return attend(self, query, *args)

    monkeypatch.setattr(integration.Repeated, "__call__", counted)
    return seen
