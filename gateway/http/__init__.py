"""HTTP/1.1 from the socket: connections, exchanges, and what is refused."""
