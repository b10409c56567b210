"""The site: pages made from what is in the repository, built by Sphinx, and their links checked."""
