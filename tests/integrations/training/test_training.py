"""What people train with around transformers: peft, Trainer and accelerate give what they give with eager attention."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from flex_inductor import decisions, set_eager_kernels
from flex_inductor.integrations import transformers as integration
from flex_inductor.integrations.transformers import NAME, WITH_SLASHES
from tests.integrations.families import DECODER, LENGTH, VOCAB

ROOT = Path(__file__).parents[3]


@pytest.fixture
def served(monkeypatch):
    """The calls of the op, all by the CPU's kernels."""
    calls, attend = [], integration.attend_tables
    monkeypatch.setattr(integration, "attend_tables", lambda *args: calls.append(args) or attend(*args))
    set_eager_kernels("always")
    yield calls
    set_eager_kernels("auto")
    assert {decision.chosen for decision in decisions()} == {"cpu"}


def llama(attention):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**DECODER, attn_implementation=attention))


def batch(seed=0):
    """The second row is padded on the right."""
    ids = torch.randint(1, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[1, 30:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def with_lora(attention):
    projections = ["q_proj", "k_proj", "v_proj", "o_proj"]
    model = get_peft_model(
        llama(attention), LoraConfig(r=4, target_modules=projections, init_lora_weights=False)
    )
    out = model(**batch())
    out.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == 2 * len(projections) * DECODER["num_hidden_layers"]
    return {"loss": out.loss.detach(), **gradients}


def test_lora_on_the_projections(served):
    eager = with_lora("eager")
    found = with_lora(NAME)
    assert len(served) == DECODER["num_hidden_layers"]
    torch.testing.assert_close(found, eager, rtol=1e-5, atol=1e-6)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, n):
        return {name: rows[n % 2] for name, rows in batch(n).items()}


@pytest.mark.parametrize("name", [NAME, WITH_SLASHES])
@pytest.mark.parametrize("reentrant", [True, False])
def test_trainer_with_gradient_checkpointing(tmp_path, served, reentrant, name):
    def losses(attention):
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=6, per_device_train_batch_size=2, logging_steps=1, learning_rate=0.3, optim="sgd",
            gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": reentrant},
            use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(llama(attention), arguments, train_dataset=Rows())
        trainer.train()
        return [logged["loss"] for logged in trainer.state.log_history if "loss" in logged]

    eager = losses("eager")
    found = losses(name)
    assert len(served) == 6 * 2 * DECODER["num_hidden_layers"]  # once more where a layer is computed again
    assert len(found) == 6
    torch.testing.assert_close(found, eager, rtol=1e-5, atol=0)


def launched(attention):
    # With --cpu it starts one process, unless there is MPI.
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2"]
    rest = ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"]
    script = ["-m", "tests.integrations.training.launched", attention]
    done = subprocess.run([*launch, *rest, *script], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("{"))
    return json.loads(line)


def test_accelerate_launch_on_two_processes():
    eager, found = launched("eager"), launched(NAME)
    assert found["served"] == ["cpu"] and eager["served"] == []
    assert len(found["losses"]) == 6 and all(
        one != other for one, other in found["losses"]
    )  # of both processes
    torch.testing.assert_close(found["losses"], eager["losses"], rtol=1e-5, atol=0)
