"""The inspector's report: what a person reads, and what a program does."""

import json
import re
from pathlib import Path

import expecttest
import pytest
import torch

import flex_inductor
from flex_inductor import FlexError, flex_attention
from flex_inductor.laws.calls import capture
from flex_inductor.tools.inspector.page import page
from flex_inductor.tools.inspector.webpage import webpage
from tests import inspected
from tests.reports import inspected_anew, report

CHANGES = (
    (r"\b(flex_inductor|torch|triton) \d[^ ,)]*", r"\1 ·"),
    (r"^   config   (?: \w+=\d+)+", lambda line: re.sub(r"=\d+", "=·", line[0])),
    (r" COALESCED=·", ""),  # an axis that not every version of triton uses here
    (r"(?<==·) {2,}.*", ""),  # why, and the configs not taken
    (r"built by  .*", "built by  ·"),
    (r"\d+ (registers|bytes)", r"· \1"),
    (r"(at once|by class|each loop): .*", r"\1: ·"),
    (r"at least .* on this CPU.* bound by \w+", "at least · on ·, bound by ·"),
)


def stable(text):
    """The page without sources, a dot for what depends on compiler, version or machine."""
    sections = text.split("\n\n== ")
    sections = [part.partition("\n\n")[0] if "\n   config " in part else part for part in sections]
    text = re.sub(
        r"(\n   (?:config|has|loops) .*(?:\n {13}.*)+)",
        lambda m: m[0].replace("\n" + " " * 13, "  "),
        "\n\n== ".join(sections),
    )
    for pattern, written in CHANGES:
        text = re.sub(pattern, written, text, flags=re.MULTILINE)
    return text


class Pages(expecttest.TestCase):
    maxDiff = None

    def test_plain_causal(self):
        self.assertExpectedInline(
            stable(page(report("plain_causal", "cpu"))),
            """\
1 attention call, 1 kernel for cpu (flex_inductor ·, torch ·, triton ·)

== call 0, inspected.py:27: return flex_attention(q, k, v, block_mask=mask)
   query [1, 2, 256, 32] float16
   key [1, 2, 256, 32] float16
   value [1, 2, 256, 32] float16
   mask_mod causal, inspected.py:11
      inspected.py:11 | return q_idx >= kv_idx

   forward
      chosen:   cpu (fused C++ forward)
      rejected: triton: for GPUs; on CPU only with Triton's interpreter
      rejected: chunked: cpu comes first

   def mask_mod(b, h, q_idx, kv_idx):
       ge = aten.ge(q_idx, kv_idx)  # inspected.py:11
       return ge

   schedule  256 x 256 in tiles of 64 x 64: 6 full, 4 partial, 6 empty of 16; sparsity 37.5%
             ▒▒
             ██▒▒
             ████▒▒
             ██████▒▒
   forward   10.5 MFLOP, 131 kB; at least · on ·, bound by ·
   kernels   cpp_fused_flex_inductor_attention_0

== cpp_fused_flex_inductor_attention_0: forward of call 0
   config    block_m=· block_n=· rows=·
   built by  ·""",
        )

    def test_alibi_documents(self):
        self.assertExpectedInline(
            stable(page(report("alibi_documents", "cpu"))),
            """\
1 attention call, 1 kernel for cpu (flex_inductor ·, torch ·, triton ·)

== call 0, inspected.py:46: return flex_attention(q, k, v, alibi, mask)
   query [1, 2, 256, 32] float16
   key [1, 2, 256, 32] float16
   value [1, 2, 256, 32] float16
   score_mod alibi, inspected.py:40-41
      inspected.py:40 | distance = kv_idx - q_idx
      inspected.py:41 | return score + slopes[h] * distance
      captures slopes [2] float32
   mask_mod same_document, inspected.py:37
      inspected.py:37 | return (q_idx >= kv_idx) & (document[q_idx] == document[kv_idx])
      captures document [256] int64

   forward
      chosen:   cpu (fused C++ forward)
      rejected: triton: for GPUs; on CPU only with Triton's interpreter
      rejected: chunked: cpu comes first

   def score_mod(score, b, h, q_idx, kv_idx, slopes):
       index = aten.index(slopes, [h])  # inspected.py:41
       sub = aten.sub(kv_idx, q_idx)    # inspected.py:40
       mul = aten.mul(index, sub)       # inspected.py:41
       add = aten.add(score, mul)       # inspected.py:41
       return add

   def mask_mod(b, h, q_idx, kv_idx, document):
       ge = aten.ge(q_idx, kv_idx)               # inspected.py:37
       index = aten.index(document, [q_idx])     # inspected.py:37
       index_1 = aten.index(document, [kv_idx])  # inspected.py:37
       eq = aten.eq(index, index_1)              # inspected.py:37
       bitwise_and = aten.bitwise_and(ge, eq)    # inspected.py:37
       return bitwise_and

   schedule  256 x 256 in tiles of 64 x 64: 0 full, 8 partial, 8 empty of 16; sparsity 50.0%
             ▒▒
             ▒▒▒▒
               ▒▒▒▒
               ▒▒▒▒▒▒
   forward   8.39 MFLOP, 133 kB; at least · on ·, bound by ·
   kernels   cpp_fused_flex_inductor_attention_1

== cpp_fused_flex_inductor_attention_1: forward of call 0
   config    block_m=· block_n=· rows=·
   built by  ·""",
        )

    def test_learnable_bias(self):
        self.assertExpectedInline(
            stable(page(report("learnable_bias", "sm_90"))),
            """\
1 attention call, 3 kernels for sm_90 (flex_inductor ·, torch ·, triton ·)

== call 0, inspected.py:61: return flex_attention(q, k, v, self.relative, self.mask)
   query [1, 2, 256, 32] float16, needs a gradient
   key [1, 2, 256, 32] float16, needs a gradient
   value [1, 2, 256, 32] float16, needs a gradient
   score_mod relative, inspected.py:58
      inspected.py:58 | return score + torch.tanh(self.bias[h, q_idx - kv_idx + LENGTH])
      captures self.bias [2, 512] float32, needs a gradient
   mask_mod causal, inspected.py:11
      inspected.py:11 | return q_idx >= kv_idx

   forward
      chosen:   triton (fused Triton kernel)
      rejected: cpu: for CPUs, not cuda
      rejected: chunked: triton comes first

   backward
      chosen:   triton (fused Triton kernel)
      rejected: cpu: for CPUs, not cuda
      rejected: chunked: triton comes first

   def score_mod(score, b, h, q_idx, kv_idx, self.bias):
       sub = aten.sub(q_idx, kv_idx)            # inspected.py:58
       add = aten.add(sub, 256)                 # inspected.py:58
       index = aten.index(self.bias, [h, add])  # inspected.py:58
       tanh = aten.tanh(index)                  # inspected.py:58
       add_1 = aten.add(score, tanh)            # inspected.py:58
       return add_1

   def joint(score, b, h, q_idx, kv_idx, grad_score, self.bias):
       sub = aten.sub(q_idx, kv_idx)                                     # inspected.py:58
       add = aten.add(sub, 256)                                          # inspected.py:58
       index = aten.index(self.bias, [h, add])                           # inspected.py:58
       tanh = aten.tanh(index)                                           # inspected.py:58
       mul = aten.mul(tanh, tanh)                                        # inspected.py:58
       sub_1 = aten.sub(1, mul)                                          # inspected.py:58
       mul_1 = aten.mul(grad_score, sub_1)                               # inspected.py:58
       full_default = aten.full([2, 512], 0, dtype=float32)              # inspected.py:58
       index_put = aten.index_put_(full_default, [h, add], mul_1, True)  # inspected.py:58
       return (grad_score, index_put)

   def mask_mod(b, h, q_idx, kv_idx):
       ge = aten.ge(q_idx, kv_idx)  # inspected.py:11
       return ge

   schedule  256 x 256 in tiles of 64 x 64: 6 full, 4 partial, 6 empty of 16; sparsity 37.5%
             ▒▒
             ██▒▒
             ████▒▒
             ██████▒▒
   forward   10.5 MFLOP, 135 kB; at least 40.3 ns on H100, bound by memory
   backward  26.2 MFLOP, 272 kB; at least 81.3 ns on H100, bound by memory
   kernels   flex_inductor_forward_0, flex_inductor_backward_dq_0, flex_inductor_backward_dkdv_1

== flex_inductor_forward_0: forward of call 0
   config    BLOCK_M=· BLOCK_N=· num_warps=· num_stages=·
   built by  ·
   uses      · registers, · bytes spilled, · bytes of shared memory
   occupancy instances on a multiprocessor at once: ·
   has       instructions by class: ·
   loops     instructions of a tile, for each loop: ·

== flex_inductor_backward_dq_0: backward_dq of call 0
   config    BLOCK_M=· BLOCK_N=· num_warps=· num_stages=·
   built by  ·
   uses      · registers, · bytes spilled, · bytes of shared memory
   occupancy instances on a multiprocessor at once: ·
   has       instructions by class: ·
   loops     instructions of a tile, for each loop: ·

== flex_inductor_backward_dkdv_1: backward_dkdv of call 0
   config    BLOCK_M=· BLOCK_N=· num_warps=· num_stages=·
   built by  ·
   uses      · registers, · bytes spilled, · bytes of shared memory
   occupancy instances on a multiprocessor at once: ·
   has       instructions by class: ·
   loops     instructions of a tile, for each loop: ·""",
        )

    def test_refused(self):
        self.assertExpectedInline(
            stable(page(report("refused", "sm_90"))),
            """\
1 attention call, 0 kernels for sm_90 (flex_inductor ·, torch ·, triton ·)

== call 0, inspected.py:70: return lambda q, k, v: flex_attention(q, k, v, lambda s, *_: 20 * torch.tanh(s / 20)), inputs(
   query [1, 2, 256, 32] float64
   key [1, 2, 256, 32] float64
   value [1, 2, 256, 32] float64
   score_mod <lambda>, inspected.py:70
      inspected.py:70 | return lambda q, k, v: flex_attention(q, k, v, lambda s, *_: 20 * torch.tanh(s / 20)), inputs(

   forward
      chosen:   chunked (serves every device, dtype, shape and mod, in bounded memory; not fused)
      rejected: triton: no float64; float16, bfloat16 and float32 only
      rejected: cpu: for CPUs, not cuda

   def score_mod(score, b, h, q_idx, kv_idx):
       div = aten.div(score, 20)  # inspected.py:70
       tanh = aten.tanh(div)      # inspected.py:70
       mul = aten.mul(tanh, 20)   # inspected.py:70
       return mul

   schedule  every query sees every key
   forward   16.8 MFLOP, 524 kB; no peak known for this dtype on H100
   kernels   none: torch operations, a chunk at a time""",
        )


@pytest.fixture(scope="module")
def learnable_bias():
    return report("learnable_bias", "cpu")


WRITTEN = {"score_mod": "torch.tanh(self.bias", "mask_mod": "return q_idx >= kv_idx"}


def line_of(text):
    source = Path(inspected.__file__).read_text().splitlines()
    return next(number for number, line in enumerate(source, 1) if text in line)


def test_inlined_lines_name_the_line_of_the_mod(learnable_bias):
    forward, backward = learnable_bias.kernels
    lines = {name: f"inspected.py:{line_of(text)}" for name, text in WRITTEN.items()}
    for kernel in (forward, backward):
        noted = set(re.findall(r"// (\w+_mod): (\S+)$", kernel.source, re.MULTILINE))
        assert noted == set(lines.items())
    # What is built has no comments of ours: a mod that moves does not compile again.
    assert "inspected.py" not in forward.made.text


def test_cpu_kernels_say_what_builds_them(learnable_bias):
    assert [kernel.kind for kernel in learnable_bias.kernels] == ["forward", "backward"]
    for kernel in learnable_bias.kernels:
        assert re.search(r"vectors of \d+ bits|no vectors", kernel.built_with)
        assert kernel.config["block_n"] % 32 == 0 and kernel.choice.kernel == kernel.kind
        assert 'extern "C"' in kernel.source and kernel.resources.registers is None
        assert set(kernel.resources.reasons) >= {"registers", "spill_bytes"}


def test_attributes_of_a_call(learnable_bias):
    (call,) = learnable_bias.calls
    assert (call.problem.direction, call.decision.chosen) == ("forward", "cpu")
    for graph in (call.score_mod_graph, call.joint_graph, call.mask_graph):
        assert isinstance(graph, torch.fx.GraphModule)
    assert call.mask.sparsity() == 37.5
    assert call.kernels == learnable_bias.kernels


def test_json_holds_no_values_and_no_paths(learnable_bias, tmp_path):
    learnable_bias.to_json(tmp_path / "report.json")
    text = (tmp_path / "report.json").read_text()
    data = json.loads(text)
    assert data["calls"][0]["decisions"]["forward"]["chosen"] == "cpu"
    assert data["calls"][0]["schedule"]["partial"] == 4
    assert data["calls"][0]["cost"]["backward"]["flops"] == 2.5 * data["calls"][0]["cost"]["forward"]["flops"]
    assert [kernel["name"] for kernel in data["kernels"]] == data["calls"][0]["kernels"]
    assert inspected.__file__.rpartition("/")[0] not in text


def test_cost_on_named_devices(learnable_bias):
    (call,) = learnable_bias.calls
    # 10 of 16 tiles of 64 x 64 in 2 heads, two products of 32 columns; query, key, value, output, bias.
    flops, moved = 10 * 2 * 64 * 64 * 2 * 2 * 32, 4 * 2 * 256 * 32 * 2 + 2 * 512 * 4
    for device, peak, bandwidth in (
        ("H100", 989e12, 3.35e12),
        ("A100", 312e12, 2.039e12),
        ("MI300X", 1307e12, 5.3e12),
    ):
        cost = call.cost(device)["forward"]
        assert (cost.flops, cost.bytes, cost.device) == (flops, moved, device)
        assert cost.seconds == pytest.approx(max(flops / peak, moved / bandwidth)) and cost.bound == "memory"
        assert cost.measured is None and cost.share is None
    with pytest.raises(FlexError, match=r"^cost: device: expected one of A100, .*, got 'K80'"):
        call.cost("K80")


def test_cost_on_each_target(learnable_bias, monkeypatch):
    from flex_inductor.tools.inspector import KNOWN_TARGETS, cost

    (call,) = learnable_bias.calls
    lowered = call.lowered["forward"]

    def on(target):
        return cost.cost_of(call.facts, "forward", lowered, target)

    assert all(on(target).seconds for target in KNOWN_TARGETS)
    assert (on("sm_90").device, on("sm_86").device) == ("H100", "RTX 3090")
    assert (on("sm_75").device, on("sm_75").seconds) == ("sm_75", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert (on("sm_90").device, on("sm_86").device) == ("H200", "RTX 3090")


def test_share_of_the_floor_where_kernels_were_timed(monkeypatch):
    import torch._inductor.lowering  # noqa: F401 - its circles of imports must be entered here
    from torch._inductor import config

    from flex_inductor.lowerings import winners
    from flex_inductor.lowerings.cpu import tuner
    from flex_inductor.tools.inspector import cost

    monkeypatch.setattr(tuner, "times", lambda *given: [2e-3 + i * 1e-3 for i in range(len(given[-1]))])
    monkeypatch.setattr(winners, "keep", lambda winner: None)
    monkeypatch.setattr(cost, "this_cpu", lambda threads: cost.Device("this CPU", {"float16": 1e10}, 1e9))
    with config.patch(max_autotune=True):
        found = inspected_anew("plain_causal", "cpu")
    (call,) = found.calls
    floor = call.cost()["forward"]
    assert (floor.seconds, floor.measured) == (pytest.approx(10485760 / 1e10), 2e-3)
    assert floor.share == pytest.approx(0.524288)
    assert "at least 1.05 ms on this CPU, bound by compute; 2 ms when timed, of which that is 52%" in page(
        found
    )
    assert found.to_dict()["calls"][0]["cost"]["forward"]["share"] == floor.share


def test_only_what_is_timed_is_built(monkeypatch):
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile

    from flex_inductor.lowerings import winners

    built = []

    def build(_, types, source):
        built.append(source)
        return lambda *_: None

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", build)
    monkeypatch.setattr(winners, "find", lambda *_: None)
    monkeypatch.setattr(winners, "keep", lambda winner: None)
    with config.patch(max_autotune=True):
        (call,) = inspected_anew("plain_causal", "cpu").calls
    (choice,) = call.decision.kernels
    assert choice.why.startswith("fastest when timed: ")
    timed = 1 + sum(remark.endswith(" ms") for _, remark in choice.others)
    assert len(built) == timed > 1


def test_twelve_layers_share_kernels():
    found = report("twelve_layers", "cpu")
    assert len(found.calls) == 12
    assert sorted({kernel.kind for kernel in found.kernels}) == ["backward", "forward"]
    text = page(found)
    assert text.count("as call 0") == 11
    for kernel in found.kernels:
        assert text.count(f"== {kernel.name}: ") == 1
    html = webpage(found)
    assert html.count('<section id="call-') == 12 and html.count('class="kernel"') == len(found.kernels)


def test_checkpointed_calls_in_the_order_they_run():
    from torch.utils.checkpoint import checkpoint

    module, args = inspected.learnable_bias()

    def attend(q, k, v):
        first = checkpoint(module, q, k, v, use_reentrant=False)
        return flex_attention(first, k, v)

    first, second = flex_inductor.inspect(attend, *args).calls
    assert first.facts.where.text == "return flex_attention(q, k, v, self.relative, self.mask)"
    assert (first.schedule.partial, second.schedule) == (4, None)
    assert [*first.lowered] == [*second.lowered] == ["forward", "backward"]


def test_without_backward():
    found = report("learnable_bias", "cpu", backward=False)
    assert list(found.calls[0].lowered) == ["forward"] and found.calls[0].joint_graph is None


def test_torchs_function_is_shown_as_ours():
    from torch.nn.attention.flex_attention import flex_attention as torchs

    def cap(score, b, h, q_idx, kv_idx):
        return 20 * torch.tanh(score / 20)

    def attend(q):
        return torchs(q, q, q, cap)

    (call,) = flex_inductor.inspect(attend, torch.zeros(1, 2, 64, 16)).calls
    assert call.facts.where.text == "return torchs(q, q, q, cap)"
    assert call.facts.score_mod.name == "cap"
    assert call.facts.score_mod.lines[0].text == "return 20 * torch.tanh(score / 20)"


def test_calls_by_other_functions_are_those_of_the_users():
    call = report("packed", "cpu", backward=False).calls[0].facts
    assert call.where.text == "return varlen_attention(x, x, x, two, score_mod=made_here)"
    assert [line.text.partition(" = ")[0] for line in call.score_mod.lines] == ["made_here"]
    assert [capture.name for capture in call.score_mod.captures] == ["SLOPES"]
    call = report("by_flash", "cpu", backward=False).calls[0].facts
    assert "flash.flash_attn_func(x, x, x, causal=True)" in call.where.text
    _, (checked,) = capture(*inspected.by_flash(), {})
    assert checked.where == str(call.where)


def test_a_mask_made_in_the_graph_is_shown():
    def attend(q):
        mask = flex_inductor.create_block_mask(inspected.causal, None, None, 128, 128, "cpu", BLOCK_SIZE=32)
        return flex_attention(q, q, q, block_mask=mask)

    (call,) = flex_inductor.inspect(attend, torch.zeros(1, 2, 128, 16)).calls
    assert str(call.schedule).endswith("6 full, 4 partial, 6 empty of 16; sparsity 37.5%")


BAD = {
    "never called": (
        lambda: flex_inductor.inspect(*inspected.no_attention()[:1], *inspected.no_attention()[1]),
        "relu never calls flex_attention with these arguments: there is nothing to inspect.",
    ),
    "devices": (
        lambda: flex_inductor.inspect(flex_attention, torch.zeros(1), torch.zeros(1, device="meta")),
        "The arguments are on several devices: cpu, meta. Move them to one; a GPU that is the target need not be "
        "there, so that CPU tensors serve.",
    ),
    "elsewhere": (
        lambda: flex_inductor.inspect(flex_attention, torch.zeros(1, device="meta")),
        "arguments: expected tensors on cpu or cuda, got some on meta.",
    ),
    "refused call": (
        lambda: flex_inductor.inspect(flex_attention, *(torch.zeros(1, n, 8, 4) for n in (4, 2, 2))),
        "query has 4 heads and key has 2; without enable_gqa they must be equal. For "
        "grouped-query attention pass enable_gqa=True.",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    inspecting, message = BAD[name]
    with pytest.raises(FlexError) as error:
        inspecting()
    assert str(error.value) == message
