"""Proves that cut joint graphs compute what the whole ones do: each check numbers both, and shares no code with a cut."""
