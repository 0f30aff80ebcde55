#!/bin/sh
# On a machine with a card, from the repository's root: are the Triton kernels right, and how fast are they?
# PYTHON names an interpreter that has torch with CUDA or ROCm, triton and pytest.
set -eu
python=${PYTHON:-python3}
$python -m flex_inductor.tools.cli env
$python -m pytest -m gpu tests/lowerings/triton
$python -m flex_inductor.tools.cli bench gpu
