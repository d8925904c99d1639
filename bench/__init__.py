"""What is measured against peers, each with one command: `python -m bench.NAME --json`."""
