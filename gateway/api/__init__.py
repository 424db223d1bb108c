"""Pure translation of every API: request bodies to calls, frames to events and answers."""
