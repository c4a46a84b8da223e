"""An OpenAI-compatible server: HTTP on one side, an engine's sessions on the other.

`app.py` is what a request meets first, `requests.py` reads bodies, `worker.py` owns the engine and does one
answer at a time, `wire.py` writes what OpenAI's clients expect. Needs the extra `server`.
"""
