"""Each folder here has tests of one framework, in an environment of its own: make test-integrations."""

from importlib.util import find_spec

NEEDS = {
    "diffusers": "diffusers",
    "litgpt": "litgpt",
    "onnx": "onnx",
    "torchtitan": "torchtitan",
    "training": "peft",
    "vllm": "vllm",
}

collect_ignore = [folder for folder, package in NEEDS.items() if find_spec(package) is None]
