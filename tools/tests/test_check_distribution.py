"""The check of distributions names what is missing and what is too much."""

import check_distribution
import pytest

PACKAGE = "gdn-kernels"
TOP = check_distribution.ROOT / "packages" / PACKAGE
SDIST = check_distribution.TOP | {"PKG-INFO"}.union(*(check_distribution.files(TOP / x, TOP) for x in ("src", "tests")))
WHEEL = check_distribution.files(TOP / "src", TOP / "src") | {"gdn_kernels-0.1.0.dist-info/licenses/LICENSE"}
SDIST = SDIST | check_distribution.files(TOP / "examples", TOP)


def test_complete_archives_are_in_order():
    assert check_distribution.problems(PACKAGE, SDIST, WHEEL) == []


@pytest.mark.parametrize("name", ["LICENSE", "pyproject.toml", "src/gdn_kernels/py.typed", "tests/conftest.py"])
def test_a_file_missing_from_the_sdist_is_found(name):
    assert check_distribution.problems(PACKAGE, SDIST - {name}, WHEEL) == [f"sdist lacks {name}"]


def test_a_file_too_many_in_the_sdist_is_found():
    assert check_distribution.problems(PACKAGE, SDIST | {"dist/old.whl"}, WHEEL) == ["sdist holds dist/old.whl"]


def test_a_file_missing_from_the_wheel_is_found():
    assert check_distribution.problems(PACKAGE, SDIST, WHEEL - {"gdn_kernels/py.typed"}) == [
        "wheel lacks gdn_kernels/py.typed"
    ]
    licence = {name for name in WHEEL if name.endswith("LICENSE")}
    assert check_distribution.problems(PACKAGE, SDIST, WHEEL - licence) == ["wheel lacks its licence"]


def test_a_file_too_many_in_the_wheel_is_found():
    assert check_distribution.problems(PACKAGE, SDIST, WHEEL | {"tests/test_op.py"}) == ["wheel holds tests/test_op.py"]
