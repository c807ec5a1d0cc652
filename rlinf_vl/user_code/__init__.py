"""User code: functions, classes and objects that a name in a config leads to."""

from rlinf_vl.user_code.names import CodeError, Signature, check_code, is_code, load_code
from rlinf_vl.user_code.parent import end_with_parent
from rlinf_vl.user_code.proxies import THIS_HOST, bypass_proxies
from rlinf_vl.user_code.texts import collect_code, pickled

__all__ = [
    "THIS_HOST",
    "CodeError",
    "Signature",
    "bypass_proxies",
    "check_code",
    "collect_code",
    "end_with_parent",
    "is_code",
    "load_code",
    "pickled",
]
