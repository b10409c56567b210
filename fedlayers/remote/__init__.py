"""A federation whose clients keep their data: the server, the sites, and the packets between them."""
