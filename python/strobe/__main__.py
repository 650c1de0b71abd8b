"""``python -m strobe`` is the ``strobe`` command."""

from strobe_tools.cli import main

main()
