"""Whose request it is: the value of the header that the operator named."""

import re
from collections.abc import Mapping

from deployments.protocol.errors import bad_request

TENANT_PATTERN = r"^[A-Za-z0-9._:@/-]{1,64}$"
_TENANT = re.compile(TENANT_PATTERN)


def tenant_of(headers: Mapping[str, str], header_name: str | None) -> str:
    """The tenant, "" where no header is named or the request lacks it. Raises ApiError for a value that is no name."""
    value = headers.get(header_name, "") if header_name is not None else ""
    if value and not _TENANT.fullmatch(value):
        raise bad_request(f"header {header_name}: must be 1 to 64 letters, digits or any of ._:@/-", header_name)
    return value
