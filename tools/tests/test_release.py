"""A release in a tree made for it: one commit, one tag, a changelog, and ranges that follow."""

import os
import subprocess
import sys
from pathlib import Path

import check_layout
import pytest
import release as release_module

IDENTITY = {f"GIT_{role}_{what}": "a@b.c" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


def run(*command: str, where: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **IDENTITY, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    return subprocess.run(command, cwd=where, env=environment, text=True, capture_output=True, timeout=60)


def release(tree: Path, package: str, version: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, str(check_layout.ROOT / "tools" / "release.py"), package, version, where=tree)


@pytest.fixture
def repository(tree: Path) -> Path:
    fragments = tree / "packages/gdn-kernels/changelog.d"
    (fragments / "gates.numerics.md").write_text("Gates are read in fp32.\n")
    (fragments / "masks.added.md").write_text("Masks of frames.\n")
    for command in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "start")):
        assert run("git", *command, where=tree).returncode == 0
    return tree


def test_a_patch_is_committed_tagged_and_described(repository):
    done = release(repository, "gdn-kernels", "0.1.1")
    assert done.returncode == 0, done.stderr
    assert run("git", "log", "-1", "--format=%s %D", where=repository).stdout.endswith("tag: gdn-kernels-v0.1.1\n")
    assert run("git", "log", "-1", "--format=%s", where=repository).stdout == "gdn-kernels 0.1.1\n"
    assert run("git", "status", "--porcelain", where=repository).stdout == ""
    changed = run("git", "show", "--stat=200", "--format=", where=repository).stdout
    assert "gdn-cp" not in changed
    assert "gdn-models" not in changed
    changelog = (repository / "packages/gdn-kernels/CHANGELOG.md").read_text()
    title, added, numerics = (
        changelog.index(text) for text in ("## 0.1.1 (", "### Added\n\n- Masks", "### Numerics\n\n- Gates")
    )
    assert title < added < numerics
    assert check_layout.version(repository, "gdn-kernels") == (0, 1, 1)


def test_a_minor_version_moves_the_ranges_of_dependents(repository):
    assert release(repository, "gdn-kernels", "0.2.0").returncode == 0
    assert check_layout.problems(repository) == []
    assert check_layout.sibling_ranges(repository, "gdn-cp") == [("gdn-kernels", ">=0.2,<0.3")]
    assert set(check_layout.sibling_ranges(repository, "gdn-models")) == {
        ("gdn-cp", ">=0.1,<0.2"),
        ("gdn-kernels", ">=0.2,<0.3"),
    }


def test_a_moved_range_keeps_its_extra(repository):
    release_module.set_version(repository, "gdn-cp", "0.2.0")
    declared = (repository / "packages/gdn-models/pyproject.toml").read_text()
    assert '"gdn-cp>=0.2,<0.3"' in declared
    assert '"gdn-cp[fla]>=0.2,<0.3"' in declared
    assert check_layout.problems(repository) == []


def test_a_second_release_goes_above_the_first(repository):
    assert release(repository, "gdn-kernels", "0.1.1").returncode == 0
    fragments = repository / "packages/gdn-kernels/changelog.d"
    fragments.mkdir(exist_ok=True)
    (fragments / "scan.fixed.md").write_text("The scan of one frame.\n")
    run("git", "add", "-A", where=repository)
    run("git", "commit", "-qm", "more", where=repository)
    assert release(repository, "gdn-kernels", "0.1.2").returncode == 0
    changelog = (repository / "packages/gdn-kernels/CHANGELOG.md").read_text()
    assert changelog.startswith("# Changelog of gdn-kernels\n")
    assert changelog.index("## 0.1.2 (") < changelog.index("## 0.1.1 (")


@pytest.mark.parametrize(
    ("package", "version", "sentence"),
    [
        ("gdn-kernels", "1", "Release one package"),
        ("gdn-kernel", "0.1.1", "no package 'gdn-kernel'"),
        ("gdn-kernels", "0.0.9", "gdn-kernels is beyond 0.0.9"),
        ("gdn-cp", "0.1.1", "gdn-cp has no changelog fragment"),
    ],
)
def test_what_cannot_be_released_is_refused_and_nothing_written(repository, package, version, sentence):
    done = release(repository, package, version)
    assert done.returncode != 0
    assert sentence in done.stderr
    assert run("git", "status", "--porcelain", where=repository).stdout == ""


def test_a_tree_with_changes_is_refused(repository):
    (repository / "note.txt").write_text("mine")
    done = release(repository, "gdn-kernels", "0.1.1")
    assert "changes that are not committed" in done.stderr
    assert run("git", "tag", where=repository).stdout == ""
