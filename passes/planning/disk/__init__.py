"""Planning with a disk: what goes there when the host has not the room, and how far ahead it is read."""
