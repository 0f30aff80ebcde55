"""Inductor's generated Triton kernels as data: their functions and launch parameters, without a device."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class GeneratedKernel:
    """One kernel of a generated module, as its decorator and its source say."""

    fn: Any  # triton's JITFunction, or its interpreter's
    given: dict[str, Any]  # the decorator's arguments
    source: str
    better: list[dict[str, int]] = field(default_factory=list)  # see lowerings/triton/autotuner.py

    @property
    def name(self) -> str:
        return self.fn.__name__

    @property
    def triton_meta(self) -> dict[str, Any]:
        return self.given["triton_meta"]

    @property
    def inductor_meta(self) -> dict[str, Any]:
        return self.given["inductor_meta"]

    @property
    def configs(self) -> list[dict[str, int]]:
        """Constants and launch options, best first; Inductor's own kernels get blocks that hold their sizes."""
        if "configs" in self.given:
            return [dict(config) for config in self.given["configs"]]
        options: dict[str, int] = {
            name: self.given[name] for name in ("num_warps", "num_stages") if name in self.given
        }
        hints = self.given.get("size_hints") or {}
        blocks = {
            name: min(max(hints[name.removesuffix("BLOCK").lower()], 1), 1024)
            for name in self.constexprs
            if name.endswith("BLOCK")
        }
        return [{**blocks, **options}]

    @property
    def constexprs(self) -> list[str]:
        signature = self.triton_meta["signature"]
        return [name for name in self.fn.arg_names if signature.get(name, "constexpr") == "constexpr"]

    def launch(self, config: dict[str, int], args: Sequence[Any]) -> tuple[tuple[int, ...], dict[str, Any]]:
        """The grid of a call that Inductor makes of it, and the kernel's arguments by name."""
        from torch._inductor.runtime.triton_heuristics import GridExpr

        fixed = self.triton_meta.get("constants", {})
        passed = [n for n in self.fn.arg_names if n not in self.constexprs or n in fixed]
        extra = self.inductor_meta.get("extra_launcher_args", [])
        given = dict(zip([*passed, *extra], args, strict=True))
        grid = GridExpr.from_meta(self.inductor_meta, config, mode="python").eval_slow({**given, **config})
        return grid, {name: given[name] for name in passed}


def load(name: str, source: str) -> GeneratedKernel:
    """The kernel `name` of a source that Inductor would give to its `async_compile.triton`."""
    from torch._inductor.codecache import PyCodeCache

    _, path = PyCodeCache.write(source)  # triton reads a kernel's source from its file
    # A decorator of torch's heuristics is kept as what it is given.
    code = re.sub(r"^@triton_heuristics\.\w+\(", "@_given(", source, flags=re.MULTILINE)
    namespace: dict[str, Any] = {
        "__file__": path,
        "__name__": "flex_inductor_generated",
        "_given": lambda **given: lambda fn: GeneratedKernel(fn, given, source),
    }
    exec(compile(code, path, "exec"), namespace)
    return namespace[name]
