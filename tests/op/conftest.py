import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_start():
    """Nothing that an earlier test compiled or drew is left."""
    torch._dynamo.reset()
    torch.manual_seed(0)
