"""The report as a web page: well-formed, whole, and safe to show to anybody."""

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import flex_inductor
from flex_inductor import flex_attention
from tests import inspected
from tests.reports import report

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Checks that tags nest, and keeps attributes and texts."""

    def __init__(self, text):
        super().__init__()
        self.open, self.attributes, self.texts, self.tags = [], [], {}, []
        self.feed(text)
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attributes]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes {self.open}"

    def handle_data(self, data):
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)

    def text(self):
        return "".join(
            text for tag, texts in self.texts.items() if tag not in ("script", "style") for text in texts
        )


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    report("learnable_bias", "cpu").to_html(path)
    return path.read_text(), Page(path.read_text())


def test_sections(page):
    _, parsed = page
    text = parsed.text()
    for words in (
        "Call 0, inspected.py",
        "Decision",
        "Graphs",
        "Schedule",
        "Cost",
        "Kernels",
        "6 full, 4 partial",
    ):
        assert words in text
    assert parsed.tags.count("canvas") == 1 and parsed.tags.count("section") == 1
    assert {value for tag, name, value in parsed.attributes if name == "id"} == {
        "call-0",
        "kernel-0",
        "kernel-1",
    }


def test_nothing_comes_from_elsewhere(page):
    text, parsed = page
    assert not {tag for tag in parsed.tags if tag in ("link", "img", "iframe", "object")}
    targets = [value for _, name, value in parsed.attributes if name in ("href", "src", "action", "srcset")]
    assert targets and all(target.startswith("#") for target in targets)
    assert "@import" not in text and "url(" not in text and "http" not in "".join(parsed.texts["style"])
    ids = {value for _, name, value in parsed.attributes if name == "id"}
    assert {target[1:] for target in targets} <= ids


def test_no_paths_and_no_values(page):
    text, _ = page
    assert str(Path(inspected.__file__).parent) not in text
    assert str(Path.home()) + "/" not in text


def test_schemes_and_widths(page):
    text, parsed = page
    assert ("meta", "content", "width=device-width, initial-scale=1") in parsed.attributes
    assert text.count("prefers-color-scheme: dark") == 3


def test_tokens_of_a_partial_tile(page):
    _, parsed = page
    (drawing,) = (json.loads(text) for text in parsed.texts["script"] if text.startswith("{"))
    assert len(drawing["cells"]) == 4 and drawing["cells"][1][0] == [1.0, 0.0]
    pattern = drawing["patterns"][drawing["tiles"]["2,2"]]
    assert pattern.split(";") == [f"0-{row + 1}" for row in range(64)]


def test_a_users_text_is_escaped(tmp_path):
    def unsafe(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx < kv_idx, score, -score)  # </script><script>alert("<&>")</script>

    q = torch.zeros(1, 1, 32, 16)
    flex_inductor.inspect(lambda q: flex_attention(q, q, q, unsafe), q).to_html(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    parsed = Page(text)
    assert "<script>alert" not in text and 'alert("<&>")' in parsed.text()
    assert parsed.tags.count("script") == 1  # the page's own: there is no schedule to draw
