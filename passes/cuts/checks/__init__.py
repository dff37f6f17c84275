"""Proves that cut joint graphs compute what the whole ones do: each check numbers both by its own rules, and is of no rewriter."""
