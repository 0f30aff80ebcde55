"""torchtitan's Trainer with its Llama 3 debug model on two CPU processes, and random documents.

    python -m tests.integrations.torchtitan.debug

compares the time of its steps with those of torchtitan's scaled_dot_product_attention.
"""

import os
import sys
import tempfile
import time
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist

# torchtitan asks once, when it is imported, and takes a machine without a GPU for one with CUDA.
torch._utils._get_available_device_type = lambda: "cpu"
# What it asks of every device.
torch.cpu.get_device_name = lambda *_: "cpu"
torch.cpu.get_device_properties = lambda *_: SimpleNamespace(total_memory=2**34)
torch.cpu.memory_stats = lambda *_: {}
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None

from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.attention.flex_attention import create_mask  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.distributed import utils as titan_utils  # noqa: E402
from torchtitan.distributed.parallel_dims import ParallelDims  # noqa: E402
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.protocols.model import ModelConfigConverter  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from flex_inductor import decisions  # noqa: E402
from flex_inductor.integrations.torchtitan import FlexInductorConverter  # noqa: E402

titan_utils.set_pg_timeouts = lambda **_: None  # its barrier names a CUDA device
_meshes = {}  # by their settings: DTensor takes those that are equal for one another, and FSDP refuses that


def _shared_meshes(self):
    settings = self.config.parallelism
    return _meshes.setdefault(repr(settings), ParallelDims.from_config(settings, dist.get_world_size()))


Trainer.init_distributed = _shared_meshes


class Tokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **_):
        super().__init__()

    def encode(self, *_):
        raise NotImplementedError

    decode = get_vocab_size = encode


class Documents(BaseDataLoader):
    """Rows of `documents` documents each, of any lengths."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        documents: int = 3

    def __init__(self, config, *, dp_rank, seq_len, local_batch_size, **_):
        self.documents, self.shape = config.documents, (local_batch_size, seq_len)
        self.generator = torch.Generator().manual_seed(dp_rank)

    def __iter__(self):
        batch, length = self.shape
        while True:
            tokens = torch.randint(0, 64, (batch, length + 1), generator=self.generator)
            positions = torch.arange(length).repeat(batch, 1)
            for row in positions:
                for at in torch.randint(1, length, (self.documents - 1,), generator=self.generator):
                    row[at:] = torch.arange(length - at)
            yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:].clone()

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class SdpaConverter(ModelConfigConverter):
    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        pass

    def __init__(self, config):
        pass

    def convert(self, model_config):
        for layer in model_config.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
        return model_config


def dense(q, k, v, *, block_mask, scale, enable_gqa, **_):
    """For torch's flex_attention, which has no backward on a CPU."""
    mask = create_mask(block_mask.mask_mod, q.size(0), 1, q.size(2), k.size(2), q.device)
    out = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)
    return out, SimpleNamespace(lse=None)


def trainer(
    group, attention, settings, documents=3, checkpointing=None, layers=2, cp_method="auto", **training
):
    """A Trainer in this process, one of `group`. `settings` is of names with dots."""
    os.environ.update(RANK=str(group.rank()), LOCAL_RANK=str(group.rank()), WORLD_SIZE=str(group.size()))
    torch._dynamo.reset()
    ours = FlexInductorConverter.Config(cp_method=cp_method)
    converters = {"ours": [ours], "dense": None, "sdpa": [SdpaConverter.Config()]}
    FlexAttention._compiled_flex_attn = staticmethod(dense)
    config = llama3_debugmodel()
    config.model_spec = model_registry("debugmodel", converters=converters[attention])
    del config.model_spec.model.layers[layers:]
    for layer in config.model_spec.model.layers:
        if attention != "sdpa":
            layer.attention.inner_attention.block_size = 32
    config.tokenizer, config.dataloader = Tokenizer.Config(), Documents.Config(documents=documents)
    config.validator.enable = False
    config.activation_checkpoint = checkpointing
    config.debug.seed = 1
    config.dump_folder = tempfile.gettempdir()
    small = {"local_batch_size": 2, "seq_len": 256, "steps": 20, "mixed_precision_param": "float32"}
    for name, value in {**small, "disable_cuda_graphs": True, **training}.items():
        setattr(config.training, name, value)
    for path, value in settings.items():
        part, name = path.split(".")
        setattr(getattr(config, part), name, value)
    made = Trainer(config)
    for module in made.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    made.losses = []
    made.metrics_processor.log = lambda step, loss, *_, **__: made.losses.append(loss)
    return made


def losses(group, attention, settings, **more):
    """Of every step, and which routes served how many compiled calls."""
    decisions(clear=True)
    made = trainer(group, attention, settings, **more)
    made.train()
    made.close()
    return made.losses, [decision.chosen for decision in decisions()]


def step_times(group, length, steps=8):
    """Seconds of steps, and of their processor, by ours and by torchtitan's own, in turn."""
    settings = {"parallelism.spmd_backend": "full_dtensor"}
    made = {
        name: trainer(group, name, settings, documents=1, layers=6, seq_len=length)
        for name in ("sdpa", "ours")
    }
    data = {name: made[name].batch_generator(made[name].dataloader) for name in made}
    found = {name: [] for name in made}
    for step in range(steps + 2):
        for name, each in made.items():
            each.step += 1
            begin = time.perf_counter(), time.process_time()
            each.train_step(data[name])
            if step >= 2:
                found[name].append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
    return found


if __name__ == "__main__":
    from statistics import median

    from tests.distributed.group import groups
    from tests.integrations.torchtitan import debug

    with groups() as group:
        for length in map(int, sys.argv[1:] or (256, 1024)):
            found, _ = group.run(debug.step_times, length, ranks=2)
            for n, clock in enumerate(("elapsed", "processor")):
                own, ours = (median(times[n] for times in found[name]) for name in ("sdpa", "ours"))
                print(
                    f"{length} tokens, {clock}: torchtitan's {own:.3f} s, ours {ours:.3f} s, {own / ours:.2f}x"
                )
