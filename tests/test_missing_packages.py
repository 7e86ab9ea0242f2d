"""A machine that lacks what grammars need: requests without one run there, and a grammar is refused by name."""

import sys
from pathlib import Path

import pytest

from worker.grammar.errors import GrammarError
from worker.grammar.requests import RequestGrammars
from worker.grammar.specs import regex_grammar
from worker.types import EngineRequest, SamplingParams

IMPORTERS = ("compiler", "library", "matcher", "starts")


def test_without_its_package_a_grammar_is_refused_by_name_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for name in IMPORTERS:
        monkeypatch.delitem(sys.modules, f"worker.grammar.{name}", raising=False)
    grammars = RequestGrammars(Path(), 512, [2])
    plain = EngineRequest("plain", [1], SamplingParams(4))
    held = EngineRequest("held", [1], SamplingParams(4, grammar=regex_grammar("a+")))
    assert grammars.prepare(plain) is None
    assert grammars.prepare(held) is None
    assert grammars.matchers(plain, [[]]) == {}
    with pytest.raises(GrammarError, match="llguidance is not installed"):
        grammars.matchers(held, [[]])
    grammars.close()
