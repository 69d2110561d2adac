"""Which calls are compiled: a choice that takes minutes, or with ``--all-rows`` everything."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-rows", action="store_true", help="compile every row for every target and width: hours")
