"""Real engines for the tests: machines in namespaces on a switch of their own, and what runs on them."""
