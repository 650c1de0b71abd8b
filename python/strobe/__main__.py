"""``python -m strobe`` is the ``strobe`` command."""

from strobe.cli import main

main()
