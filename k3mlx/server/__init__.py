"""An OpenAI-compatible server: HTTP on one side, an engine's sessions on the other.

A request passes `guard.py`, `app.py` and `requests.py` and becomes a job of `worker.py`, whose thread owns the
engine and does one job at a time; `answers.py` and `wire.py` carry the answer back. Needs the extra `server`.
"""
