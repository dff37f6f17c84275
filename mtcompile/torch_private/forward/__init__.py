"""What Dynamo makes of a forward's own doings."""
