"""A result as one HTML file without references: what a user hands in when reporting figures.

Owns the page. Its tables are those of the terminal, its picture that of `plots.py`, and the whole result is in it.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping
from typing import Any

from .plots import picture, title
from .result import Figure

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
pre { font-size: 13px; line-height: 1.35; overflow-x: auto; background: #f4f4f4; padding: 0.8rem; }
img { max-width: 100%; }
"""


def page(result: Mapping[str, Any], figures: Mapping[str, Figure], text: str) -> str:
    """The file: `text` are the tables, the picture as PNG, then facts and the result as JSON."""
    image = base64.b64encode(picture(result, figures)).decode("ascii")
    heading = html.escape(title(result))
    facts = {name: result.get(name) for name in ("machine", "versions", "model", "runs_on", "options")}
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>k3mlx bench: {heading}</title><style>{_STYLE}</style>
<h1>k3mlx bench</h1><p>{heading}</p>
<pre>{html.escape(text)}</pre>
<img alt="plots of this result" src="data:image/png;base64,{image}">
<h2>What it ran on</h2>
<pre>{html.escape(json.dumps(facts, indent=1, ensure_ascii=False))}</pre>
<details><summary>The result as JSON (for --compare)</summary>
<pre>{html.escape(json.dumps(result, indent=1, ensure_ascii=False))}</pre></details>
</html>
"""
