"""Other APIs as pure translations: a client's body into a chat's, and answers into the client's events."""
