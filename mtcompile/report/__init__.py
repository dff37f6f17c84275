"""Plans, schedules and steps explained: text, tables, graphs, traces for Perfetto and timelines of running models."""
