#!/bin/sh
# On a machine with a card: how fast are the Triton kernels, which configs are best, are the results right?
# Needs torch with CUDA or ROCm, triton, and no install of this project. PYTHON names the interpreter.
# tools/gpu_check.sh --help lists the parts; docs/triton.md says what to look at in which order.
exec "${PYTHON:-python3}" "$(dirname "$0")/gpu_check.py" "$@"
