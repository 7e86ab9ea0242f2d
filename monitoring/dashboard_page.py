"""The dashboard as one HTML document with everything in it: it loads nothing from anywhere and needs no build step.

Its parts lie in `monitoring/web`. The charts are uPlot's (MIT), shipped beside them.
"""

import base64
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

_STYLES = ("uPlot.min.css", "dashboard.css")
_SCRIPTS = ("uPlot.iife.min.js", "format.js", "steps.js", "lives.js", "dashboard.js")


@dataclass(frozen=True, slots=True)
class Page:
    html: str
    content_security_policy: str


@cache
def dashboard_page() -> Page:
    """Runs only the scripts it came with, and asks only the server it came from."""
    styles = "".join(f"<style>{_text(name)}</style>" for name in _STYLES)
    sources = [_text(name) for name in _SCRIPTS]
    scripts = "".join(f"<script>{source}</script>" for source in sources)
    html = _text("dashboard.html").replace("<!-- styles -->", styles).replace("<!-- scripts -->", scripts)
    hashes = " ".join(f"'sha256-{_digest(source)}'" for source in sources)
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Page(html, policy)


def _text(name: str) -> str:
    text = files("monitoring").joinpath("web", name).read_text(encoding="utf-8")
    assert "</script" not in text.lower() or name.endswith(".html"), f"{name} would end its own element"
    return text


def _digest(source: str) -> str:
    return base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
