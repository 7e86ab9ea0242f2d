"""The OpenAPI page for people: one plain HTML document without scripts, so that it works where no network is."""

from html import escape
from typing import Any

_STYLE = """
body { font: 1rem/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }
code, .method { font-family: ui-monospace, monospace; }
.method { font-weight: bold; margin-right: .5rem; }
table { border-collapse: collapse; width: 100%; }
td, th { border-bottom: 1px solid #8884; padding: .2rem .5rem; text-align: left; vertical-align: top; }
:root { color-scheme: light dark; }
"""
#: the page loads nothing and runs nothing
CONTENT_SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def docs_page(document: dict[str, Any]) -> str:
    """HTML of an OpenAPI document."""
    schemas = document["components"]["schemas"]
    info = document["info"]
    sections = [
        _operation(method, path, operation, schemas)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    title = f"{info['title']} {info['version']}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1><p>{escape(info['description'])}</p>"
        f"{''.join(sections)}</body></html>"
    )


def _operation(method: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    parts = [f'<h2><span class="method">{method.upper()}</span><code>{escape(path)}</code></h2>']
    if text := operation.get("description") or operation.get("summary"):
        parts.append(f"<p>{escape(text)}</p>")
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body is not None:
        parts.append(_fields(_resolved(body, schemas)))
    answers = [f"{status}: {answer['description']}" for status, answer in operation["responses"].items()]
    parts.append(f"<ul>{''.join(f'<li>{escape(answer)}</li>' for answer in answers)}</ul>")
    return "".join(parts)


def _fields(schema: dict[str, Any]) -> str:
    required = schema.get("required", [])
    rows = [
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(_type(field))}</td>"
        f"<td>{'required' if name in required else ''}</td></tr>"
        for name, field in schema["properties"].items()
    ]
    return f"<table><tr><th>field</th><th>type</th><th></th></tr>{''.join(rows)}</table>"


def _type(schema: dict[str, Any]) -> str:
    """A type in a few words."""
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(_type(choice) for choice in choices))
    if "enum" in schema:
        return ", ".join(str(value) for value in schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    bounds = [f"{sign} {schema[key]}" for key, sign in _BOUNDS.items() if key in schema]
    return " ".join([schema.get("type", "any"), *bounds])


_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<", "maxLength": "length ≤"}


def _resolved(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    resolved: dict[str, Any] = schemas[name] if name else schema
    return resolved
