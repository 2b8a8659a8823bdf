"""The types that clients ask for as answers and as arguments, for those that take pydantic's."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Structure(BaseModel):
    """A data structure."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    kind: Literal["list", "set"]
    size: int = Field(ge=0, le=99)
    done: bool


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Köln", "Bonn"]
    days: int = Field(ge=1, le=9)
