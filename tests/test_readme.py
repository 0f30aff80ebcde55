import re
import runpy
from pathlib import Path

import torch

README = Path(__file__).resolve().parents[1] / "README.md"


def test_example_runs_and_trains(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(example)
    names = runpy.run_path(str(script))
    for name in ("query", "key", "value", "slopes"):
        gradient = names[name].grad
        assert torch.isfinite(gradient).all() and gradient.abs().sum() > 0, name
