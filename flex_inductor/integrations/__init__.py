"""Other libraries' ways in: a file for each, imported by whoever wants it."""

import warnings

from . import errors

ASK_VLLM = "FLEX_INDUCTOR_VLLM"  # set to 1 in the environment


def check_version(framework: str, version: str, tested: str) -> None:
    if not version.startswith(f"{tested}."):
        warnings.warn(errors.untested(framework, version, tested), stacklevel=3)
