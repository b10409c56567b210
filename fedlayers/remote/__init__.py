"""A federation whose clients keep their data: what crosses between the server and the sites, and both their sides."""
