"""The playground of the site in headless Chromium, next to Python: `make test-browser`."""

import json
import random
import re
import shutil
import sys
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from flex_inductor import create_block_mask, flex_attention
from flex_inductor.masks.draw import tile_shares
from tests.tools.browser_webpage import browse

DOCS = Path(__file__).parents[2] / "docs"
sys.path[:0] = [str(DOCS), str(DOCS / "_ext")]

import playground  # noqa: E402  # what the site's build calls

PROGRAMS, POINTS = 400, 6
GALLERY = playground.gallery(DOCS / "gallery")
NAMES = [mask["name"] for mask in GALLERY]

SAY = """
const say = (found) => {
  const text = encodeURIComponent(JSON.stringify(found)).replaceAll("'", "%27"), size = 20000;
  for (let i = 0; i < text.length; i += size) console.log("PART " + text.slice(i, i + size) + " END");
};
window.addEventListener("error", (event) => say({ error: event.message }));
"""
REFUSE = """
const refusal = (text) => {
  try { return Language.compile(text).run(); } catch (error) {
    if (!(error instanceof Language.MaskError)) throw error;
    return [error.at.line, error.at.column, error.message];
  }
};
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the page's own HTML, scripts and styles, and the gallery's masks."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(DOCS / "_static" / "playground", folder / "_static" / "playground")
    text = f"const GALLERY = {json.dumps(GALLERY)};\n"
    (folder / "_static" / "playground" / "gallery.js").write_text(text)
    return folder


def asked(site, script, *flags, body='<body data-theme="auto">'):
    """What a script says that runs after the page's own."""
    (block,) = re.findall(r"```\{raw\} html\n(.*?)```", (DOCS / "playground.md").read_text(), re.S)
    styles = "".join(
        f'<link rel="stylesheet" href="_static/playground/{name}.css">' for name in ("gallery", "playground")
    )
    (site / "probe.js").write_text(SAY + REFUSE + script)
    page = site / "playground.html"
    page.write_text(
        f'<!DOCTYPE html><html lang="en"><meta charset="utf-8">{styles}{body}<section id="playground"><h1>Playground</h1>{block}<p>More.</p></section>'
        '<script src="probe.js" defer></script></body></html>'
    )
    lines = browse(page, "--dump-dom", "--virtual-time-budget=100000", *flags, timeout=300)
    lines = [line for line in lines if "Multiple readback operations" not in line]  # the probe's own
    parts = [re.fullmatch("PART (.*) END", line) for line in lines]
    assert parts and all(parts), lines
    return json.loads(unquote("".join(part[1] for part in parts)))


def mask_of(entry):
    """The gallery's function, from what the page knows of it."""
    names = {"torch": torch}
    for name, value in entry["names"].items():
        if isinstance(value, dict):
            entries, counts = torch.tensor(value["runs"]).view(-1, 2).unbind(1)
            value = (
                entries.repeat_interleave(counts)
                .view(value["shape"])
                .to(torch.bool if value["truth"] else torch.int64)
            )
        names[name] = value
    exec(entry["source"], names)
    return names[re.match(r"def (\w+)", entry["source"])[1]]


def lengths_of(entry):
    queries, keys = entry["queries"], entry["keys"]
    return [(queries, keys), (queries // 2 + 3, keys), (max(queries // 3, 1), keys - 77), (1, 130)]


# Tiles.


@pytest.fixture(scope="module")
def counts(site):
    """[full, partial, empty] of each mask, for each of its lengths, batches and heads."""
    sizes = json.dumps({entry["name"]: lengths_of(entry) for entry in GALLERY})
    script = """
    const sizes = SIZES, found = {};
    for (const { name, source, names, batch, heads, tile } of GALLERY) {
      const program = Language.compile(source, names);
      found[name] = sizes[name].map(([queries, keys]) => {
        const grids = [];
        for (let b = 0; b < batch; b += 1) for (let h = 0; h < heads; h += 1) {
          if (h && !program.readsHead) continue;
          const { full, partial, empty } = Tiles.count(program, { queries, keys, tileQ: tile, tileKV: tile, b, h });
          grids.push([b, h, full, partial, empty]);
        }
        return grids;
      });
    }
    say(found);
    """
    return asked(site, script.replace("SIZES", sizes))


@pytest.mark.parametrize("name", NAMES)
def test_tiles_are_those_of_create_block_mask(counts, name):
    (entry,) = (entry for entry in GALLERY if entry["name"] == name)
    mask = mask_of(entry)
    for (queries, keys), grids in zip(lengths_of(entry), counts[name], strict=True):
        schedule = create_block_mask(
            mask, entry["batch"], entry["heads"], queries, keys, "cpu", entry["tile"], compact=True
        )
        for b, h, *found in grids:
            shares = tile_shares(schedule, b, h)
            partial, full = (int(share.sum()) for share in shares)
            assert found == [full, partial, shares[0].numel() - full - partial], (queries, keys, b, h)


def test_every_mask_written_in_the_gallery_is_there():
    pages = {path.stem for path in (DOCS / "gallery").glob("*/*.py") if "    mask=" in path.read_text()}
    assert pages - set(NAMES) == {"alibi", "retention", "dropout"}  # theirs is the library's causal mask


def test_operations_are_those_that_torch_counts(site):
    mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 300, 300, "cpu")
    query = torch.randn(1, 2, 300, 16, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        out = flex_attention(query, query, query, block_mask=mask)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    script = """
    const sizes = { queries: 300, keys: 300, tileQ: 128, tileKV: 128 };
    const { pairs } = Tiles.count(Language.compile("q_idx >= kv_idx"), sizes);
    say(Tiles.flops(2 * pairs, 16));
    """
    assert asked(site, script) == {
        "forward": forward.get_total_flops(),
        "backward": backward.get_total_flops(),
    }


# The language.


class Programs:
    """Random texts that Python reads too, on numpy's numbers, whose ~ is that of tensors."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.names = ["b", "h", "q_idx", "kv_idx"]

    def literal(self):
        return self.random.choice([0, 1, 2, 3, 5, 7, 8, 64, 100, 128, 1000])

    def number(self, depth):
        pick = self.random.random()
        if depth == 0 or pick < 0.1:
            return self.random.choice([*self.names, str(self.literal())])
        number = lambda: self.number(depth - 1)  # noqa: E731
        divisor = self.random.choice([-64, -7, -3, -1, 1, 2, 3, 10, 64])
        return self.random.choice(
            [
                lambda: f"({number()} {self.random.choice('+-')} {number()})",
                lambda: f"{number()} - {number()} + {number()}",
                lambda: f"({number()}) * {self.literal() % 10 - 4}",
                lambda: f"({number()}) // {divisor}",
                lambda: f"({number()}) % {divisor}",
                lambda: f"{number()} // {abs(divisor)} % {abs(divisor)}",
                lambda: f"-({number()})",
                lambda: f"~({number()})",
                lambda: f"abs({number()})",
                lambda: f"min({number()}, {number()})",
                lambda: f"max({number()}, {number()}, {number()})",
                lambda: f"({number()} {self.random.choice('&|^')} {number()})",
                lambda: f"(({number()}) {self.random.choice(['<<', '>>'])} {self.random.randrange(4)})",
                lambda: f"table[({number()}) % 6, {self.random.randrange(-4, 4)}]",
                lambda: f"row[({number()}) % 7 - 7]",
                lambda: f"({number()} if {self.truth(depth - 1)} else {number()})",
                lambda: f"({self.truth(depth - 1)}) + ({number()})",
            ]
        )()

    def truth(self, depth):
        number = lambda: self.number(max(depth - 1, 0))  # noqa: E731
        sign = lambda: self.random.choice(["==", "!=", "<", "<=", ">", ">="])  # noqa: E731
        compared = lambda: f"(q_idx + {number()} {sign()} {number()})"  # noqa: E731
        if depth == 0 or self.random.random() < 0.2:
            return compared()
        truth = lambda: self.truth(depth - 1)  # noqa: E731
        return self.random.choice(
            [
                compared,
                lambda: f"(q_idx {sign()} {number()} {sign()} kv_idx)",
                lambda: f"({truth()} {self.random.choice('&|^')} {truth()})",
                lambda: f"({truth()} {self.random.choice(['and', 'or'])} {truth()})",
                lambda: f"~{truth()}",
                lambda: f"((not {truth()}) | (q_idx < 0))",
                lambda: f"({truth()} & {self.random.choice(['True', 'False'])})",
                lambda: f"flags[({number()}) % 5]",
                lambda: f"({truth()} if {truth()} else {truth()})",
            ]
        )()

    def lines(self):
        """Assignments, and the last expression."""
        self.names, lines = ["b", "h", "q_idx", "kv_idx"], []
        for i in range(self.random.randrange(3)):
            lines.append(f"x{i} = {self.number(2)}")
            self.names.append(f"x{i}")
        if self.random.random() < 0.3:
            lines.append(f"y, z = {self.number(1)}, {self.number(2)}")
            self.names += ["y", "z"]
        numeric = self.random.random() < 0.6
        return lines, self.number(4) if numeric else self.truth(4), numeric


TABLES = {
    "row": [3, 1, 4, 1, 5, 9, 2],
    "table": [[7 * i - j * j for j in range(4)] for i in range(6)],
    "flags": [True, False, False, True, True],
}
HEAD = "".join(f"{name} = {value}\n" for name, value in TABLES.items())


def written(lines, last, form):
    """A function, a lambda, or lines."""
    if form == "def":
        body = "".join(f"    {line}  # a comment\n" for line in lines)
        docstring = '    """Which pairs are seen.\n\n    All others "are not".\n    """'
        return f"{HEAD}\ndef mask(b, h, q_idx, kv_idx):\n{docstring}\n{body}\n    return {last}\n"
    if form == "lambda" and not lines:
        return f"{HEAD}mask = lambda b, h, q_idx, kv_idx: {last}"
    return HEAD + "\n".join([*lines, f"({last}\n)"])


def test_random_programs_give_what_python_gives(site):
    made, cases = Programs(0), []
    for _ in range(PROGRAMS):
        lines, last, numeric = made.lines()
        for _ in range(POINTS):
            at = [made.random.randrange(limit) for limit in (3, 8, 700, 700)]
            names = {name: np.array(value) for name, value in TABLES.items()}
            names |= dict(zip(("b", "h", "q_idx", "kv_idx"), map(np.int64, at), strict=True))
            exec("\n".join(lines), names)
            value = eval(last, names)
            asks = f"({last}) == {int(value)}" if numeric else last
            text = written(lines, asks, made.random.choice(["def", "lambda", "lines"]))
            cases.append([text, at, 1 if numeric else int(value)])
    script = """
    say(CASES.map(([text, [b, h, q, kv]]) => {
      const program = Language.compile(text);
      Object.assign(program.lane, { b, h, q, kv });
      return program.run();
    }));
    """
    found = asked(site, script.replace("CASES", json.dumps(cases)))
    wrong = [case for case, value in zip(cases, found, strict=True) if case[2] != value]
    assert not wrong, (len(wrong), wrong[0])
    assert sum(want for *_, want in cases) < len(cases)


def test_kept_values_follow_rows_keys_and_heads(site):
    """Over a whole grid: values are kept for a row, a key or a head, and must not outlive them."""
    made, sizes, texts = Programs(1), {"b": 2, "h": 2, "q_idx": 9, "kv_idx": 8}, []
    grids = torch.meshgrid(*(torch.arange(n) for n in sizes.values()), indexing="ij")
    for _ in range(60):
        lines, last, numeric = made.lines()
        texts.append((lines, f"({last}) % 3 == 1" if numeric else last))
    want = []
    for lines, last in texts:
        row = []
        for at in zip(*(grid.flatten().tolist() for grid in grids), strict=True):
            names = {name: np.array(value) for name, value in TABLES.items()}
            names |= dict(zip(sizes, map(np.int64, at), strict=True))
            exec("\n".join(lines), names)
            row.append(int(eval(last, names)))
        want.append(row)
    script = """
    say(TEXTS.map((text) => {
      const program = Language.compile(text), found = [];
      for (const b of [0, 1]) for (const h of [0, 1]) {
        const sizes = { queries: 9, keys: 8, tileQ: 16, tileKV: 16, b, h };
        found.push(...Tiles.tokens(program, sizes, 0, 0).seen);
      }
      return found;
    }));
    """
    written_texts = json.dumps([written(lines, last, "def") for lines, last in texts])
    assert asked(site, script.replace("TEXTS", written_texts)) == want


def test_functions_of_torch(site):
    texts = [
        "torch.where(q > kv, q - 7, kv * 2) % 5 == 1",
        "(q - kv).clamp(-3, 5) % 4 == 2",
        "(q - kv).clamp(min=2) + (kv - q).clamp(max=3) == 5",
        "torch.maximum(q, kv) - torch.minimum(q, kv) == (q - kv).abs()",
        "torch.abs(q - kv) < 4",
    ]
    q, kv = torch.arange(12)[:, None], torch.arange(10)
    want = [eval(text, {"torch": torch, "q": q, "kv": kv}).int().flatten().tolist() for text in texts]
    script = """
    const sizes = { queries: 12, keys: 10, tileQ: 16, tileKV: 16 };
    say(TEXTS.map((text) => [...Tiles.tokens(Language.compile(`lambda b, h, q, kv: ${text}`), sizes, 0, 0).seen]));
    """
    assert asked(site, script.replace("TEXTS", json.dumps(texts))) == want


REFUSED = [
    ("", 1, 1, "there is nothing"),
    ("q_idx >= ", 1, 9, "expected a value, but the line ends"),
    ("q_idx >= kv_idx)", 1, 16, "expected the end of the line, but ')' came"),
    ("(q_idx >= kv_idx", 1, 17, "expected ')' to close the one before"),
    ("q_idx - kv_idx", 1, 7, "the mask is a number: compare it"),
    ("q_idx / 2 > kv_idx", 1, 7, "'/' gives fractions: write '//'"),
    ("q_idx ** 2 > kv_idx", 1, 7, "'**' is not known here"),
    ("q_idx >= 0.5", 1, 10, "'0.5' is not a whole number"),
    ("q_idx >= window", 1, 10, "'window' is not defined; there are b, h, q_idx, kv_idx"),
    ("q_idx >= 'a'", 1, 10, "text has no place in a mask"),
    ("q_idx >= kv_idx ? 1 : 0", 1, 17, "'?' is not known here"),
    ("import os\nq_idx >= kv_idx", 1, 1, "'import' is not known here"),
    ("eval(q_idx) > 1", 1, 1, "'eval' is not known here; there are abs, min, max"),
    ("constructor(q_idx) > 1", 1, 1, "'constructor' is not known here"),
    ("q_idx.clamp(__proto__=1) > 1", 1, 23, ".clamp takes no argument '__proto__' here"),
    ("(" * 20_000 + "q_idx", 1, 1, "the mask is nested too deeply"),
    ("q_idx.item() > 1", 1, 6, "'.item' is not known here"),
    ("q_idx.constructor > 1", 1, 19, "expected '(' after '.constructor'"),
    ("torch.tanh(q_idx) > 1", 1, 1, "'torch.tanh' is not known here"),
    ("torch.min(q_idx, 1) > 1", 1, 1, "'torch.min' is not known here"),
    ("constructor > 1", 1, 1, "'constructor' is not defined"),
    ("abs(q_idx, 2) > 1", 1, 1, "abs takes one number, here are 2"),
    ("q_idx.clamp() > 1", 1, 6, ".clamp takes min, max or both, here are 0"),
    ("q_idx.clamp(low=1) > 1", 1, 17, ".clamp takes no argument 'low' here"),
    ("-(q_idx > 1)", 1, 2, "'-' takes numbers, this is True or False"),
    ("(q_idx > 1) + (kv_idx > 1) == 2", 1, 13, "'+' of two truth values: write a & b"),
    ("q_idx and kv_idx > 1", 1, 7, "one side is a number, the other True or False"),
    ("q_idx // kv_idx > 1", 1, 7, "division by zero at b 0, h 0, q_idx 0, kv_idx 0"),
    ("1 << (q_idx - 1) > 1", 1, 3, "a shift by -1, which is negative"),
    ("q_idx * 4503599627370496 * 2 + 4503599627370496 * 3 > 1", 1, 49, "larger than 2 to the power of 52"),
    ("t = [1, 2]\nt[q_idx + 2] > 1", 2, 2, "t has 2 entries, the index is 2 at b 0, h 0, q_idx 0"),
    ("t = [1, 2]\nt[q_idx, 0] > 1", 2, 2, "t has 1 axis, here are 2 indices"),
    ("t = [1, 2]\nt > q_idx", 2, 1, "'t' is a table: read one entry, t[i]"),
    ("t = [[1, 2], [3]]\nt[0, q_idx] > 1", 1, 1, "the inner lists have different lengths"),
    ("t = [1, True]\nt[q_idx] > 1", 1, 1, "a list holds either numbers or True and False"),
    ("q_idx[0] > 1", 1, 1, "only tables can be indexed: 'q_idx' is a number"),
    ("x = 1", 1, 1, "the mask is missing below"),
    ("x += 1\nq_idx > x", 1, 3, "'+=' is not known here: write the assignment out"),
    ("x, y = 1\nq_idx > x", 1, 6, "2 names on the left, 1 values on the right"),
    ("if q_idx > 1:\n    q_idx > 2", 1, 1, "'if' cannot begin a line here"),
    (
        "def mask(b, h, q):\n    return q > 1",
        1,
        10,
        "a mask takes four arguments (b, h, q_idx, kv_idx), these are 3",
    ),
    ("def mask(b, h, q, kv):\n    q > kv", 2, 5, "last line has to begin with 'return'"),
    ("def mask(b, h, q, kv):\n    x = 1\n      return q > kv", 3, 7, "indented farther than the one before"),
    ("def mask(b, h, q, kv):\nreturn q > kv", 2, 1, "expected the function's indented lines"),
    ("def mask(b, h, q, kv):\n    return q > kv\nq_idx > 1", 3, 1, "nothing can follow the mask"),
    ("lambda b, h, q: q > 1", 1, 8, "a mask takes four arguments"),
]


def test_refusals_say_what_and_where(site):
    found = asked(site, f"say({json.dumps([text for text, *_ in REFUSED])}.map(refusal));")
    wrong = [
        (text, came)
        for (text, line, column, message), came in zip(REFUSED, found, strict=True)
        if not isinstance(came, list) or came[:2] != [line, column] or message not in came[2]
    ]
    assert not wrong, "\n".join(map(repr, wrong))


# The page.

USE = """
const byId = (id) => document.getElementById("playground-" + id), found = {};
const later = () => new Promise((done) => setTimeout(done, 200));
const tiles = () => byId("tiles").getAttribute("aria-label");
const type = (id, value, event = "input") => { byId(id).value = value; byId(id).dispatchEvent(new Event(event)); };
const colours = (canvas) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height), seen = {};
  for (let i = 0; i < data.length; i += 4) {
    const colour = data.slice(i, i + 3).join();
    seen[colour] = (seen[colour] || 0) + 1;
  }
  return seen;
};
(async () => {
  await later();
  found.unlabelled = [...document.querySelectorAll(".playground :is(input, select, textarea)")]
    .filter((input) => !input.labels.length && !input.getAttribute("aria-label")).map((input) => input.id);
  found.menu = [...byId("menu").options].length;
  found.first = [tiles(), byId("text").value.split("\\n")[0], byId("tile").textContent];
  type("queries", 1024);
  type("keys-number", 1024);
  await later();
  found.shorter = [tiles(), byId("facts").textContent, byId("keys").value];
  byId("tiles").focus();
  for (const key of ["ArrowDown", "ArrowDown", "ArrowRight"]) {
    byId("tiles").dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  }
  found.tile = byId("tile").textContent;
  found.focused = document.activeElement.id;
  type("text", "q_idx >= kv");
  found.error = [byId("error").textContent, byId("page").className, byId("menu").value];
  type("text", "q_idx >= kv_idx and h < 2");
  type("heads", 8);
  await later();
  found.mended = [byId("error").textContent, byId("notes").textContent, byId("facts").textContent];
  type("menu", "own", "change");
  await later();
  found.own = [tiles(), byId("error").textContent];
  type("menu", String(GALLERY.findIndex((mask) => mask.name === "graph")), "change");
  await later();
  found.tables = byId("tables").textContent;
  type("queries", 4000);
  await later();
  found.beyond = byId("error").textContent.split("\\n")[0];
  type("menu", String(GALLERY.findIndex((mask) => mask.name === "causal")), "change");
  await later();
  found.light = colours(byId("tiles"));
  document.body.dataset.theme = "dark";
  await later();
  found.dark = colours(byId("tiles"));
  found.around = document.querySelector("h1").textContent + document.querySelector("section > p").textContent;
  say(found);
})();
"""


def test_a_reader_uses_the_page(site):
    found = asked(site, USE, body='<body data-theme="light">')
    assert found["unlabelled"] == [] and found["menu"] == 1 + len(GALLERY)
    label, line, tile = found["first"]
    assert label == "Tiles of the mask: 15 full, 30 partial, 211 empty. Arrow keys choose a tile."
    assert line == "window = 256"
    assert tile == "Tile (0, 0): queries 0 to 127, keys 0 to 127, 8,256 of 16,384 pairs."
    label, facts, keys = found["shorter"]
    assert label.startswith("Tiles of the mask: 7 full, 14 partial, 43 empty") and keys == "1024"
    visited = 21 * 128 * 128 * 2  # pairs of two heads
    assert f"{4 * 64 * visited / 1e6:.0f} MFLOP, 32.8%" in facts and "1.76" not in facts
    assert found["tile"].startswith("Tile (2, 1): ") and found["focused"] == "playground-tiles"
    error, *state = found["error"]
    assert error.startswith("Line 1, column 10: 'kv' is not defined") and state == ["playground wrong", "own"]
    assert found["around"] == "PlaygroundMore."
    error, notes, facts = found["mended"]
    assert error == "" and notes.startswith("flex_attention cannot trace 'and': write & there")
    assert "14.1% of dense attention's" in facts  # a quarter of the heads, 36 of their 64 tiles
    assert found["own"][1] == "" and "0 full" not in found["own"][0]
    assert found["tables"].startswith("Tables of the gallery's page: adjacency: 1024 by 1024.")
    assert "adjacency has 1024 entries along axis 0, the index is 1024" in found["beyond"]
    assert sorted(found["light"].values()) == sorted(found["dark"].values()) == [16, 120, 120]
    assert set(found["light"]) == {"47,102,144", "242,165,65", "233,235,238"}
    assert set(found["dark"]) == {"93,156,204", "224,160,74", "38,43,53"}


def test_nothing_is_wider_than_the_window(site):
    found = asked(site, "say([document.documentElement.scrollWidth, innerWidth]);", "--window-size=500,900")
    assert found[0] <= found[1] == 500


def test_no_text_is_given_to_eval():
    scripts = [path.read_text() for path in (DOCS / "_static" / "playground").glob("*.js")]
    assert len(scripts) == 4 and not any(
        re.search(r"\beval\(|new Function|https?:", text) for text in scripts
    )
