"""Schedules as pages to look at: lanes of what runs when, and below them the memory it holds, in one HTML file."""
