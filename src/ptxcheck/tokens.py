"""PTX text to tokens with their lines."""

import re
from dataclasses import dataclass

from ptxcheck.syntax import PtxError

TOKEN = re.compile(
    r"""
    (?P<space>\s+|//[^\n]*|/\*.*?\*/)
  | (?P<string>"[^"\n]*")
  | (?P<float>0[fF][0-9a-fA-F]{8}(?![0-9a-fA-F])|0[dD][0-9a-fA-F]{16}(?![0-9a-fA-F])|\d+\.\d*(?:[eE][+-]?\d+)?)
  | (?P<number>0[xX][0-9a-fA-F]+U?|0[bB][01]+U?|\d+U?(?![\w.]))
  | (?P<directive>\.[A-Za-z_]\w*(?:::\w+)*)
  | (?P<word>[A-Za-z_$%][\w$]*(?:(?:\.|::)\w+)*)
  | (?P<mark>[{}()\[\]<>,;:|+\-!@=])
    """,
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True)
class Token:
    kind: str
    text: str
    line: int
    start: int
    end: int


def tokenize(text: str) -> list[Token]:
    """Tokens without white space and comments. Raises PtxError at a character that starts none."""
    tokens: list[Token] = []
    place, line = 0, 1
    while place < len(text):
        match = TOKEN.match(text, place)
        if match is None:
            raise PtxError(line, text[place : place + 40].split("\n")[0], "no PTX token starts here")
        if match.lastgroup != "space":
            tokens.append(Token(str(match.lastgroup), match.group(), line, place, match.end()))
        line += match.group().count("\n")
        place = match.end()
    return tokens
