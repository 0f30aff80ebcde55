import pytest

from tests.distributed.group import groups


@pytest.fixture(scope="session")
def group():
    with groups() as found:
        yield found
