"""Run Kimi K3 from the checkpoint as released."""

__version__ = "0.1.0"
