"""Programs that use the library: the ``strobe`` command (cli), and its larger parts (bench, figures, train)."""
