import pytest
import torch


@pytest.fixture(autouse=True)
def compiles_afresh():
    torch._dynamo.reset()
