"""Ray around the library: thin actors that give the search its services. The only package that imports Ray."""
