"""What can go wrong with a grammar. The texts are for clients."""


class GrammarError(ValueError):
    """The grammar cannot be used here: wrong, unsupported, too large or too costly."""


class GrammarBusyError(RuntimeError):
    """Nobody could look at the grammar in time. The same one may pass a little later."""
