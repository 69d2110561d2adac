"""The layout check finds each kind of problem in a tree made for it."""

import check_layout
import pytest


def test_a_sibling_range_left_behind_by_a_version_is_found(tree):
    check_layout.about(tree, "gdn-kernels").write_text('__version__ = "0.2.0"\n')
    assert [line.split(" needs ")[0] for line in check_layout.problems(tree)] == ["gdn-cp", "gdn-models"]


@pytest.mark.parametrize(("patch", "admitted"), [(0, False), (2, True), (3, True)])
def test_a_range_may_start_at_a_patch_that_exists(tree, patch, admitted):
    check_layout.about(tree, "gdn-kernels").write_text(f'__version__ = "0.1.{patch}"\n')
    path = tree / "packages/gdn-cp/pyproject.toml"
    path.write_text(path.read_text().replace("gdn-kernels>=0.1,", "gdn-kernels>=0.1.2,"))
    assert (check_layout.problems(tree) == []) == admitted


def test_a_sibling_with_an_extra_has_a_range_too(tree):
    path = tree / "packages/gdn-models/pyproject.toml"
    extra = '[project.optional-dependencies]\nfla = ["gdn-cp[fla]>=0.1,<{}"]\n'
    given = path.read_text()
    path.write_text(given + extra.format("0.2"))
    assert check_layout.problems(tree) == []
    path.write_text(given + extra.format("0.3"))
    assert [line.split(",")[0] for line in check_layout.problems(tree)] == ["gdn-models needs gdn-cp>=0.1"]


def test_a_sibling_pinned_or_unbounded_is_found(tree):
    path = tree / "packages/gdn-models/pyproject.toml"
    text = (
        path.read_text()
        .replace("gdn-cp>=0.1,<0.2", "gdn-cp==0.1.0")
        .replace("gdn-kernels>=0.1,<0.2", "gdn-kernels>=0.1")
    )
    path.write_text(text)
    assert [line.split(",")[0] for line in check_layout.problems(tree)] == [
        "gdn-models needs gdn-cp==0.1.0",
        "gdn-models needs gdn-kernels>=0.1",
    ]


def test_a_version_that_is_no_version_ends_the_check(tree):
    check_layout.about(tree, "gdn-cp").write_text('__version__ = "next"\n')
    with pytest.raises(SystemExit, match="has no line"):
        check_layout.problems(tree)


@pytest.mark.parametrize("name", ["halo.feature.md", "Halo.added.md", "halo.md", "README.md"])
def test_a_fragment_that_no_release_collects_is_found(tree, name):
    (tree / "packages/gdn-cp/changelog.d" / name).write_text("x")
    assert f"{name} is not" in check_layout.problems(tree)[0]


@pytest.mark.parametrize("kind", check_layout.KINDS)
def test_a_fragment_of_each_kind_is_taken_by_the_check_and_by_towncrier(tree, kind):
    (tree / f"packages/gdn-cp/changelog.d/halo.{kind}.md").write_text("x")
    assert check_layout.problems(tree) == []
    assert f'directory = "{kind}"' in (tree / "packages/gdn-cp/pyproject.toml").read_text()


def test_a_test_without_a_source_is_found(tree):
    (tree / "packages/gdn-models/tests/test_nothing.py").write_text("")
    assert "test_nothing.py mirrors no source" in check_layout.problems(tree)[0]


@pytest.mark.parametrize(
    "name",
    ["test_halo.py", "test_halo_errors.py", "sub/test_wave.py", "test_sub.py", "test_oracle.py", "test_import.py"],
)
def test_a_test_of_a_source_folder_or_support_module_is_in_order(tree, name):
    source, tests = tree / "packages/gdn-cp/src/gdn_cp", tree / "packages/gdn-cp/tests"
    for folder in (source, tests):
        (folder / "sub").mkdir()
    for path in (source / "halo.py", source / "sub/wave.py", tests / "oracle.py", tests / name):
        path.write_text("")
    assert check_layout.problems(tree) == []


@pytest.mark.parametrize(
    "text",
    [
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed.device_mesh import DeviceMesh",
        "import torch\ntorch.distributed.barrier()",
        "if True:\n    import torch.distributed",
    ],
)
def test_a_second_user_of_torch_distributed_is_found_once(tree, text):
    (tree / "packages/gdn-cp/src/gdn_cp/halo.py").write_text(f"{text}\n")
    (problem,) = check_layout.problems(tree)
    assert "only gdn_cp/collectives.py may" in problem


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gdn-cp/src/gdn_cp/collectives.py", "import torch.distributed"),
        ("gdn-cp/src/gdn_cp/context.py", "if TYPE_CHECKING:\n    from torch.distributed import ProcessGroup"),
        ("gdn-cp/src/gdn_cp/context.py", "from torch.distributions import Normal"),
    ],
)
def test_the_one_user_and_annotations_are_in_order(tree, name, text):
    (tree / "packages" / name).write_text(f"{text}\n")
    assert check_layout.problems(tree) == []


def test_a_licence_of_its_own_is_found(tree):
    (tree / "packages/gdn-cp/LICENSE").write_text("mine")
    assert check_layout.problems(tree) == ["packages/gdn-cp/LICENSE is not a copy of LICENSE"]


def test_a_public_name_without_a_place_in_the_documentation_is_found(tree):
    (tree / "packages/gdn-cp/src/gdn_cp/__init__.py").write_text('__all__ = ["Halo"]\n')
    assert check_layout.problems(tree) == [
        "gdn_cp.Halo is not in docs/api/cp.md",
        "docs/api/cp.md lists gdn_cp.Gate, not public",
    ]
