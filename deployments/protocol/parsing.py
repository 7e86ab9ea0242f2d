"""From a JSON object to a checked body: the fields that are refused by name, those that nobody knows, the model's own
checks. Knows no fields itself.
"""

import logging
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from deployments.protocol.errors import from_validation, not_supported

logger = logging.getLogger(__name__)

BodyT = TypeVar("BodyT", bound=BaseModel)
#: by field: the values that ask for nothing, and what every other value asks for
Refusals = Mapping[str, tuple[tuple[Any, ...], str]]

_MAX_NAMED_UNKNOWN_FIELDS = 20


def parse_body(kind: type[BodyT], body: Mapping[str, Any], refused: Refusals) -> BodyT:
    """Raises ApiError that names the field."""
    refuse(body, refused)
    known = kind.model_fields.keys() | refused.keys()
    unknown = [name for name in body if name not in known]
    if unknown:
        # Names alone, bounded and escaped: values are the client's own matter.
        names = ", ".join(repr(name[:64]) for name in unknown[:_MAX_NAMED_UNKNOWN_FIELDS])
        logger.warning("ignored %d unknown request fields: %s", len(unknown), names)
    try:
        return kind.model_validate(dict(body))
    except ValidationError as error:
        raise from_validation(error, body) from None


def refuse(body: Mapping[str, Any], refused: Refusals) -> None:
    for name, (neutral, what) in refused.items():
        value = body.get(name)
        # `0 == False`, but they are not the same to a client
        if not any(value == allowed and type(value) is type(allowed) for allowed in neutral):
            raise not_supported(name, what)
