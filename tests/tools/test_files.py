"""What is wrong with a file or a size on the command line is said before any work is done."""

import pytest

from flex_inductor.tools import cli


@pytest.mark.parametrize(
    "command, argument",
    [
        ("mask causal --out", "--out"),
        ("tune export", "file"),
        ("inspect nowhere.py:f --html", "--html"),
        ("inspect nowhere.py:f --json", "--json"),
        ("inspect --last --json", "--json"),
        ("bench masks --json", "--json"),
        ("bench masks --plot", "--plot"),
        ("bench cpu --json", "--json"),
        ("bench cpu --plot", "--plot"),
        ("bench static --json", "--json"),
        ("plan causal --out", "--out"),
        ("plan causal --json", "--json"),
    ],
)
def test_a_folder_that_is_not_there(command, argument, tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main([*command.split(), f"{tmp_path}/missing/out.svg"])
    assert left.value.code == 2
    message = (
        f"argument {argument}: expected a file in a folder that is there, got '{tmp_path}/missing/out.svg', and there "
        f"is no folder '{tmp_path}/missing'. Make the folder first, or name another."
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert list(tmp_path.iterdir()) == []


def test_a_folder_instead_of_a_file(tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["mask", "causal", "--out", str(tmp_path)])
    assert f"expected the name of a file, got '{tmp_path}', which is a folder." in capsys.readouterr().err


@pytest.mark.parametrize("name", ["length", "keys"])
@pytest.mark.parametrize("value", ["0", "-3", "1.5", "many", "\u0663"])
def test_a_mask_of_no_tokens(name, value, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["mask", "causal", f"--{name}={value}"])
    assert left.value.code == 2
    assert (
        f"argument --{name}: expected a whole number from 1 to 2147483647, got {value!r}."
        in capsys.readouterr().err
    )
