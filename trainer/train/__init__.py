"""What runs once per rank: data, model, loop, checkpoints, metrics. Never imports submitit or the other rooms.

Only `__main__` reads the config; every other module takes plain arguments, so a script of your own can import the parts.
"""
