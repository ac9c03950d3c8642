# Its arguments have no annotations: what a checker infers from their defaults is narrower than what they take.
from typing import Any

def __getattr__(name: str) -> Any: ...
