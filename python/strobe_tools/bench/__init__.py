"""``strobe bench``: speed, beside others in the same run."""
