"""Programs that use the library: the ``strobe`` command (cli), and what it runs of a size of its own (bench, figures, train)."""
