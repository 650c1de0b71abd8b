"""A run of all tests (`make test`, `make test-python`) draws engines, cases and kernels. A run of selected tests draws nothing, unless
--drawn is given. The conftest.py of tests/python and of tests/nvrtc say what is drawn from."""

import pytest

# The options of pytest that select tests.
CHOICES = ("keyword", "markexpr", "lf", "failedfirst", "stepwise")


def pytest_addoption(parser):
    parser.addoption("--drawn", action="store_true", help="draw engines, cases and kernels of chosen tests, too, as `make test` does")


def pytest_configure(config):
    """Workers of pytest-xdist get all options. An environment variable would reach the programs that tests start, too."""
    if config.args_source == pytest.Config.ArgsSource.TESTPATHS and not any(getattr(config.option, x, None) for x in CHOICES):
        config.option.drawn = True
