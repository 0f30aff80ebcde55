import os
import tempfile

import pytest
import torch

# xdist's controller comes here before its workers start, so they inherit the folder and share it.
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    _inductor_cache = tempfile.TemporaryDirectory(prefix="flex_inductor-tests-", ignore_cleanup_errors=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = _inductor_cache.name

# Nothing here compiles kernels for a GPU that Inductor would use, so nobody waits for its processes to start.
os.environ.setdefault("TORCH_WARM_POOL", "0")
# Each new cache folder would have Inductor try the compiler on torch's headers again, six seconds each.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
torch.set_num_threads(max(1, (os.cpu_count() or 1) // _workers))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def pytest_collection_modifyitems(items):
    """What takes longest begins first: the workers end together."""
    items.sort(key=lambda item: item.path.name != "test_interpreted.py")
