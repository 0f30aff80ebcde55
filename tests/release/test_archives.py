"""What `make release-check` finds wrong with archives; it builds the real ones."""

import tarfile
import zipfile

import pytest

from . import archives

VERSION = "1.2.3"
INFO = f"flex_inductor-{VERSION}.dist-info"
RIGHT = {"flex_inductor/__init__.py": b"", f"{INFO}/licenses/LICENSE": b"BSD"}


def wheel(folder, files, name=f"flex_inductor-{VERSION}-py3-none-any.whl"):
    with zipfile.ZipFile(folder / name, "w") as archive:
        for file, content in files.items():
            archive.writestr(file, content)
    return folder / name


def sdist(folder, files):
    path = folder / f"flex_inductor-{VERSION}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for file in files:
            (folder / "one").touch()
            archive.add(folder / "one", f"flex_inductor-{VERSION}/{file}")
    return path


def test_a_right_wheel(tmp_path):
    assert list(archives.faults_of_wheel(wheel(tmp_path, RIGHT), VERSION)) == []


@pytest.mark.parametrize(
    "files, fault",
    [
        ({"flex_inductor/__init__.py": b""}, "has no LICENSE"),
        ({**RIGHT, "tests/__init__.py": b""}, "would install tests/__init__.py beside the package"),
        ({**RIGHT, "flex_inductor/large": bytes(archives.MOST_BYTES)}, "bytes, over"),
    ],
)
def test_a_wrong_wheel(files, fault, tmp_path):
    (found,) = archives.faults_of_wheel(wheel(tmp_path, files), VERSION)
    assert fault in found


def test_a_wheel_for_one_system(tmp_path):
    (found,) = archives.faults_of_wheel(
        wheel(tmp_path, RIGHT, "flex_inductor-1.2.3-cp311-cp311-linux.whl"), VERSION
    )
    assert found.startswith("the wheel is called flex_inductor-1.2.3-cp311-cp311-linux.whl, not")


def test_an_sdist_has_what_git_lists(tmp_path):
    listed = ["README.md", "tools/gpu_check.sh", ".ci/run", ".github/workflows/ci.yml"]
    right = ["README.md", "tools/gpu_check.sh", "PKG-INFO", "setup.cfg", "flex_inductor.egg-info/SOURCES.txt"]
    assert list(archives.faults_of_sdist(sdist(tmp_path, right), VERSION, listed)) == []
    lacks, has = archives.faults_of_sdist(
        sdist(tmp_path, [*right[:1], *right[2:], "notes.txt"]), VERSION, listed
    )
    assert "lacks flex_inductor-1.2.3/tools/gpu_check.sh" in lacks
    assert "has flex_inductor-1.2.3/notes.txt, which git does not list" in has
