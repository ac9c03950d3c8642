# pyarrow makes the functions of this module at import, from its registry: a type checker cannot see them.
from typing import Any

def __getattr__(name: str) -> Any: ...
