"""The report's web page in headless Chromium: `make test-browser`, which leaves its picture in docs/inspector.png."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import flex_inductor
from tests import inspected

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PICTURE = Path(__file__).parents[2] / "docs" / "inspector.png"

# What a reader does and sees, said on the console.
PROBE = """
const canvas = document.querySelector("canvas"), caption = document.querySelector("figcaption");
const colours = () => {
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data, seen = {};
  for (let i = 0; i < pixels.length; i += 4) {
    const colour = pixels.slice(i, i + 3).join();
    seen[colour] = (seen[colour] || 0) + 1;
  }
  return Object.values(seen).sort((a, b) => a - b);
};
const found = {
  width: innerWidth,
  overflow: document.documentElement.scrollWidth - innerWidth,
  paper: getComputedStyle(document.body).backgroundColor,
  sections: [...document.querySelectorAll("h3")].map((title) => title.textContent),
  kernels: [...document.querySelectorAll("details.kernel")].map((kernel) => kernel.open),
  tiles: [canvas.width, canvas.height, colours()],
};
const box = canvas.getBoundingClientRect();
const tap = (x, y) => canvas.dispatchEvent(new MouseEvent("click", {
  clientX: box.left + box.width * x, clientY: box.top + box.height * y }));
tap(0.6, 0.6);
found.tokens = [canvas.width, canvas.height, colours(), caption.textContent];
canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowLeft" }));
found.left = caption.textContent;
tap(0.1, 0.1);
found.back = [canvas.width, caption.textContent];
const folded = document.querySelectorAll("details.kernel")[1];
const height = folded.offsetHeight;
document.querySelector("section a[href='#kernel-1']").click();
found.unfolded = folded.open && folded.offsetHeight > height;
console.log("FOUND " + JSON.stringify(found) + " END");
"""


def browse(page, *flags, timeout=60):
    """What Chromium logs of a page's console."""
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    result = subprocess.run(
        [
            CHROMIUM, "--headless", "--disable-gpu", "--enable-logging=stderr", *root, *flags,
            f"--user-data-dir={page.parent / 'profile'}", page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=timeout,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return re.findall(r'CONSOLE[^\]]*\] "(.*)", source: ', result.stderr)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    assert CHROMIUM, "no Chromium here; Debian's package is called chromium"
    path = tmp_path_factory.mktemp("page") / "report.html"
    module, args = inspected.learnable_bias()
    flex_inductor.inspect(module, *args, target="sm_90").to_html(path)
    return path


def probed(page, *flags, width=900):
    """Through a frame: Chromium's windows are not narrower than 500."""
    probe = page.with_name("probe.html")
    probe.write_text(page.read_text().replace("</body>", f"<script>{PROBE}</script></body>"))
    frame = page.with_name("frame.html")
    frame.write_text(
        f'<html style="color-scheme: light dark"><iframe src="probe.html" width="{width}" height="800" frameborder="0">'
    )
    lines = browse(frame, "--dump-dom", "--window-size=1000,900", *flags)
    (line,) = (line for line in lines if "Multiple readback operations" not in line)  # the probe's own
    return json.loads(line.removeprefix("FOUND ").removesuffix(" END"))


def test_console_is_silent_and_the_picture(page):
    assert browse(page, f"--screenshot={PICTURE}", "--window-size=900,1500") == []
    assert PICTURE.read_bytes().startswith(b"\x89PNG")


def test_an_error_would_be_seen(page):
    broken = page.with_name("broken.html")
    broken.write_text(page.read_text().replace("overview();", "no_such_function();"))
    assert any("no_such_function is not defined" in line for line in browse(broken, "--dump-dom"))


def test_sections_tiles_and_tokens(page):
    found = probed(page)
    assert found["sections"] == ["Decision", "Graphs", "Schedule", "Cost", "Kernels"]
    assert found["kernels"] == [True, False, False] and found["unfolded"]
    assert found["tiles"] == [4, 4, [4, 6, 6]]
    columns, rows, counts, caption = found["tokens"]
    assert (columns, rows, counts) == (64, 64, [64 * 63 // 2, 64 * 65 // 2])
    assert caption == (
        "Tile (2, 2): queries 128 to 191, keys 128 to 191, 2080 of 4096 pairs. Tap to go back."
    )
    assert found["left"].startswith("Tile (2, 1): ") and "4096 of 4096 pairs" in found["left"]
    assert found["back"] == [4, "Rows are queries, columns are keys. Tap a tile to see its tokens."]


def test_dark_and_on_a_phone(page):
    light, dark = (
        probed(page, f"--blink-settings=preferredColorScheme={scheme}", width=360) for scheme in (1, 0)
    )
    assert light["paper"] == "rgb(255, 255, 255)" and dark["paper"] == "rgb(20, 23, 29)"
    for found in (light, dark):
        assert found["width"] == 360 and found["overflow"] <= 0
        assert found["tiles"] == [4, 4, [4, 6, 6]]
