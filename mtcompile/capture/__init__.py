"""From a module's Python to graphs: Dynamo's front end, what it captured, and the joint (forward and backward) ATen graph."""
