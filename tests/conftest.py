"""Where all tests run (`make test`, `make test-python`), engines, cases and kernels are drawn. Tests that are chosen run whole, unless
--drawn is given. What is drawn from is said in the conftest.py of tests/python and of tests/nvrtc."""

import pytest

# Options that choose tests: what is chosen is meant.
CHOICES = ("keyword", "markexpr", "lf", "failedfirst", "stepwise")


def pytest_addoption(parser):
    parser.addoption("--drawn", action="store_true", help="draw engines, cases and kernels of chosen tests, too, as `make test` does")


def pytest_configure(config):
    """Workers of pytest-xdist get all options. An environment variable would reach the programs that tests start, too."""
    if config.args_source == pytest.Config.ArgsSource.TESTPATHS and not any(getattr(config.option, x, None) for x in CHOICES):
        config.option.drawn = True
