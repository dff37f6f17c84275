"""Models by name: built-in decoder shapes, Hugging Face configurations and factories in files."""
