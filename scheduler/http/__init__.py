"""HTTP/1.1 on sockets: connections, requests and answers as bytes, and their limits; routes are in scheduler/api."""
