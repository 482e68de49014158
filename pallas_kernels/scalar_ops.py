"""Scalar instructions of a schedule as Python expressions on 32-bit integers and truth values.

A value that the vector unit computed is `UNKNOWN`: Python's operators carry it through the
expressions, so that none of them asks for it.
"""

import re
from typing import Any

_HALF, _MASK = 1 << 31, (1 << 32) - 1
_PREDICATE = re.compile(r"\((!?)%p\d+_(p\d+)(?:, %[sp]\d+_([sp]\d+))?\),?")


class _Unknown:
  """A value of the vector unit. It spreads, it is no address, and no predicate that holds."""

  def _same(self, *_):
    return self

  __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __xor__ = __rxor__ = _same
  __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _same
  __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _same
  __hash__ = object.__hash__

  def __bool__(self):
    return False

  def __and__(self, other):
    return False if other is False else self

  def __or__(self, other):
    return True if other is True else self

  __rand__, __ror__ = __and__, __or__


UNKNOWN: Any = _Unknown()


def guard(text: str) -> tuple[str, str, str]:
  """Operands, the condition of a predicated instruction, and the register it takes instead."""
  match = _PREDICATE.search(text)
  if not match:
    return text, "", ""
  condition = f"({match[2]} ^ True)" if match[1] else match[2]
  return text[: match.start()] + text[match.end() :], condition, match[3] or ""


def plain(text: str) -> str:
  """Operands without their names and without the buffer that an address is said to lie in."""
  return re.sub(r"(%s\d+_s\d+) \[#\w+[^\]]*\]", r"\1", re.sub(r"/\*\w+=\*/", "", text))


def signed(value: int) -> int:
  """The 32-bit integer with the bits of `value`."""
  return (value + _HALF & _MASK) - _HALF


def wrapped(expression: str) -> str:
  """Expression of the 32-bit integer with the bits of another."""
  return f"(({expression}) + {_HALF} & {_MASK}) - {_HALF}"


def minimum(a: Any, b: Any) -> Any:
  """The smaller one."""
  return UNKNOWN if UNKNOWN in (a, b) else min(a, b)


def maximum(a: Any, b: Any) -> Any:
  """The larger one."""
  return UNKNOWN if UNKNOWN in (a, b) else max(a, b)


_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_FORMS = {
    "scmp": "",
    "sadd": "({0}) + ({1})",
    "ssub": "({0}) - ({1})",
    "smul": "({0}) * ({1})",
    "smulhi": f"(({{0}}) & {_MASK}) * (({{1}}) & {_MASK}) >> 32",
    "sshll": "({0}) << ({1})",
    "sshrl": f"(({{0}}) & {_MASK}) >> ({{1}})",
    "sshra": "({0}) >> ({1})",
    "sand": "({0}) & ({1})",
    "sor": "({0}) | ({1})",
    "sxor": "({0}) ^ ({1})",
    "smin": "_min({0}, {1})",
    "smax": "_max({0}, {1})",
    "por": "({0}) | ({1})",
    "pand": "({0}) & ({1})",
    "pxor": "({0}) ^ ({1})",
    "pnand": "(({0}) & ({1})) ^ True",
    "pnor": "(({0}) | ({1})) ^ True",
}
_WRAPS = frozenset(name for name in _FORMS if name.startswith("s") and name != "scmp")


def binary(operation: str, kind: str, arguments: list[str]) -> str | None:
  """Expression of an instruction of two operands, None if it has no meaning here.

  Args:
    operation: "sadd", "scmp" and so on.
    kind: what follows behind a dot, "s32" or "ge.s32.totalorder".
    arguments: expressions of the operands.
  """
  form = _FORMS.get(operation)
  if form is None or re.search(r"b?f\d+", kind) or len(arguments) != 2:
    return None
  if operation == "scmp":
    form = f"({{0}}) {_COMPARISONS[kind.partition('.')[0]]} ({{1}})"
  if "u32" in kind and operation in ("scmp", "smin", "smax"):
    arguments = [f"({each}) & {_MASK}" for each in arguments]
  expression = form.format(*arguments)
  return wrapped(expression) if operation in _WRAPS else expression
