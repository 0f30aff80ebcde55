"""What is wrong with a built sdist or wheel, in words."""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath

MOST_BYTES = 1_000_000  # of the wheel
LICENCE = "LICENSE"
NOT_SHIPPED = (".ci/", ".github/", ".gitignore")


def faults_of_sdist(path: Path, version: str, listed: Collection[str]) -> Iterator[str]:
    """`listed` are the files of the repository: all but those of its services belong inside."""
    top = f"flex_inductor-{version}"
    with tarfile.open(path) as archive:
        names = {PurePosixPath(member.name) for member in archive.getmembers() if member.isfile()}
    wanted = {PurePosixPath(top, name) for name in listed if not name.startswith(NOT_SHIPPED)}
    made = {PurePosixPath(top, name) for name in ("PKG-INFO", "setup.cfg")}
    for name in sorted(wanted - names):
        yield f"{path.name} lacks {name}: name its folder in MANIFEST.in or pyproject.toml"
    for name in sorted(names - wanted - made):
        if name.parent.name != "flex_inductor.egg-info":
            yield f"{path.name} has {name}, which git does not list: remove the file, or exclude it in MANIFEST.in"


def faults_of_wheel(path: Path, version: str) -> Iterator[str]:
    info = f"flex_inductor-{version}.dist-info"
    if path.name != (expected := f"flex_inductor-{version}-py3-none-any.whl"):
        yield f"the wheel is called {path.name}, not {expected}"
    if (size := path.stat().st_size) > MOST_BYTES:
        yield f"{path.name} has {size} bytes, over {MOST_BYTES}: leave out what users do not need"
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    if f"{info}/licenses/{LICENCE}" not in names:
        yield f"{path.name} has no {LICENCE}: name it in pyproject.toml's license-files"
    for name in names:
        if name.split("/")[0] not in ("flex_inductor", info):
            yield f"{path.name} would install {name} beside the package"
