"""``strobe bench``: Strobe's speed beside other attentions, in the same run."""
