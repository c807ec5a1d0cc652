"""Code from outside the package, by a name in a config."""

from rlinf_vl.code.names import CodeError, Signature, check_code, is_code, load_code
from rlinf_vl.code.texts import collect_code, pickled

__all__ = ["CodeError", "Signature", "check_code", "collect_code", "is_code", "load_code", "pickled"]
