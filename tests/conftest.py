import gc
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

from tests import cells, long

# xdist's controller comes here before its workers start, so they inherit the folder and share it.
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    _inductor_cache = tempfile.TemporaryDirectory(prefix="flex_inductor-tests-", ignore_cleanup_errors=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = _inductor_cache.name

# Inductor would start processes that compile kernels for a GPU, three seconds each time, and nothing here needs them.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Each new cache folder would have Inductor try the compiler on torch's headers again, six seconds each.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# The compiler takes two thirds of a test of a CPU kernel: it optimizes less, but where a test asks for `optimized`.
QUICK, OPTIMIZED = (str(Path(__file__).parent / "cxx" / name / "g++") for name in ("quick", "optimized"))
if "CXX" not in os.environ and shutil.which("g++") and shutil.which("ld.gold"):
    os.environ["CXX"] = QUICK

# pytest adds its handlers to all loggers that do not propagate: torch would write out every graph for its trace.
torch._logging._internal.trace_log.addHandler = lambda handler: None
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")

_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
torch.set_num_threads(max(1, (os.cpu_count() or 1) // _workers))


LONG = long.listed()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def optimized(monkeypatch):
    """Kernels are compiled as users have them compiled."""
    from torch._inductor import config

    if os.environ.get("CXX") != QUICK:
        yield
        return
    monkeypatch.setenv("CXX", OPTIMIZED)
    with config.patch({"cpp.cxx": (None, OPTIMIZED)}):
        yield


def pytest_itemcollected(item):
    if item.nodeid in LONG:
        item.add_marker("long")


FIRST = {"test_interpreted.py", "test_caches.py", "test_gpu_check.py", "test_memory.py"}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Each of two workers begins with one half of the list: what takes longest comes first in both."""
    first = [item for item in items if item.path.name in FIRST]
    rest = [item for item in items if item.path.name not in FIRST]
    middle = max(0, len(items) // 2 - len(first[::2]))
    items[:] = [*first[::2], *rest[:middle], *first[1::2], *rest[middle:]]


def pytest_collection_finish():
    from flex_inductor.compat import when_imported  # not sooner: emulated_amx.py comes first

    # Dynamo flushes the processor's caches after each compilation, to time guards for its logs.
    when_imported(
        "torch._dynamo.guards", lambda guards: setattr(guards, "profile_guard_manager", lambda *_: 0.0)
    )
    # What is imported stays: the collector need not look at it again. The rest it looks at less often than by default,
    # which took a twelfth of the time: tracers make and drop hundreds of thousands of small objects.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)


def pytest_addoption(parser):
    parser.addoption("--cells", type=Path, help="a file for what tests prove: see tests/cells.py")
    parser.addoption(
        "--card",
        action="store_true",
        help="this machine's card runs what Triton's interpreter and tools/ptx would",
    )


def pytest_configure(config):
    if config.getoption("--card"):
        _run_on_the_card()
    if path := config.getoption("--cells"):
        config.pluginmanager.register(cells.Watching(path, is_worker=hasattr(config, "workerinput")))


def _run_on_the_card():
    from flex_inductor.tools import execute, interpret, on_card
    from flex_inductor.tools.ptx.counts import Count, Counts
    from flex_inductor.tools.ptx.text import parse

    def run_compiled(binary, grid, args, **_):
        """A card does not count: each instruction counts once."""
        on_card.launch(binary, grid, args)
        (kernel,) = parse(binary.asm["ptx"]).kernels.values()
        return Counts(
            kernel, "", 0, 0, 0, [(instruction, Count(1, 1)) for instruction in kernel.instructions]
        )

    execute.ptx.run_compiled = run_compiled
    interpret.compiled, interpret._load = on_card.compiled, on_card.loaded
    interpret.check_environment = interpret.prepare = lambda *_: None
