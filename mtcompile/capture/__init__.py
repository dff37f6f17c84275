"""Captures a module's Python as graphs: Dynamo's front end, descriptions of its graphs, and their joint ATen graphs."""
