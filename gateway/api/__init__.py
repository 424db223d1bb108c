"""Every API as pure translation: bodies into calls, frames into events and answers."""
