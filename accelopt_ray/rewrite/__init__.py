"""The offline rewriter: a rule-based optimiser that answers as a language model would, with text."""
