import pytest
import torch

from tests.distributed.group import groups


@pytest.fixture(scope="session")
def group():
    with groups() as found:
        yield found


@pytest.fixture(autouse=True)
def one_thread():
    """The tensors are small: several threads only wait for one another on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
