"""A GPT that learns real text through Strobe's attention: ``strobe train`` on the command line."""

from strobe_tools.train.config import CONFIGS, Config

__all__ = ["CONFIGS", "Config"]
