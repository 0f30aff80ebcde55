"""The Python of the pages runs: every ```python block of README.md and docs/, in the order of its page.

The blocks of a page share their names. `<!-- python ... -->` holds code that readers do not see: what a block needs, and
what must come of it. A block that does not run here stands after `<!-- not run: reason -->`, or after
`<!-- run by tests/... -->` with the test that reads the page and runs it.
"""

import inspect
import re
import runpy
import sys
import types
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import AuxRequest, FlexKernelOptions, create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from flex_inductor import flash

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page.relative_to(ROOT) for page in PAGES if "made" not in page.parts]

PART = re.compile(
    r"^```python.*?\n(?P<shown>.*?)^```$|^<!-- python\n(?P<hidden>.*?)^-->$"
    r"|^<!-- run by (?P<test>\S+) -->$|^<!-- not run: (?P<reason>.+?) -->$",
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    line: int
    code: str
    shown: bool
    why: str | None = None  # it does not run here
    test: str | None = None  # it runs there


def blocks_of(text):
    """The blocks of a page, hidden ones too."""
    found, note = [], {}
    for part in PART.finditer(text):
        line = text.count("\n", 0, part.start()) + 1
        if part["test"] or part["reason"]:
            assert not note, f"line {line}: a note follows another, and no block stands between them"
            note = {"test": part["test"], "why": part["reason"]}
            continue
        shown = part["shown"] is not None
        assert shown or not note, f"line {line}: hidden code after a note; it runs anyway"
        found.append(Block(line, part["shown"] if shown else part["hidden"], shown, **note))
        note = {}
    assert not note, "the page ends with a note and no block after it"
    return found


@pytest.fixture
def names(monkeypatch):
    """What a page's blocks define, as a module, because Dynamo looks there for the globals of functions."""
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    return vars(module)


def run(page, text, names):
    """Run a page's blocks; how many of the shown ones ran, and what the others say."""
    ran, others = 0, []
    for block in blocks_of(text):
        if block.why or block.test:
            others.append(block)
            continue
        ran += block.shown
        code = "\n" * block.line + block.code  # so that errors have the page's lines
        exec(compile(code, str(page), "exec"), names)
    return ran, others


WITH_PYTHON = [
    page for page in PAGES if re.search("^```python|^<!-- python", (ROOT / page).read_text(), re.M)
]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=str)
def test_the_blocks_run(page, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    torch._dynamo.reset()
    ran, others = run(page, (ROOT / page).read_text(), names)
    assert ran + len(others) == len(re.findall("^```python", (ROOT / page).read_text(), re.M))
    for block in others:
        if block.test:
            reader = (ROOT / block.test).read_text()
            assert page.name in reader, f"{page}:{block.line}: {block.test} does not read the page"


def test_a_block_is_not_forgotten(names):
    page = "<!-- python\nx = 1\n-->\n```python\ny = x\n```\n<!-- not run: slow -->\n```python named\n1 / 0\n```\n"
    ran, (other,) = run("page.md", page, names)
    assert ran == 1 and other.why == "slow" and other.line == 8
    with pytest.raises(ZeroDivisionError):
        run("page.md", page.replace("<!-- not run: slow -->\n", ""), names)
    with pytest.raises(AssertionError, match="ends with a note"):
        run("page.md", page + "<!-- run by tests/test_docs.py -->\n", names)


COMING_FROM = (ROOT / "docs/coming_from.md").read_text()


def rows_of(title):
    """What the first column names, of the tables with this title there: {name: what stands beside it}."""
    (table,) = re.findall(rf"^\| {re.escape(title)} .*\n\|[- |]+\n((?:\|.*\n)+)", COMING_FROM, re.MULTILINE)
    rows = [re.split(r"(?<!\\) \| ", line.strip("| \n")) for line in table.splitlines()]
    return {name: rest for first, *rest in rows for name in re.findall(r"`(\w+)`", first)}


def test_all_arguments_of_torchs_functions_have_a_row():
    """Red with a torch whose function has a new argument: give it a row."""
    sdpa = re.search(
        r"scaled_dot_product_attention\((.*?)\) ->", F.scaled_dot_product_attention.__doc__, re.DOTALL
    )
    wanted = {
        "`flex_attention`": inspect.signature(flex_attention).parameters,
        "`AuxRequest`": AuxRequest.__annotations__,
        "`kernel_options`": FlexKernelOptions.__annotations__,
        "`create_block_mask`": inspect.signature(create_block_mask).parameters,
        "`scaled_dot_product_attention`": [argument.split("=")[0].strip() for argument in sdpa[1].split(",")],
        "`varlen_attn`": inspect.signature(varlen_attn).parameters,
    }
    for title, names in wanted.items():
        named = rows_of(title)
        assert names and set(names) <= set(named), (title, set(names) - set(named))


# FlashAttention's and xFormers' functions, which are not installed: commits 0251105a of 2026-08-15, bed3978b of 2026-04-20.
COMMON = "q k v softmax_scale causal window_size softcap deterministic "
PACKED = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
CACHED = (
    "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad softmax_scale causal "
    "window_size softcap rotary_interleaved num_splits return_softmax_lse "
)
HOPPER = "qv q_descale k_descale v_descale attention_chunk pack_gqa sm_margin "
CUTE = (
    "qv gather_kv_indices learnable_sink num_splits pack_gqa score_mod score_mod_bwd mask_mod aux_tensors aux_scalars "
    "block_sparse_tensors block_sparse_tensors_bwd return_lse "
)
OTHERS = {
    "2": COMMON
    + PACKED
    + "qkv kv cu_seqlens max_seqlen dropout_p alibi_slopes return_attn_probs block_table",
    "2 cached": CACHED + "block_table alibi_slopes",
    "3": COMMON + PACKED + HOPPER + "qkv num_heads_q seqused_q seqused_k num_splits return_attn_probs",
    "3 cached": CACHED
    + HOPPER
    + "page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens scheduler_metadata",
    "4": COMMON
    + PACKED
    + CUTE
    + "min_seqlen_k seqused_q seqused_k page_table scheduler_metadata seqlen_k_per_split disable_scheduler_metadata",
    "3 combined": "out_partial lse_partial out out_dtype",
    "4 combined": "out_partial lse_partial out out_dtype cu_seqlens seqused virtual_batch_idx return_lse",
}
BIASES = """
LowerTriangularMask LowerTriangularMaskWithTensorBias LowerTriangularFromBottomRightMask
LowerTriangularFromBottomRightLocalAttentionMask LocalAttentionFromBottomRightMask BlockDiagonalMask
BlockDiagonalCausalMask BlockDiagonalCausalFromBottomRightMask BlockDiagonalCausalLocalAttentionMask
BlockDiagonalCausalLocalAttentionFromBottomRightMask BlockDiagonalPaddedKeysMask
BlockDiagonalCausalWithOffsetPaddedKeysMask BlockDiagonalLocalAttentionPaddedKeysMask
BlockDiagonalCausalLocalAttentionPaddedKeysMask PagedBlockDiagonalPaddedKeysMask
PagedBlockDiagonalCausalWithOffsetPaddedKeysMask BlockDiagonalGappyKeysMask
BlockDiagonalCausalWithOffsetGappyKeysMask PagedBlockDiagonalGappyKeysMask
PagedBlockDiagonalCausalWithOffsetGappyKeysMask
"""


def tables_of_flash():
    part = COMING_FROM[COMING_FROM.index("## FlashAttention") : COMING_FROM.index("## xFormers")]
    lines = re.findall(r"^\| (`.*?`) \| ([\d ]+) \| (.*) \|$", part, re.MULTILINE)
    found = {}
    for names, versions, here in lines:
        for name in re.findall(r"`(\w+)`", names):
            found.setdefault(name, []).append((versions.split(), here))
    return found


def test_all_arguments_of_the_others_have_a_row():
    tables = tables_of_flash()
    for version, names in OTHERS.items():
        for name in names.split():
            rows = tables.get(name, [])
            assert any(version[0] in versions for versions, _ in rows), (version, name)
    assert set(rows_of("class")) >= set(BIASES.split())
    wanted = "query key value attn_bias p scale op output_dtype"
    assert set(rows_of("`memory_efficient_attention`")) >= set(wanted.split())


def test_what_is_said_to_be_the_same_is_an_argument():
    ours = {
        name
        for function in (
            "flash_attn_func",
            "flash_attn_varlen_func",
            "flash_attn_with_kvcache",
            "flash_attn_combine",
        )
        for name in inspect.signature(getattr(flash, function)).parameters
    }
    of_packed = {"qkv", "kv", "cu_seqlens", "max_seqlen"}
    for name, rows in tables_of_flash().items():
        for _, here in rows:
            if here.startswith("the same") and name not in of_packed:
                assert name in ours, name
            if here.startswith(("not served", "not needed")):
                assert name not in ours, name


def test_faults_of_a_site_are_found(tmp_path, capsys):
    links = runpy.run_path(str(ROOT / "docs/_ext/links.py"))
    (tmp_path / "index.html").write_text(
        '<a href="other.html#there"></a><a href="other.html#gone"></a><a href="no.html"></a><a href="#top"></a>'
        '<a href="https://pytorch.org"></a><img src="no.png" alt="words"><img src="_images/a_thumb.png" alt="">'
        '<svg role="img"></svg><h1 id="top"></h1><script src="big.js?v=1"></script>'
    )
    (tmp_path / "other.html").write_text('<p id="there"><img src="big.js"></p>')
    (tmp_path / "_images").mkdir()
    (tmp_path / "_images/a_thumb.png").write_text("")
    (tmp_path / "big.js").write_text("x" * 400_000)
    assert links["main"](tmp_path) == 1
    said = capsys.readouterr().out.splitlines()
    assert [re.sub(r"[\d,]{5,}", "N", line) for line in said] == [
        "index.html: <a> leads to other.html#gone, a page without that anchor",
        "index.html: <a> leads to no.html, which is not there",
        "index.html: <img> leads to no.png, which is not there",
        "index.html: svg has no alt text",
        "other.html: big.js has no alt text",
        "index.html: expected at most N bytes with all that it loads, got N",
    ]
