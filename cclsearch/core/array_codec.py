"""Arrays as short texts, for fields of models and dataclasses that are stored as JSON."""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass
from typing import Any, get_origin

import numpy as np
from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from cclsearch.core.errors import UserError


@dataclass(frozen=True)
class Packed:
    """Mark a field, `Annotated[NDArray[...], Packed(kind)]`, as stored in base 64 of its deflated bytes.

    A field of type `tuple[int, ...]` can be stored in this way too. Reading raises UserError for another text.
    """

    kind: type[np.generic]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        as_tuple = get_origin(source) is tuple

        def unpack(packed: Any) -> Any:
            if not isinstance(packed, str):
                return packed
            try:
                numbers = np.frombuffer(zlib.decompress(base64.b64decode(packed)), dtype=self.kind)
            except (ValueError, zlib.error) as error:
                raise UserError(f"the numbers of a turn record cannot be read: {error}") from None
            return tuple(numbers.tolist()) if as_tuple else numbers

        serialize = core_schema.plain_serializer_function_ser_schema(self._pack)
        return core_schema.no_info_plain_validator_function(unpack, serialization=serialize)

    def _pack(self, numbers: Any) -> str:
        return base64.b64encode(zlib.compress(np.ascontiguousarray(numbers, dtype=self.kind).tobytes())).decode()
