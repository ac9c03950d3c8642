# pyarrow ships no types: most of it is compiled. Everything that comes out of it is Any, for every type checker alike,
# and is named again at our own signatures.
from typing import Any

def __getattr__(name: str) -> Any: ...
