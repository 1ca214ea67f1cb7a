"""How records are validated: no unknown fields, no NaN or infinity."""

from pydantic import ConfigDict

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
